"""A run whose hosts may change: after a failure, or when hosts come and go, all ranks start again from the newest
checkpoint, on the hosts that are there then.

``python -m distkit.launch.elastic --run-dir DIR --launcher torchrun --nproc 2 --min-nodes 1 --max-nodes 4
--host-discovery ./discover.sh --max-restarts 3 ... -- python -m distkit.launch.worker ...``

A checkpoint is what Horovod calls a commit: it holds the position in the data as a number of samples, so a run of any
other size goes on with the very next one.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from distkit.errors import DistkitError, LaunchError
from distkit.launch.attempt import Attempt, catch_signals, ended_by_signal
from distkit.launch.beginning import LAUNCHERS, begin, tidy
from distkit.launch.failure import Failure
from distkit.launch.fleet import FleetRun, reachable
from distkit.launch.hosts import Host, parse_host_lines, parse_hosts
from distkit.launch.ssh import SshOptions

__all__ = ["ElasticRun", "HostPool", "main"]

_LEFT = 128 + signal.SIGUSR1
_COOLDOWN_S = 60.0
_DISCOVERY_WITHIN_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run to the end, over as many attempts as it takes.

    Args:
        argv: Command line; None is this process's.

    Returns:
        As :func:`distkit.launch.external.main`, of the last attempt.
    """
    options = _parse(argv)
    ssh = SshOptions(options.ssh_port, options.ssh_identity, tuple(options.ssh_option))
    run = ElasticRun(options, HostPool(_source(options), options.nproc, answering=lambda hosts: reachable(hosts, ssh)))
    catch_signals(run.handle)
    try:
        return run.run()
    except DistkitError as error:
        sys.stderr.write(f"distkit-run: {error}\n")
        return 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m distkit.launch.elastic", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="The run's folder.")
    parser.add_argument("--launcher", choices=tuple(LAUNCHERS), required=True, help="What starts the ranks.")
    parser.add_argument("--nproc", type=int, required=True, help="Processes on each host.")
    parser.add_argument("--min-nodes", type=int, default=1, help="Fewest hosts to run on.")
    parser.add_argument("--max-nodes", type=int, required=True, help="Most hosts to run on.")
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("--hosts", default="localhost", help="The hosts, as host0:4,host1:4.")
    hosts.add_argument("--host-discovery", type=Path, help="A program that prints the hosts that are there now.")
    parser.add_argument("--max-restarts", type=int, default=0, help="Restarts after failures.")
    parser.add_argument("--grace-s", type=float, default=30.0, help="Seconds between asking ranks to end and killing.")
    parser.add_argument("--start-s", type=float, default=300.0, help="Seconds to wait for enough hosts, or ranks.")
    parser.add_argument("--step-s", type=float, default=600.0, help="Time limit of a collective, in seconds.")
    parser.add_argument("--poll-s", type=float, default=5.0, help="Seconds between two looks at the hosts.")
    parser.add_argument("--interface", help="Network interface between the hosts.")
    parser.add_argument("--ssh-port", type=int, help="Port of ssh there.")
    parser.add_argument("--ssh-identity", help="Private key for ssh.")
    parser.add_argument("--ssh-option", action="append", default=[], help="A further option of ssh, as KEY=VALUE.")
    parser.add_argument("--master-port", type=int, help="Port at which the hosts meet.")
    parser.add_argument("--devices", action="append", default=[], help="Devices of a host, as HOST=0,1.")
    parser.add_argument("--export", default="", help="Variables for processes on other hosts, as A,B.")
    parser.add_argument("worker", nargs="+", help="What runs in each process, after --.")
    return parser.parse_args(argv)


def _source(options: argparse.Namespace) -> Callable[[], tuple[Host, ...]]:
    """Says which hosts there are now."""
    if options.host_discovery is None:
        fixed = parse_hosts(options.hosts)
        return lambda: fixed
    return lambda: discover(options.host_discovery)


