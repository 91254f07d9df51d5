"""A real ``distkit-run``, seen from outside: its processes, its saves, and signals to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["Run", "command_line", "run_line", "state", "unfinished"]

MARKER = "DISTKIT_CHAOS_RUN"
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("train.py")
DEADLINE_S = 600.0


def run_line(run_dir: Path, strategy: str, nproc: int, dropout: float, *words: str) -> list[str]:
    """The command line of a training; ``words`` are further options of ``distkit-run``."""
    line = [sys.executable, "-m", "distkit.launch.command", "-s", strategy, "--nproc", str(nproc)]
    line += ["--run-dir", str(run_dir), "--set", "device=cpu", "--set", "log.every_steps=1"]
    return [*line, "--set", "timeouts.grace_s=10", *words, str(SCRIPT), "--dropout", str(dropout)]


def unfinished(folder: Path) -> Path | None:
    """The folder of the save that is under way."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".tmp-step-"):
                return folder / entry.name
    return None


class Run:
    """A training that was started.

    What belongs to it is found by a marker in the environment, which all that it starts inherits.

    Args:
        line: The command.
        run_dir: The run's folder.
        screen: File for what it prints.
    """

    def __init__(self, line: list[str], run_dir: Path, screen: Path) -> None:
        self.run_dir, self.screen = run_dir, screen
        self.checkpoints = run_dir / "checkpoints"
        self.marker = uuid.uuid4().hex
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DISTKIT_")}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**kept, MARKER: self.marker, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "NO_COLOR": "1"}
        self.before = unfinished(self.checkpoints)
        self._until = time.monotonic() + DEADLINE_S
        with screen.open("wb") as output:
            self.process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, cwd=screen.parent
            )

    # -- what it does -----------------------------------------------------------------------------------------------

    def wait(self) -> int:
        """Wait for the end of the launcher; its exit status, negative for a signal.

        Raises:
            TimeoutError: It goes on and on.
        """
        try:
            return self.process.wait(max(0.1, self._until - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"the run didn't end within {DEADLINE_S:g} s") from error

    @property
    def text(self) -> str:
        """What it has printed."""
        return self.screen.read_text(errors="replace")

    @property
    def ended(self) -> bool:
        """Whether the launcher has ended."""
        return self.process.poll() is not None

    def everything(self) -> str:
        """What it has printed, and the logs of all ranks."""
        return self.text + "".join(path.read_text(errors="replace") for path in self.run_dir.glob("logs/*.log"))

    def steps(self) -> list[int]:
        """Steps that were logged."""
        return [int(step) for step in re.findall(r"^step (\d+)/", self.text, re.MULTILINE)]

    def last_step(self) -> int:
        """The last step that was logged; 0 before the first."""
        return max(self.steps(), default=0)

    @property
    def lost_metrics(self) -> bool:
        """Whether it said that metrics.jsonl couldn't be written."""
        return "metrics.jsonl can't be written" in self.text

    def whole(self) -> set[str]:
        """Names of the checkpoints that have their final name."""
        return {path.name for path in self.checkpoints.glob("step-*")}

    def wait_for_steps(self, count: int) -> bool:
        """Wait until so many steps were logged; False if the run ended before."""
        while len(self.steps()) < count:
            if self._over():
                return False
            time.sleep(0.01)
        return True

    def stop_inside_save(self, nth: int, moment: float, everyone: bool) -> bool:
        """Stop rank 0, which names a checkpoint at the end of its save, so that a save is surely under way.

        Args:
            nth: In which save, counted from 1; a later one if that was missed, and earlier in it.
            moment: After which fraction of the time that the last save took.
            everyone: Stop all ranks.

        Returns:
            Whether it worked before the run ended.
        """
        seen: set[Path] = set()
        takes = 0.1
        while not self._over():
            folder = unfinished(self.checkpoints)
            if folder is None or folder in seen:
                time.sleep(0.001 if seen else 0.005)
                continue
            seen.add(folder)
            began = time.monotonic()
            if len(seen) >= nth:
                time.sleep(moment * takes)
                moment /= 4
                ranks = self.ranks()
                struck = [*ranks.values()] if everyone else [ranks[0]] if 0 in ranks else []
                self.freeze(struck)
                if struck and folder.is_dir():
                    return True
                self.send(struck, signal.SIGCONT)
            while folder.is_dir() and not self._over():
                time.sleep(0.001)
            takes = time.monotonic() - began
        return False

    def _over(self) -> bool:
        if time.monotonic() > self._until:
            raise TimeoutError(f"the run didn't come so far within {DEADLINE_S:g} s")
        return self.ended

    # -- its processes ----------------------------------------------------------------------------------------------

    def processes(self) -> Iterator[int]:
        """Ids of all its living processes, the launcher among them."""
        wanted = f"{MARKER}={self.marker}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                with suppress(OSError):
                    if wanted in (entry / "environ").read_bytes().split(b"\0") and state(int(entry.name)) != "Z":
                        yield int(entry.name)

    def ranks(self) -> dict[int, int]:
        """Process ids by rank."""
        found = {}
        for pid in self.processes():
            with suppress(OSError):
                words = command_line(pid).split()
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                rank = [v[5:] for v in variables if v.startswith(b"RANK=")]
                if "distkit.launch.worker" in words and rank:
                    found[int(rank[0])] = pid
        return found

    def left(self, seconds: float = 10.0) -> list[int]:
        """Processes that are still there when the time is over; the launcher's end takes its workers a moment later."""
        until = time.monotonic() + seconds
        while found := list(self.processes()):
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        return found

    @staticmethod
    def send(pids: list[int], number: signal.Signals) -> None:
        """Send a signal to each that is still there."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    @staticmethod
    def freeze(pids: list[int]) -> None:
        """Stop processes and wait until they are."""
        Run.send(pids, signal.SIGSTOP)
        until = time.monotonic() + 5
        while any(state(pid) not in ("T", "Z", "") for pid in pids) and time.monotonic() < until:
            time.sleep(0.0005)

    def close(self) -> None:
        """End whatever is left."""
        until = time.monotonic() + 10
        while (found := list(self.processes())) and time.monotonic() < until:
            self.send(found, signal.SIGKILL)
            time.sleep(0.02)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


def command_line(pid: int) -> str:
    """What a process was started with; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def state(pid: int) -> str:
    """The letter of a process's state, as in ps; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""
