"""One attempt of a run whose agents are started on their hosts over ssh, by us and not by another launcher."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Protocol

from distkit.errors import LaunchError
from distkit.launch.attempt import Attempt
from distkit.launch.failure import Failure, log_path, signal_name
from distkit.launch.hosts import is_this_host
from distkit.launch.remote import ALIVE_EVERY_S, Order, mark_of
from distkit.launch.ssh import CONNECT_S, SshOptions
from distkit.launch.worker import LAUNCH_VARIABLE

__all__ = ["FleetRun", "Link", "reachable", "sweep_hosts"]

_SILENCE_S = 16.0
"""A host that was silent for so long is lost: eight signs of life."""
_START_SILENCE_S = 60.0
_LOST = 255
_END_WITHIN_S = 12.0


class Link(Protocol):
    """The way to a host: a process of ssh, or what behaves like one; its streams are those of the other side."""

    @property
    def stdin(self) -> IO[str] | None: ...

    @property
    def stdout(self) -> IO[str] | None: ...

    @property
    def stderr(self) -> IO[str] | None: ...

    def poll(self) -> int | None:
        """Its exit status, once there is one."""

    def wait(self, timeout: float | None = None) -> int:
        """Until it ends; its exit status.

        Raises:
            subprocess.TimeoutExpired: It didn't within so many seconds.
        """

    def kill(self) -> None:
        """End it now."""


@dataclass
class _Part:
    """One host of the attempt."""

    host: str
    mark: str
    first_rank: int
    process: Link
    pipes: list[threading.Thread] = field(default_factory=list)
    heard: float | None = None
    ended: int | None = None
    said: list[str] = field(default_factory=list)
    lost: str = ""
    noticed: float = 0.0
    silent_s: float = 0.0
    closed: bool = False


class FleetRun(Attempt):
    """An agent on each host, the ends of all, and what is lost on the way.

    Args:
        run_dir: The run's folder.
        hosts: Names of the hosts.
        nproc: Processes on each.
        grace_s: Between asking ranks to end and killing them, in seconds.
        ssh: How hosts are reached.
        agents: Whether agents of ours run there; others don't pass signals on to their ranks, and tell no failures.
    """

    def __init__(
        self, run_dir: Path, hosts: Sequence[str], nproc: int, grace_s: float, ssh: SshOptions, *, agents: bool = True
    ) -> None:
        super().__init__(run_dir, len(hosts) * nproc, grace_s)
        self._hosts, self._nproc, self._ssh, self._agents = list(hosts), nproc, ssh, agents
        self._parts: list[_Part] = []
        self._told: dict[int, Failure] = {}
        self._spoke = 0.0
        self._ending: float | None = None
        self._end_s = 0.0
        self._begin = time.monotonic()
        self._signals: list[int] = []
        self._screen = threading.Lock()

    @property
    def lost(self) -> list[str]:
        """Names of the hosts that were lost."""
        return [part.host for part in self._parts if part.lost]

    def start(self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], python: str) -> None:
        """Start all hosts.

        Args:
            commands: What runs on each host.
            environments: Its variables.
            python: The interpreter, the same on all hosts.

        Raises:
            LaunchError: ssh isn't there, or the run's folder can't be made.
        """
        self.prepare()
        for place, host in enumerate(self._hosts):
            mark = f"{self.id}.{place}"
            variables = {**environments[place], LAUNCH_VARIABLE: mark}
            order = Order(str(Path.cwd()), tuple(commands[place]), variables, self._grace_s, _SILENCE_S, self._agents)
            process = self._open(place, python)
            part = _Part(host, mark, place * self._nproc, process)
            self._parts.append(part)
            self._write(part, order.to_json())
            for source, screen in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                assert source is not None
                thread = threading.Thread(target=self._pass_on, args=(part, source, screen), daemon=True)
                thread.start()
                part.pipes.append(thread)

    def _open(self, place: int, python: str) -> Link:
        """Start :mod:`distkit.launch.remote` on a host."""
        host, program = self._hosts[place], [python, "-m", "distkit.launch.remote"]
        words = program if is_this_host(host, os.uname().nodename) else self._ssh.command(host, program)
        try:
            return subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            self._tell_all(end=True)
            raise LaunchError(
                f"{words[0]!r} can't be started: {error.strerror}", hint="apt-get install openssh-client"
            ) from error

    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> int:
        """Until all hosts have ended or are lost; the first exit status that isn't 0."""
        while any(not part.closed for part in self._parts):
            time.sleep(0.05)
            meanwhile()
            while self._signals:
                self._tell_all(signal=self._signals.pop(0))
            if time.monotonic() - self._spoke > ALIVE_EVERY_S:
                self._spoke = time.monotonic()
                self._tell_all(alive=True)
            for part in self._parts:
                if not part.closed:
                    self._look_at(part)
            if (self.overdue() or self._kill_asked) and not self._killed:
                self._killed = True
                self._end_rest(0.0)
            if self._ending is not None and time.monotonic() > self._ending + self._end_s:
                self._close_rest()
        self._say_when()
        return next((part.ended for part in self._parts if part.ended), 0)

    def _say_when(self) -> None:
        """How long the end took, once a host was lost."""
        lost = [part for part in self._parts if part.lost]
        if lost and len(lost) < len(self._parts):
            seconds = time.time() - min(part.noticed for part in lost)
            sys.stderr.write(f"distkit-run: the processes on the other hosts ended {seconds:.1f} s after that\n")

    def failures(self) -> list[Failure]:
        """What the agents told, and the hosts that were lost."""
        found = {} if self._agents else {failure.rank: failure for failure in self.recorded()}
        found |= self._told
        for part in self._parts:
            if part.lost:
                last = part.first_rank + self._nproc - 1
                ranks = f"rank {last}" if self._nproc == 1 else f"ranks {part.first_rank} to {last}"
                how = f"the host was lost with {ranks}: {part.lost}"
                log = str(log_path(self._run_dir, part.first_rank))
                found[part.first_rank] = Failure(part.first_rank, part.host, _LOST, part.noticed, log, lost=how)
        unasked = self._first is None and self._leave_asked is None and not self._killed
        if not found and unasked:
            killed = [part for part in self._parts if part.ended is not None and part.ended > 128]
            found = {part.first_rank: self._agents_end(part, part.ended or 0) for part in killed}
        return list(found.values())

    def _agents_end(self, part: _Part, ended: int) -> Failure:
        """An agent that was killed says nothing about its ranks, which end with it."""
        how = f"distkit's agent there was killed by {signal_name(ended - 128)}"
        log = str(log_path(self._run_dir, part.first_rank))
        return Failure(part.first_rank, part.host, ended, time.time(), log, lost=how)

    def sweep(self) -> None:
        """End what still lives, on hosts too whose agent can't be asked any more."""
        self._close_rest()
        sweep_hosts([(part.host, part.mark) for part in self._parts if part.ended is None], self._ssh)

    # -- one host -----------------------------------------------------------------------------------------------------

    def _look_at(self, part: _Part) -> None:
        now = time.monotonic()
        status = part.process.poll()
        if status is not None:
            for thread in part.pipes:
                thread.join(2.0)
            part.closed = True
            if part.ended is None and status == 1 and part.heard is None:
                part.ended = 1  # it said why it couldn't begin
            if part.ended is None:
                self._lose(part, part.said[-1] if part.said else f"the connection ended (exit status {status})")
            elif part.ended != 0:
                self._end_rest(self._grace_s + _END_WITHIN_S)
            return
        silent = now - (self._begin if part.heard is None else part.heard)
        if silent > (_START_SILENCE_S if part.heard is None else _SILENCE_S):
            part.closed = True
            self._lose(part, f"no sign of life for {silent:.0f} s")
            part.process.kill()

    def _lose(self, part: _Part, how: str) -> None:
        """Its ranks are gone, so the others wait for them in vain."""
        part.lost, part.noticed = how, time.time()
        part.silent_s = time.monotonic() - (part.heard or self._begin)
        sys.stderr.write(
            f"distkit-run: {part.host} is lost: {how}; its last sign of life was {part.silent_s:.1f} s ago\n"
        )
        sys.stderr.flush()
        self._end_rest(_END_WITHIN_S)

    def _end_rest(self, seconds: float) -> None:
        """Have the other hosts end; those that don't within so many seconds are given up."""
        until = time.monotonic() + seconds
        if self._ending is None or until < self._ending + self._end_s:
            self._ending, self._end_s = time.monotonic(), seconds
        if any(part.lost for part in self._parts) or self._killed:
            self._tell_all(end=True)

    def _close_rest(self) -> None:
        """Cut the connections: the remote side ends its processes then."""
        for part in self._parts:
            if part.process.poll() is None:
                with contextlib.suppress(OSError):
                    assert part.process.stdin is not None
                    part.process.stdin.close()
                try:
                    part.process.wait(_END_WITHIN_S)
                except subprocess.TimeoutExpired:
                    part.process.kill()
            if not part.closed:
                self._look_at(part)
                part.closed = True

    # -- lines --------------------------------------------------------------------------------------------------------

    def _pass_on(self, part: _Part, source: IO[str], screen: IO[str]) -> None:
        mark = mark_of(part.mark)
        for line in source:
            # A rank that draws a progress bar doesn't end its lines: the mark stands behind its text then.
            line, marked, told = line.partition(mark)
            if marked:
                self._note(part, told)
            if not line:
                continue
            if screen is sys.stderr and line.strip():
                part.said = [*part.said[-4:], line.strip()]
            # Where the screen is gone (`| head`), reading goes on: ranks would stand still at a full pipe. Logs have all.
            with self._screen, contextlib.suppress(OSError, ValueError):
                screen.write(line)
                screen.flush()

    def _note(self, part: _Part, text: str) -> None:
        """What the host's own side says."""
        with contextlib.suppress(ValueError, TypeError):
            message = json.loads(text)
            part.heard = time.monotonic()
            if "ended" in message:
                part.ended = int(message["ended"])
            if "failure" in message:
                failure = Failure.from_json(json.dumps(message["failure"]))
                self._told.setdefault(failure.rank, replace(failure, host=failure.host or part.host))

    def _tell_all(self, **words: object) -> None:
        for part in self._parts:
            if part.process.poll() is None:
                self._write(part, json.dumps(words))

    def _write(self, part: _Part, line: str) -> None:
        assert part.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            part.process.stdin.write(line + "\n")
            part.process.stdin.flush()

    def _send(self, number: signal.Signals) -> None:
        """Noted only: we may be inside a signal handler, in the middle of a write."""
        self._signals.append(int(number))