def discover(program: Path) -> tuple[Host, ...]:
    """Ask the user's program; it prints a host a line, as in a hostfile.

    Raises:
        LaunchError: It can't be run, fails, or prints something else.
    """
    try:
        done = subprocess.run(
            [str(program)],
            capture_output=True,
            text=True,
            timeout=_DISCOVERY_WITHIN_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(
            f"--host-discovery {program} failed: {error}", hint=f"{program}   must print a host a line, such as host0:4"
        ) from error
    return parse_host_lines(done.stdout.splitlines(), str(program))


class HostPool:
    """Which hosts are usable now: listed, with room, and not left out after a failure.

    Args:
        source: Says which hosts there are.
        nproc: Room that a host must have.
        clock: Seconds.
        answering: Says which of some hosts answer now.
    """

    def __init__(
        self,
        source: Callable[[], tuple[Host, ...]],
        nproc: int,
        clock: Callable[[], float] = time.monotonic,
        answering: Callable[[list[str]], list[str]] = lambda hosts: hosts,
    ) -> None:
        self._source, self._nproc, self._clock, self._answering = source, nproc, clock, answering
        self._out: dict[str, float] = {}
        self._strikes: dict[str, int] = {}
        self._lost: set[str] = set()

    def usable(self) -> list[str]:
        """Their names, in the source's order. Those that were lost are asked whether they are back."""
        now = self._clock()
        listed = [
            host.name
            for host in self._source()
            if (host.slots is None or host.slots >= self._nproc) and self._out.get(host.name, 0.0) <= now
        ]
        asked = [name for name in listed if name in self._lost]
        if asked:
            self._lost -= set(self._answering(asked))
        return [name for name in listed if name not in self._lost]

    def lose(self, names: Iterable[str]) -> None:
        """These hosts are gone; they are usable again when they answer."""
        self._lost |= set(names)

    def leave_out(self, name: str) -> float:
        """A rank died there: leave the host out for a minute, the next time for two, then four ... Returns seconds."""
        self._strikes[name] = self._strikes.get(name, 0) + 1
        seconds = _COOLDOWN_S * 2.0 ** (self._strikes[name] - 1)
        self._out[name] = self._clock() + seconds
        return seconds


class ElasticRun:
    """Attempts, one after the other.

    Args:
        options: The command line.
        pool: The hosts.
    """

    def __init__(self, options: argparse.Namespace, pool: HostPool) -> None:
        self._options, self._pool = options, pool
        self._restarts, self._attempt = 0, 0
        self._run: Attempt | None = None
        self._stopped: int | None = None
        self._hosts: list[str] = []
        self._wanted: list[str] = []
        self._leaving = False
        self._looked = 0.0
        self._warned = False

    def handle(self, number: int) -> None:
        """A signal: the ranks get it, and no attempt follows."""
        if number != signal.SIGUSR1:
            self._stopped = self._stopped or number
        if self._run is not None:
            self._run.handle(number)

    def run(self) -> int:
        """Until the script ends well, a signal comes, or the restarts are used up. The exit status."""
        while True:
            self._hosts = self._enough_hosts()
            if self._stopped is not None:
                sys.stderr.write(f"distkit-run: stopped by {signal.Signals(self._stopped).name}\n")
                return 128 + self._stopped
            self._leaving, self._wanted = False, self._hosts
            run = self._run = begin(self._options, self._hosts, self._attempt)
            try:
                status = run.wait(self._look_around)
            finally:
                run.sweep()
                tidy(self._options)
            if isinstance(run, FleetRun):
                self._pool.lose(run.lost)
            if not self._goes_on(run, status):
                return run.conclude(status)
            self._attempt += 1

    def _goes_on(self, run: Attempt, status: int) -> bool:
        failures = run.failures()
        if self._stopped is not None or (status == 0 and not failures):
            return False
        if self._leaving and all(f.exit_status == _LEFT for f in failures):
            self._say(f"the hosts changed: going on with {', '.join(self._wanted)}")
            return True
        if ended_by_signal(failures) is not None or self._restarts >= self._options.max_restarts:
            return False
        self._restarts += 1
        step = f": all ranks start again (restart {self._restarts} of {self._options.max_restarts})"
        if failures:
            self._judge(run.report(failures, next_step=step))
        else:  # the launcher itself failed, or doesn't say which rank did
            self._say(f"the launcher failed{step}")
        return True

    def _judge(self, root: Failure) -> None:
        """Leave out a host whose rank died without a word, if enough others are there; an exception isn't its fault."""
        host = self._hosts[root.rank // self._options.nproc]
        others = [name for name in self._pool.usable() if name != host]
        if root.record is None and not root.lost and len(others) >= max(1, self._options.min_nodes):
            self._say(f"{host} is left out for {self._pool.leave_out(host):g} s")

    def _enough_hosts(self) -> list[str]:
        """Wait for the fewest hosts.

        Raises:
            LaunchError: There are too few.
        """
        options, deadline = self._options, time.monotonic() + self._options.start_s
        while True:
            usable = self._pool.usable()[: options.max_nodes]
            if len(usable) >= options.min_nodes or self._stopped is not None:
                return usable
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{len(usable)} usable hosts with room for {options.nproc} processes are there, but --nnodes asks for "
                    f"{options.min_nodes} at least; waited timeouts.start_s={options.start_s:g}",
                    hint=f"--nnodes {max(1, len(usable))}:{options.max_nodes}",
                )
            time.sleep(min(1.0, options.poll_s))

    def _look_around(self) -> None:
        """Now and then: did hosts come or go? Twice the same answer, and the ranks are asked to end in order."""
        if self._leaving or time.monotonic() - self._looked < self._options.poll_s or self._run is None:
            return
        self._looked = time.monotonic()
        try:
            usable = self._pool.usable()
        except LaunchError as error:  # training goes on while the list can't be had
            if not self._warned:
                self._say(error.message)
            self._warned = True
            return
        kept = [name for name in self._hosts if name in usable]
        wanted = (kept + [name for name in usable if name not in kept])[: self._options.max_nodes]
        if len(wanted) < self._options.min_nodes or wanted == self._hosts:
            self._wanted = self._hosts
        elif wanted != self._wanted:
            self._wanted = wanted
        else:
            self._leaving = True
            self._run.leave()

    def _say(self, line: str) -> None:
        sys.stderr.write(f"distkit-run: {line}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
