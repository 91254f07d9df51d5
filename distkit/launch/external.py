"""Runs a launcher that isn't ours (horovodrun, mpirun), and ends and reports as our own does.

``python -m distkit.launch.external --run-dir DIR --grace-s 30 --processes 4 -- mpirun -np 4 ...``

These launchers start processes and pass their output on, but they don't say which rank's error came first, give a
checkpoint no time when they are asked to end, and may leave processes behind when one is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from distkit.errors import DistkitError, LaunchError
from distkit.launch.attempt import Attempt, catch_signals
from distkit.launch.failure import Failure, log_path
from distkit.launch.fleet import sweep_hosts
from distkit.launch.hosts import is_this_host
from distkit.launch.marked import is_worker, marked, rank_of, sweep
from distkit.launch.processes import end_with_parent
from distkit.launch.ssh import SshOptions
from distkit.launch.watch import HangWatch, is_timeout, late_failures
from distkit.launch.worker import LAUNCH_VARIABLE

__all__ = ["ExternalRun", "main"]

_PREFIX = re.compile(r"^\[\d+\]<std(?:out|err)>: ?")
"""What horovodrun puts before each line (horovod/runner/common/util/safe_shell_exec.py, prefix_stream)."""

_ENDS = (
    re.compile(r"^Process (?P<rank>\d+) exit with status code (?P<status>\d+)\."),
    re.compile(r"^srun: error: (?P<host>[^:]+): task (?P<rank>\d+): Exited with exit code (?P<status>\d+)"),
    re.compile(r"^srun: error: (?P<host>[^:]+): task (?P<rank>\d+): (?P<how>[A-Z][a-z ]+?)(?: \(core dumped\))?$"),
    re.compile(r"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on signal (?P<signal>\d+)"),
)
"""How horovodrun (gloo_run.py), Slurm's srun and Open MPI's mpirun say that a process ended, which is how a kill becomes known."""

_SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}
"""By the words that srun has for them."""

_HYDRA_KILL = re.compile(r"^YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .*\(signal (\d+)\)")
"""Hydra (MPICH 4.0.2) names the signal; the process id that it prints is that of any of the processes."""

_AFTER_TERM_S = 5.0
_READ_EVERY_S = 1.0
_ORPHANS_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher to its end.

    Args:
        argv: Command line; None is this process's.

    Returns:
        0 when all ended well; the exit status of the rank that failed first, 128 + signal if a signal killed it; 130
        after Ctrl-C and 143 after SIGTERM, unless the ranks ended with a status of their own.
    """
    options = _parse(argv)
    ssh = SshOptions(options.ssh_port, options.ssh_identity, tuple(options.ssh_option))
    run = ExternalRun(
        options.run_dir, options.processes, options.grace_s, step_s=options.step_s, hosts=options.host, ssh=ssh
    )
    catch_signals(run.handle)
    try:
        run.start(options.command)
        return run.conclude(run.wait())
    except DistkitError as error:
        sys.stderr.write(f"distkit-run: {error}\n")
        return 1
    finally:
        run.sweep()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m distkit.launch.external", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="The run's folder.")
    parser.add_argument("--grace-s", type=float, default=30.0, help="Seconds between asking ranks to end and killing.")
    parser.add_argument("--step-s", type=float, default=600.0, help="Time limit of a collective, in seconds.")
    parser.add_argument("--processes", type=int, required=True, help="Number of ranks in all.")
    parser.add_argument("--host", action="append", default=[], help="A host on which something may be left to end.")
    parser.add_argument("--ssh-port", type=int, help="Port of ssh there.")
    parser.add_argument("--ssh-identity", help="Private key for ssh.")
    parser.add_argument("--ssh-option", action="append", default=[], help="A further option of ssh, as KEY=VALUE.")
    parser.add_argument("command", nargs="+", help="The launcher's command line, after --.")
    return parser.parse_args(argv)


