"""Runs on each host of a run, with torchrun's own arguments: starts the workers, forwards signals, reports failures.

``python -m distkit.launch.agent --run-dir DIR --nnodes 1 --nproc-per-node 2 ... -m distkit.launch.worker ...``
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING

from distkit.errors import DistkitError, LaunchError
from distkit.launch.interrupts import Interrupts
from distkit.launch.ports import check_port_free
from distkit.launch.processes import Workers
from distkit.launch.remote import tell
from distkit.launch.report import failure_report
from distkit.launch.worker import AGENT_VARIABLE, LAUNCH_VARIABLE

if TYPE_CHECKING:
    from distkit.launch.supervise import WorkerAgent

__all__ = ["main"]

_CPP_LEVEL = "TORCH_CPP_LOG_LEVEL"


def main(argv: list[str] | None = None) -> int:
    """Run the workers of this host to their end.

    Args:
        argv: Command line; None is this process's.

    Returns:
        0 when all ended well; the exit status of the rank that failed first, 128 + signal if a signal killed it; 130
        after Ctrl-C and 143 after SIGTERM, unless the workers ended with a status of their own.
    """
    workers = Workers()
    interrupts = Interrupts(workers)
    interrupts.install()  # before torch, whose import takes seconds
    try:
        with _quiet_torchrun():
            arguments = _parse(argv)
        interrupts.grace_s = arguments.grace_s
        _prepare(arguments)
        thread = _AgentThread(arguments, workers)
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
            interrupts.enforce()
            if interrupts.first is not None and not workers.started:
                return _say_stopped(interrupts)
        interrupts.enforce()
        return _conclude(thread, interrupts, workers, hand_over=arguments.hand_over)
    except DistkitError as error:
        sys.stderr.write(f"distkit-run: {error}\n")
        return 1
    finally:
        workers.kill()


class _AgentThread(threading.Thread):
    """torchrun's agent beside the main thread: there it would install signal handlers of its own.

    Its daemon flag lets the process end while it waits for other nodes. It starts the workers and must outlive them:
    they ask the kernel to end them with the thread that started them.
    """

    def __init__(self, arguments: argparse.Namespace, workers: Workers) -> None:
        super().__init__(name="distkit-agent", daemon=True)
        self._arguments = arguments
        self._workers = workers
        self.agent: WorkerAgent | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        """Build the agent, which joins the other nodes, and run it."""
        try:
            self.agent = _build_agent(self._arguments, self._workers)
            self.agent.run()
        except Exception as error:  # handed to the main thread, which knows what to say about it
            self.error = error


def _parse(argv: list[str] | None) -> argparse.Namespace:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog = "python -m distkit.launch.agent"
    parser.add_argument("--run-dir", type=Path, required=True, help="The run's folder.")
    parser.add_argument(
        "--grace-s", type=float, default=30.0, help="Seconds between asking workers to end and killing."
    )
    parser.add_argument("--step-s", type=float, default=600.0, help="Time limit of a collective, in seconds.")
    parser.add_argument(
        "--hand-over", action="store_true", help="Tell failures to the launcher, which reports those of all hosts."
    )
    parsed: argparse.Namespace = parser.parse_args(argv)
    parsed.log_dir = os.devnull  # torchrun would make a folder of its own under /tmp for every run
    return parsed


def _prepare(arguments: argparse.Namespace) -> None:
    """What must be in place before anything starts.

    Raises:
        LaunchError: The folder can't be made, or the port is taken.
    """
    try:
        (arguments.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"the run's folder {str(arguments.run_dir)!r} can't be made: {error.strerror}", hint="--run-dir DIR"
        ) from error
    if not arguments.standalone and arguments.rdzv_backend == "static" and arguments.node_rank == 0:
        check_port_free(arguments.master_port)
    os.environ[AGENT_VARIABLE] = str(os.getpid())


def _build_agent(arguments: argparse.Namespace, workers: Workers) -> WorkerAgent:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.run import config_from_args

    from distkit.launch.rendezvous import Rendezvous, endpoint_rendezvous
    from distkit.launch.supervise import WorkerAgent

    config, entrypoint, words = config_from_args(arguments)
    if arguments.rdzv_backend == "c10d":
        rendezvous = endpoint_rendezvous(config)
    else:
        rendezvous = Rendezvous(
            config.run_id,
            rank=arguments.node_rank,
            nodes=config.max_nodes,
            address=arguments.master_addr,
            port=arguments.master_port,
            timeout=timedelta(seconds=int(config.rdzv_configs["timeout"])),
        )
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(words),
        rdzv_handler=rendezvous,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
    )
    assert config.logs_specs is not None
    return WorkerAgent(
        spec, config.logs_specs, workers, arguments.run_dir, grace_s=arguments.grace_s, step_s=arguments.step_s
    )


def _conclude(thread: _AgentThread, interrupts: Interrupts, workers: Workers, *, hand_over: bool) -> int:
    """Say how the run ended; the exit status."""
    agent = thread.agent
    if thread.error is not None:
        raise _launch_error(thread.error)
    assert agent is not None
    if interrupts.killed or (interrupts.first is not None and _is_stop(agent)):
        ended_well = not interrupts.killed and all(end.code == 0 for end in workers.exits().values())
        return 0 if ended_well else _say_stopped(interrupts, agent, silent=hand_over)
    if agent.root is None:
        return 0
    if hand_over:
        for failure in (agent.root, *agent.failures):
            tell(os.environ.get(LAUNCH_VARIABLE, ""), failure=json.loads(failure.to_json()))
        return agent.root.exit_status
    others = [failure for failure in agent.failures if failure.rank != agent.root.rank]
    others.sort(key=lambda failure: (failure.likely_time, failure.rank))
    sys.stderr.write(failure_report(agent.root, others, processes=agent.processes))
    return agent.root.exit_status


def _is_stop(agent: WorkerAgent) -> bool:
    """Whether the first "failure" after a signal is only a worker that ended as it was asked to."""
    root = agent.root
    return root is None or root.record is None or root.record.type in ("KeyboardInterrupt", "SystemExit")


def _say_stopped(interrupts: Interrupts, agent: WorkerAgent | None = None, *, silent: bool = False) -> int:
    assert interrupts.first is not None
    how = "Ctrl-C (SIGINT)" if interrupts.first == SIGINT else interrupts.first.name
    killed = "; the processes were killed" if interrupts.killed else ""
    if not silent:
        sys.stderr.write(f"distkit-run: stopped by {how}{killed}\n")
    if agent is not None and agent.root is not None and not interrupts.killed and agent.root.code > 0:
        return agent.root.code
    return 128 + interrupts.first


def _launch_error(error: Exception) -> DistkitError:
    """What went wrong beside the workers."""
    if isinstance(error, DistkitError):
        return error
    first = (str(error).splitlines() or [""])[0]
    found = LaunchError(
        f"the processes couldn't be started: {type(error).__name__}: {first}",
        hint="LOGLEVEL=INFO distkit-run ...   shows what torchrun's agent does",
    )
    found.__cause__ = error
    return found


@contextmanager
def _quiet_torchrun() -> Iterator[None]:
    """Load torch with its log lines off in this process, which repeat what the report says, but not in the workers.

    LOGLEVEL and TORCH_CPP_LOG_LEVEL, torch's own variables, bring them back.
    """
    if "LOGLEVEL" in os.environ or _CPP_LEVEL in os.environ:
        yield
        return
    logging.disable(logging.CRITICAL)
    os.environ[_CPP_LEVEL] = "FATAL"  # read once, when torch's library is loaded
    try:
        yield
    finally:
        del os.environ[_CPP_LEVEL]


if __name__ == "__main__":
    sys.exit(main())