def reachable(hosts: Sequence[str], ssh: SshOptions) -> list[str]:
    """Those that answer over ssh now; all are asked at the same time."""
    own = os.uname().nodename

    def answers(host: str) -> bool:
        if is_this_host(host, own):
            return True
        words = ssh.command(host, ["true"])
        try:
            return subprocess.run(words, capture_output=True, timeout=2 * CONNECT_S, check=False).returncode == 0
        except (OSError, subprocess.SubprocessError):
            return False

    with ThreadPoolExecutor(max(1, min(32, len(hosts)))) as pool:
        return [host for host, there in zip(hosts, pool.map(answers, hosts), strict=True) if there]


def sweep_hosts(marks: Sequence[tuple[str, str]], ssh: SshOptions) -> None:
    """End what a launch left on other hosts, where they answer.

    Args:
        marks: Hosts, and the marks of the processes there.
        ssh: How hosts are reached.
    """
    own = os.uname().nodename

    def on(place: tuple[str, str]) -> None:
        program = [sys.executable, "-m", "distkit.launch.marked", place[1]]
        words = program if is_this_host(place[0], own) else ssh.command(place[0], program)
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(words, capture_output=True, timeout=3 * CONNECT_S, check=False, stdin=subprocess.DEVNULL)

    with ThreadPoolExecutor(max(1, min(32, len(marks)))) as pool:
        list(pool.map(on, marks))