class ExternalRun(Attempt):
    """One run of a launcher, from its start to its end.

    Args:
        run_dir: The run's folder.
        processes: Number of ranks.
        grace_s: Between asking ranks to end and killing them, in seconds.
        step_s: Time limit of a collective, in seconds.
        hosts: Hosts that the launcher reaches over ssh, on which something may be left to end.
        ssh: How they are reached.
    """

    def __init__(
        self,
        run_dir: Path,
        processes: int,
        grace_s: float,
        *,
        step_s: float = 600.0,
        hosts: Sequence[str] = (),
        ssh: SshOptions | None = None,
    ) -> None:
        super().__init__(run_dir, processes, grace_s)
        self._hosts = [host for host in hosts if not is_this_host(host, os.uname().nodename)]
        self._ssh = ssh or SshOptions()
        self._watch = HangWatch(run_dir, processes, step_s)
        self._late: list[Failure] = []
        self._child: subprocess.Popen[str] | None = None
        self._pipes: list[threading.Thread] = []
        self._ends: list[Failure] = []
        self._begin = time.time()
        self._failed: float | None = None
        self._read = time.monotonic()
        self._signal: signal.Signals | None = None

    def start(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        """Start it in a session of its own, so that the terminal's Ctrl-C comes through us alone.

        Args:
            command: The launcher's program and its arguments.
            environ: Variables that are added to this process's.

        Raises:
            LaunchError: The run's folder can't be made, or the launcher isn't there.
        """
        self.prepare()
        try:
            self._child = subprocess.Popen(
                list(command),
                # mpirun gives the ranks a terminal of its own, on which they would draw progress bars.
                env={**os.environ, **(environ or {}), LAUNCH_VARIABLE: self.id, "TERM": "dumb"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        except OSError as error:
            raise LaunchError(
                f"{command[0]!r} can't be started: {error.strerror}",
                hint="--launcher torchrun   needs no other program",
            ) from error
        for source, screen in ((self._child.stdout, sys.stdout), (self._child.stderr, sys.stderr)):
            assert source is not None
            thread = threading.Thread(target=self._pass_on, args=(source, screen), daemon=True)
            thread.start()
            self._pipes.append(thread)

    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> int:
        """Until it ends; kills what doesn't end within the grace time after a signal. Its exit status.

        Args:
            meanwhile: Called many times a second.
        """
        assert self._child is not None
        while self._child.poll() is None:
            time.sleep(0.05)
            meanwhile()
            self._look_for_late_ranks()
            if (self.overdue() or self._kill_asked or self._hangs_after_failure()) and not self._killed:
                self._kill()
        for thread in self._pipes:
            thread.join(2.0)  # longer only if a left-over process holds the pipe, which sweep() ends
        return self._child.returncode

    def _look_for_late_ranks(self) -> None:
        """Some launchers' collectives have no time limit, and those that have say only who waited."""
        if self._late or self._killed:
            return
        found = self._watch.look()
        waited = found is None and time.monotonic() - self._read > _READ_EVERY_S
        if waited:
            self._read = time.monotonic()
            waited = any(is_timeout(failure) for failure in self.recorded())
        if not waited and (found is None or not found[1]):
            return
        pids = {rank: pid for pid in marked(self.id, is_worker) if (rank := rank_of(pid)) is not None}
        self._late = late_failures(self._run_dir, self._processes, pids, after_timeout=waited)
        if found is not None and self._late:
            self._kill_asked = True

    def _hangs_after_failure(self) -> bool:
        """A rank failed, and its launcher should have ended the rest by now.

        horovodrun waits for the output of a killed rank as long as a process that the rank started holds it.
        """
        if self._failed is None:
            return False
        since = time.monotonic() - self._failed
        return since > self._grace_s or (since > _ORPHANS_S and not marked(self.id, is_worker))

    def sweep(self) -> None:
        """End everything that this launch started and that still lives; on other hosts unless all ended well."""
        sweep(self.id, _AFTER_TERM_S)
        if self._hosts and self._child is not None and self._child.returncode != 0:
            sweep_hosts([(host, self.id) for host in self._hosts], self._ssh)

    def failures(self) -> list[Failure]:
        """The ranks' own records, and ends without one that the launcher told of; one a rank."""
        found = {failure.rank: failure for failure in self.recorded()}
        for failure in self._late:
            found[failure.rank] = failure
        for end in self._ends:
            found.setdefault(end.rank, end)
        return list(found.values())

    # -- output -----------------------------------------------------------------------------------------------------

    def _pass_on(self, source: IO[str], screen: IO[str]) -> None:
        for line in source:
            line = _PREFIX.sub("", line.rstrip("\r\n"))
            self._note_end(line)
            # Where the screen is gone (`| head`), reading goes on: ranks would stand still at a full pipe.
            with contextlib.suppress(OSError, ValueError):
                screen.write(line + "\n")
                screen.flush()

    def _note_end(self, line: str) -> None:
        """A rank that was killed leaves no record; its launcher says so in a line."""
        hydra = _HYDRA_KILL.search(line)
        if hydra is not None:
            self._signal = signal.Signals(int(hydra[1]))
        for pattern in _ENDS:
            match = pattern.search(line)
            if match is None:
                continue
            values = match.groupdict()
            status = int(values.get("status") or 0)
            rank, host = int(values["rank"]), values.get("host") or os.uname().nodename
            if values.get("how"):
                code, when = -_SIGNALS.get(values["how"], signal.SIGKILL), time.time()
            elif values.get("signal"):  # mpirun says so at the end, but only of the first process that ended badly
                code, when = -int(values["signal"]), self._begin
            else:
                code, when = (128 - status if 128 < status < 128 + signal.NSIG else status), time.time()
            if code and not any(end.rank == rank for end in self._ends):
                self._ends.append(Failure(rank, host, code, when, str(log_path(self._run_dir, rank))))
                self._failed = self._failed or time.monotonic()

    # -- signals ----------------------------------------------------------------------------------------------------

    def _send(self, number: signal.Signals) -> None:
        """To the ranks on this host: they agree with the others. Where there is none, the launcher gets it.

        The launchers would end the ranks within seconds, in the middle of a checkpoint.
        """
        workers = marked(self.id, is_worker)
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if not workers and self._child is not None:
            self._child.send_signal(number)

    def _kill(self) -> None:
        assert self._child is not None
        self._killed = True
        self._child.terminate()  # it ends the ranks on other hosts
        deadline = time.monotonic() + _AFTER_TERM_S
        for pid in marked(self.id, is_worker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while self._child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
