"""What each process runs before the user's script: its log file, its error record, and its tie to the launcher.

``python -m distkit.launch.worker --run-dir DIR [--output all] [-m] script.py [the script's own arguments]``
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from distkit.errors import DistkitError
from distkit.launch.failure import ErrorRecord, record_path
from distkit.launch.output import RankOutput, redirect

__all__ = ["AGENT_VARIABLE", "ATTEMPT_VARIABLE", "LAUNCH_VARIABLE", "main", "write_order"]

AGENT_VARIABLE = "DISTKIT_AGENT_PID"
"""Process id of the agent; a worker whose parent is another process has been orphaned already."""

LAUNCH_VARIABLE = "DISTKIT_LAUNCH_ID"
"""Set where horovodrun or mpirun stands between this process and distkit-run; what the launch started has it in common."""

ATTEMPT_VARIABLE = "DISTKIT_ATTEMPT"
"""How many attempts the launcher made before; torchrun's agent counts its own besides."""

_END_WITHIN_S = 10.0
"""A rank that failed and can't end (a thread, a hanging process group) is ended after this time."""

_PR_SET_PDEATHSIG = 1
_PACKAGE = Path(__file__).resolve().parents[1]


def main(argv: list[str] | None = None) -> int:
    """Run the script as ``python script.py`` would.

    Args:
        argv: Command line; None is this process's.

    Returns:
        The exit status: 0, the script's own, 130 after KeyboardInterrupt, or 1 after an exception.
    """
    options = _parse(argv)
    _end_with_parent()
    process = _Process(options.run_dir, int(_variable("RANK", "0")), socket.gethostname())
    output = redirect(process.run_dir, process.rank, show=options.output == "all", header=process.header())
    if hasattr(signal, "SIGUSR2"):  # the launcher asks so where a rank that is late stands
        faulthandler.register(signal.SIGUSR2, file=output.file, all_threads=True)
    try:
        _run(options)
        return 0
    except SystemExit as ended:
        return process.system_exit(ended, output)
    except KeyboardInterrupt as error:
        process.record(error, output, exit_code=128 + signal.SIGINT)
        return 128 + signal.SIGINT
    except BaseException as error:
        process.record(error, output, exit_code=1, text=_report(error, output))
        faulthandler.dump_traceback_later(_END_WITHIN_S, exit=True, file=output.file)
        return 1
    finally:
        output.close()


@dataclass(frozen=True)
class _Process:
    """Which process this is, and how it says that it failed."""

    run_dir: Path
    rank: int
    host: str

    def header(self) -> str:
        """The line that begins an attempt in the log."""
        size = _variable("SIZE", "1")
        attempt = sum(int(os.environ.get(name) or 0) for name in (ATTEMPT_VARIABLE, "TORCHELASTIC_RESTART_COUNT"))
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        return f"rank {self.rank} of {size}, {self.host}, process {os.getpid()}, attempt {attempt}, {now}"

    def record(
        self, error: BaseException, output: RankOutput, *, exit_code: int, text: str = "", message: str | None = None
    ) -> None:
        """Leave the error for the agent; a full disk must not hide the error itself, so it goes to the screen then."""
        message = str(error) if message is None else message
        name = type(error).__name__
        found = ErrorRecord(self.rank, self.host, os.getpid(), time.time(), name, message, text, exit_code)
        try:
            found.write(self.run_dir)
        except OSError as failed:
            where = f"rank {self.rank}: {record_path(self.run_dir, self.rank)}"
            output.screen.write(f"{where} can't be written: {failed.strerror or failed}; the error itself:\n{text}")
            output.screen.flush()

    def system_exit(self, ended: SystemExit, output: RankOutput) -> int:
        """The exit status that Python would give, with a record of it when it isn't 0."""
        if ended.code is None or ended.code == 0:
            return 0
        code, message = (ended.code, "") if isinstance(ended.code, int) else (1, str(ended.code))
        if message:
            sys.stderr.write(message + "\n")
        self.record(ended, output, exit_code=code & 0xFF, message=message)
        return code


