"""torchrun's agent with another way of noticing and ending: the first failure is known, and nothing is left behind."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from pathlib import Path
from signal import SIGTERM, SIGUSR1
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs

from distkit.errors import LaunchError
from distkit.launch.failure import ErrorRecord, Failure, first_failure, last_lines, log_path, remove_record
from distkit.launch.nodes import Nodes
from distkit.launch.processes import CAN_WATCH, Workers
from distkit.launch.report import failure_report
from distkit.launch.watch import HangWatch, is_timeout, late_failures, python_stack

__all__ = ["WorkerAgent"]

_AFTER_KILL_S = 10.0


class WorkerAgent(LocalElasticAgent):
    """Starts the workers of this host over torchrun's agent, and ends all of them when one fails.

    torchrun polls, and calls the failures that it finds in one round equally old; here every end is noted when it
    happens, so that the rank that failed first can be told from those that lost their connection to it.

    Args:
        spec: What to run.
        logs: torchrun's own redirection, which is off.
        workers: The live processes, shared with the main thread.
        run_dir: The run's folder.
        grace_s: Between asking workers to end and killing them, in seconds.
        step_s: Time limit of a collective, in seconds.
    """

    def __init__(
        self, spec: WorkerSpec, logs: LogsSpecs, workers: Workers, run_dir: Path, *, grace_s: float, step_s: float
    ) -> None:
        super().__init__(spec, logs_specs=logs)
        self._workers = workers
        self._run_dir = run_dir
        self._grace_s = grace_s
        self._host = socket.gethostname()
        self._nodes: Nodes | None = None
        self._attempt = -1
        self._step_s = step_s
        self._watch: HangWatch | None = None
        self._late: list[Failure] = []
        self.failures: list[Failure] = []
        self.root: Failure | None = None

    @property
    def processes(self) -> int:
        """Number of processes on all hosts."""
        workers = self.get_worker_group().workers
        return int(workers[0].world_size) if workers else 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._attempt += 1
        group: Any = worker_group  # torch annotates these attributes as None
        self._nodes = Nodes(group.store, group.group_rank, group.group_world_size)
        self.failures, self.root, self._late = [], None, []
        self._watch = HangWatch(self._run_dir, self.processes, self._step_s)
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        for rank in ranks.values():
            remove_record(self._run_dir, rank)
        self._workers.started = True
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._workers.add({ranks[local_rank]: pid for local_rank, pid in pids.items()})
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not CAN_WATCH:
            return self._conclude(super()._monitor_workers(worker_group))
        elsewhere = self._failure_elsewhere() or self._hangs()
        ended = self._workers.all_ended()  # asked before the exits are read: if it is true, these are all
        exits = self._workers.exits().values()
        failed = any(end.code != 0 for end in exits)
        if any(end.as_asked for end in exits):  # here only by a forwarded signal, which all of them got
            self._workers.ending = True
        if elsewhere or (failed and not self._workers.ending):
            self._end_all()
            ended = True
        # Only now may torchrun look: its look reaps a process and would take the exit from under the watching thread.
        if not ended or not (failed or elsewhere or self._done_elsewhere()):
            return RunResult(state=WorkerState.HEALTHY)
        result = super()._monitor_workers(worker_group)
        if elsewhere and not result.is_failed():
            result = RunResult(state=WorkerState.UNHEALTHY)
        return self._conclude(result)

    def _living(self) -> dict[int, int]:
        ended = self._workers.exits()
        return {rank: pid for rank, pid in self._workers.pids.items() if rank not in ended}

    def _hangs(self) -> bool:
        """Whether ranks wait for one of this host that doesn't move; what only stands still is told."""
        found = None if self._watch is None or self._workers.ending else self._watch.look()
        if found is None:
            return False
        beats, some_are_late = found
        living = self._living()
        if not some_are_late:
            first = min(beats, key=lambda beat: beat.rank)
            if first.rank in living:
                sys.stderr.write(f"distkit-run: no rank has moved for a while: all are {first.words(time.time())}\n")
            for rank, pid in living.items():
                python_stack(self._run_dir, rank, pid)
            return False
        self._late = late_failures(self._run_dir, self.processes, living, after_timeout=False)
        if self._late:
            assert self._nodes is not None
            self._nodes.tell(first_failure(self._late))
        return bool(self._late)

    def _failure_elsewhere(self) -> bool:
        assert self._nodes is not None
        try:
            return self._nodes.failure() is not None
        except RuntimeError as error:
            self._end_workers()
            raise LaunchError("node 0 can't be reached any more; the launcher there has ended") from error

    def _done_elsewhere(self) -> bool:
        assert self._nodes is not None
        try:
            return self._nodes.all_done()
        except RuntimeError as error:
            raise LaunchError("node 0 can't be reached any more, but the workers of this host ended well") from error

    def _end_all(self) -> None:
        """A rank failed, here or elsewhere: tell the other hosts, end the workers of this one."""
        assert self._nodes is not None
        mine = self._own_failures()
        with contextlib.suppress(RuntimeError):  # node 0 may be what failed
            if mine:
                self._nodes.tell(first_failure(mine))
            told = [*mine, *filter(None, [self._nodes.failure(now=True)])]
            if not self._late and any(is_timeout(failure) for failure in told):
                self._late = late_failures(self._run_dir, self.processes, self._living(), after_timeout=True)
                if self._late:
                    self._nodes.add_late(first_failure(self._late))
        self._end_workers()
        with contextlib.suppress(RuntimeError):
            self._nodes.hear()
            self.root = self._nodes.failure(now=True)

    def _end_workers(self) -> None:
        """Ask all to end, kill those that still live after the grace time.

        Raises:
            LaunchError: A process outlives SIGKILL, which happens when a driver or network file system hangs.
        """
        self._workers.send(SIGTERM, later=False)
        if self._workers.wait(self._grace_s):
            return
        self._workers.kill(for_good=False)
        if not self._workers.wait(_AFTER_KILL_S):
            left = {rank: pid for rank, pid in self._workers.pids.items() if rank not in self._workers.exits()}
            raise LaunchError(
                f"these ranks can't be killed (rank: process id): {left}; they hang in the kernel",
                hint="ps -o pid,stat,wchan:32,cmd -p " + ",".join(str(pid) for pid in left.values()),
            )

    def _own_failures(self) -> list[Failure]:
        """Workers of this host that failed by themselves, and not because they were told to end."""
        found = []
        exits = self._workers.exits()
        for rank in self._workers.pids:
            record = ErrorRecord.read(self._run_dir, rank)
            end = exits.get(rank)
            if record is not None:  # also when it is still on its way out, or was hastened on it by our signal
                code = record.exit_code if end is None or (end.after and end.code == -end.after) else end.code
                found.append(self._failure(rank, code, record.time, record))
            elif end is not None and end.code != 0 and not end.as_asked and end.after in (None, SIGUSR1):
                found.append(self._failure(rank, end.code, end.time, None))
        return found

    def _failure(self, rank: int, code: int, when: float, record: ErrorRecord | None) -> Failure:
        log = log_path(self._run_dir, rank)
        tail = () if record is not None and record.traceback else tuple(last_lines(log))
        return Failure(rank, self._host, code, when, str(log), record, tail)

    def _conclude(self, result: RunResult) -> RunResult:
        """Sort the failures of an attempt that ended; say so when another attempt follows."""
        if result.state not in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            return result
        self._workers.sweep()
        if self._workers.ending:
            self._remaining_restarts = 0
        self.failures = [*self._late, *(self._own_failures() if CAN_WATCH else self._reported_failures(result))]
        if self.failures and (self.root is None or self._late):
            self.root = first_failure(self.failures)
        if self._remaining_restarts > 0 and self.root is not None:
            step = (
                f"; all ranks start again (restart {self._attempt + 1} of {self._attempt + self._remaining_restarts})"
            )
            others = [failure for failure in self.failures if failure.rank != self.root.rank]
            sys.stderr.write(failure_report(self.root, others, processes=self.processes, next_step=step))
            sys.stderr.flush()
        return result

    def _reported_failures(self, result: RunResult) -> list[Failure]:
        """What torchrun's polling found, where exits can't be watched."""
        found = []
        for rank, failure in result.failures.items():
            record = ErrorRecord.read(self._run_dir, rank)
            if record is not None or failure.exitcode != -SIGTERM:
                found.append(self._failure(rank, failure.exitcode, time.time(), record))
        return found
