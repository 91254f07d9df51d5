"""Worker processes that stay alive between tests, so that torch and the engines are imported once.

A test runs a function of a module in `n` of them, each with the environment that a launcher would give it:

    results = pool.run("tests.contract.cases:train", 2, strategy="ddp", steps=8)

gives one JSON value a rank. A worker's exception comes back as :class:`WorkerError` with its traceback. A pool in
which a worker died or hung is thrown away, and the next call starts a fresh one; so is one whose workers are worn: each
process group of gloo that an engine keeps for good wakes up a hundred times a second.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MARK = "\x1ePOOL "
MANY_LOOPS = 10
WORN_LOOPS = 30
"""Of gloo in a worker: from the first number on garbage is looked for, from the second on the worker is replaced."""
CLEAN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DISTKIT_SETTINGS")


class WorkerError(Exception):
    """What workers raised: `errors` holds (rank, type name, message, traceback), in the order in which they came."""

    def __init__(self, errors: list[tuple[int, str, str, str]]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"rank {rank}: {kind}: {message}\n{trace}" for rank, kind, message, trace in errors))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Pool:
    """Live worker processes.

    Args:
        output: A file for what the workers print; None is this process's stderr.
    """

    def __init__(self, output: Path | None = None) -> None:
        self._workers: list[subprocess.Popen[str]] = []
        self._output = output

    def run(
        self,
        function: str,
        processes: int = 1,
        *,
        timeout: float = 120.0,
        env: dict[str, str] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Run `module:function(**arguments)` on ranks 0 .. processes-1; their results in rank order."""
        self._grow(processes)
        port = free_port()
        for rank, worker in enumerate(self._workers[:processes]):
            place = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes}
            variables = {**{k: str(v) for k, v in place.items()}, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            job = {"function": function, "arguments": arguments, "env": {**variables, **(env or {})}}
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(job) + "\n")
            worker.stdin.flush()
        try:
            return self._collect(processes, timeout)
        except (WorkerError, TimeoutError):
            raise
        except BaseException:  # the test was ended from outside; answers to come would be taken for the next one's
            self.close()
            raise

    def close(self) -> None:
        for worker in self._workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    pipe.close()
        self._workers.clear()

    def _grow(self, processes: int) -> None:
        while len(self._workers) < processes:
            env = {k: v for k, v in os.environ.items() if k not in CLEAN}
            env.update(
                OMP_NUM_THREADS="1",
                PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                PYTHONUNBUFFERED="1",
                TORCH_CPP_LOG_LEVEL="ERROR",
            )
            with self._output.open("a") if self._output else nullcontext() as output:
                self._workers.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.pool"],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=output,
                        text=True,
                        cwd=ROOT,
                        env=env,
                    )
                )

    def _collect(self, processes: int, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        errors: list[tuple[int, str, str, str]] = []
        deadline = time.monotonic() + timeout
        died = worn = False
        waiting = dict(enumerate(self._workers[:processes]))
        while waiting:
            pipes = {worker.stdout: rank for rank, worker in waiting.items()}
            ready, _, _ = select.select(list(pipes), [], [], max(0.0, deadline - time.monotonic()))
            if not ready and errors:
                self.close()
                raise WorkerError(errors)
            if not ready:
                stacks = self._stacks(list(waiting))
                self.close()
                raise TimeoutError(f"ranks {sorted(waiting)} didn't answer within {timeout} s{stacks}")
            for pipe in ready:
                rank = pipes[pipe]
                assert pipe is not None
                line = pipe.readline()
                if not line:
                    errors.append((rank, "Died", f"exit status {waiting[rank].wait()}", ""))
                    died = True
                    del waiting[rank]
                elif line.startswith(MARK):
                    answer = json.loads(line[len(MARK) :])
                    if "error" in answer:
                        errors.append((rank, *answer["error"]))
                    else:
                        results[rank] = answer["result"]
                    worn = worn or answer["worn"]
                    del waiting[rank]
                else:
                    sys.stderr.write(f"[rank {rank}] {line}")
            if errors and deadline - time.monotonic() > 12:
                deadline = time.monotonic() + 12  # the others may hang in a collective now
            if errors and not waiting:
                break
        if died or worn:
            self.close()
        if errors:
            raise WorkerError(errors)
        return [results[rank] for rank in range(processes)]

    def _stacks(self, ranks: list[int]) -> str:
        """Ask hanging workers for their Python stacks (they go to stderr)."""
        for rank in ranks:
            self._workers[rank].send_signal(signal.SIGUSR2)
        time.sleep(0.5)
        return "; see their stacks on stderr"


def leave_groups() -> None:
    """After an exception: leave what the job joined, so that other ranks' collectives end and the next job can join."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        horovod.shutdown()


def gloo_loops() -> int:
    """Threads of gloo in this process, one for each of its process groups."""
    count = 0
    for comm in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has just ended
            count += comm.read_text().startswith("gloo_tcp_loop")
    return count


def serve() -> None:
    """The worker's loop: one job a line."""
    import faulthandler

    faulthandler.register(signal.SIGUSR2, all_threads=True)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what jobs print goes to stderr
    before = dict(os.environ)
    modules = 0
    for line in sys.stdin:
        job = json.loads(line)
        os.environ.update(job["env"])
        try:
            module, _, name = job["function"].partition(":")
            answer = {"result": getattr(importlib.import_module(module), name)(**job["arguments"])}
            json.dumps(answer)
        except BaseException as error:
            answer = {"error": [type(error).__name__, str(error), traceback.format_exc()]}
            leave_groups()
        for key in set(os.environ) - set(before):
            del os.environ[key]
        os.environ.update(before)
        if gloo_loops() > MANY_LOOPS:
            gc.collect()
        answers.write(MARK + json.dumps({**answer, "worn": gloo_loops() > WORN_LOOPS}) + "\n")
        answers.flush()
        # The frames of an exception hold groups whose connections other ranks wait at; they are free only now.
        if "error" in answer or len(sys.modules) > modules:
            gc.collect()
        if len(sys.modules) > modules:
            # DeepSpeed collects garbage whenever it starts; looking through all that torch and the engines imported
            # takes half a second each time.
            modules = len(sys.modules)
            gc.freeze()


if __name__ == "__main__":
    serve()