def _variable(what: str, default: str) -> str:
    """This process's RANK or SIZE, by the variables of whatever started it (distkit.world needs torch)."""
    torchrun = {"RANK": "RANK", "SIZE": "WORLD_SIZE"}[what]
    slurm = {"RANK": "SLURM_PROCID", "SIZE": "SLURM_STEP_NUM_TASKS"}[what]
    names = (torchrun, f"HOROVOD_{what}", f"OMPI_COMM_WORLD_{what}", f"PMI_{what}", slurm)
    return next((os.environ[name] for name in names if os.environ.get(name)), default)


def write_order(path: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Write the file for ``--order``, which stands in place of all arguments; only this user can read it.

    Args:
        path: Where.
        arguments: This module's own.
        environment: Variables that are set.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump({"arguments": list(arguments), "environment": dict(environment)}, file)


def _follow_order(argv: Sequence[str]) -> list[str]:
    """Replace ``--order FILE`` by what is in the file."""
    if argv[:1] != ["--order"]:
        return list(argv)
    order = json.loads(Path(argv[1]).read_text(encoding="utf-8"))
    os.environ.update(order["environment"])
    return [str(word) for word in order["arguments"]]


def _parse(argv: list[str] | None) -> argparse.Namespace:
    argv = _follow_order(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m distkit.launch.worker")
    parser.add_argument("--run-dir", type=Path, required=True, help="The run's folder.")
    parser.add_argument("--output", choices=("main", "all"), default="main", help="Which ranks show their output.")
    parser.add_argument("-m", dest="module", action="store_true", help="The script is a module.")
    parser.add_argument("script", help="Path, or a module's name with -m.")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="The script's own arguments.")
    return parser.parse_args(argv)


def _end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even by SIGKILL (Linux; prctl(2), PR_SET_PDEATHSIG).

    The parent is the agent, or a daemon of mpirun or horovodrun, on every host.
    """
    agent = os.environ.pop(AGENT_VARIABLE, None)
    if agent is None and LAUNCH_VARIABLE in os.environ:
        agent = str(os.getppid())
    if agent is None or not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(agent):  # it died before the call above
        os._exit(128 + signal.SIGKILL)


def _run(options: argparse.Namespace) -> None:
    """The script in this process, with ``sys.argv`` and ``sys.path`` as Python itself would set them."""
    sys.argv = [options.script, *options.arguments]
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        return
    # `python -m` put the working directory first; `python script.py` puts the script's folder there.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(options.script).resolve().parent)
    runpy.run_path(options.script, run_name="__main__")


def _report(error: BaseException, output: RankOutput) -> str:
    """Write the traceback to the log; on the screen the agent shows it, once and last.

    Returns:
        The traceback as people need it.
    """
    error.__traceback__ = _own_frames(error.__traceback__)
    with contextlib.redirect_stderr(output.file):
        try:
            # Not always Python's own: torch.distributed sets one, and trackers do to learn of the crash.
            sys.excepthook(type(error), error, error.__traceback__)
        except Exception:
            sys.__excepthook__(type(error), error, error.__traceback__)
    return _format(error)


def _format(error: BaseException) -> str:
    """Without distkit's own frames for an error of distkit's, whose message says what to do."""
    if not isinstance(error, DistkitError):
        return "".join(traceback.format_exception(error))
    users = []
    for frame in traceback.extract_tb(error.__traceback__):
        if _PACKAGE in Path(frame.filename).parents:
            break
        users.append(frame)
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(users)] if users else []
    return "".join([*lines, f"{type(error).__name__}: {error}\n"])


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on: without this file and runpy."""
    while frames is not None:
        if frames.tb_frame.f_code.co_filename not in (__file__, runpy.__file__, "<frozen runpy>"):
            return frames
        frames = frames.tb_next
    return None


if __name__ == "__main__":
    sys.exit(main())
