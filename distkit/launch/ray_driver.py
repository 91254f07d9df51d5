"""A run on a Ray cluster: room for each node is reserved there, and an agent runs in it; this process is the driver.

``python -m distkit.launch.ray_driver --run-dir DIR --nnodes 2 --nproc 4 ... -- -m distkit.launch.worker ...``

Only processes are Ray's: what they say and how they end is told as over ssh (:mod:`distkit.launch.fleet`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from distkit.errors import DistkitError, LaunchError, StrategyUnavailable
from distkit.launch.attempt import catch_signals
from distkit.launch.exports import exported
from distkit.launch.fleet import FleetRun, Link
from distkit.launch.launchers.torchrun import HostCommand
from distkit.launch.ray_node import NodeEnd
from distkit.launch.ssh import SshOptions
from distkit.launch.worker import ATTEMPT_VARIABLE

__all__ = ["RayDriver", "RayRun", "main"]

_REACH_S = 5.0
_SAY_AFTER_S = 10.0
_LOST = 255


def main(argv: Sequence[str] | None = None) -> int:
    """Run to the end, over as many attempts as ``--max-restarts`` allows.

    Args:
        argv: Command line; None is this process's.

    Returns:
        As :func:`distkit.launch.external.main`, of the last attempt.
    """
    driver = RayDriver(_parse(argv))
    catch_signals(driver.handle)
    try:
        return driver.run()
    except DistkitError as error:
        sys.stderr.write(f"distkit-run: {error}\n")
        return 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m distkit.launch.ray_driver", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="The run's folder.")
    parser.add_argument("--name", required=True, help="Name of the run.")
    parser.add_argument("--address", default="auto", help="Where the cluster is: auto, or HOST:PORT.")
    parser.add_argument("--nnodes", type=int, required=True, help="Number of nodes.")
    parser.add_argument("--nproc", type=int, required=True, help="Processes on each node.")
    parser.add_argument("--cpus", type=int, required=True, help="CPUs to reserve on each node.")
    parser.add_argument("--gpus", default="auto", help="GPUs to reserve on each; auto: one a process if there are any.")
    parser.add_argument("--max-restarts", type=int, default=0, help="Restarts after failures.")
    parser.add_argument("--grace-s", type=float, default=30.0, help="Seconds between asking ranks to end and killing.")
    parser.add_argument("--start-s", type=float, default=300.0, help="Seconds to wait for room, and for ranks.")
    parser.add_argument("--step-s", type=float, default=600.0, help="Time limit of a collective, in seconds.")
    parser.add_argument("--master-port", type=int, help="Port at which the nodes meet.")
    parser.add_argument("--export", default="", help="Variables for the processes, as A,B.")
    parser.add_argument("worker", nargs="+", help="What runs in each process behind the interpreter, after --.")
    return parser.parse_args(argv)


@dataclass(frozen=True)
class _Placed:
    """Room on the cluster.

    Args:
        group: Ray's placement group, a bundle for each node.
        addresses: The nodes.
        ends: The actor on each.
    """

    group: Any
    addresses: list[str]
    ends: list[Any]


class RayDriver:
    """Attempts on a cluster, one after the other.

    Args:
        options: The command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._ray: Any = None
        self._run: RayRun | None = None
        self._stopped: int | None = None

    def handle(self, number: int) -> None:
        """A signal: the ranks get it, and no attempt follows."""
        if number != signal.SIGUSR1:
            self._stopped = self._stopped or number
        if self._run is not None:
            self._run.handle(number)

    def run(self) -> int:
        """Until the script ends well, a signal comes, or the restarts are used up. The exit status.

        Raises:
            StrategyUnavailable: Ray isn't installed.
            LaunchError: There is no such cluster, or it hasn't enough room.
        """
        self._ray = _connect(self._options.address)
        catch_signals(self.handle)  # Ray has taken SIGTERM over
        try:
            return self._attempts()
        finally:
            self._ray.shutdown()

    def _attempts(self) -> int:
        restarts, most = 0, self._options.max_restarts
        while True:
            placed = self._place()
            if placed is None:
                sys.stderr.write(f"distkit-run: stopped by {signal.Signals(self._stopped or 0).name}\n")
                return 128 + (self._stopped or 0)
            run = RayRun(self._ray, self._options, placed)
            try:
                run.begin(restarts)
                self._run = run
                if self._stopped is not None:  # it came while the agents were started
                    run.handle(self._stopped)
                status = run.wait()
            finally:
                run.sweep()
            failures = run.failures()
            if self._stopped is not None or not failures or restarts >= most:
                return run.conclude(status)
            restarts += 1
            run.report(failures, next_step=f": all ranks start again (restart {restarts} of {most})")

    def _place(self) -> _Placed | None:
        """Wait for room; None when a signal came meanwhile.

        Raises:
            LaunchError: There is too little, or a node has no distkit.
        """
        options, ray = self._options, self._ray
        room: dict[str, float] = {"CPU": options.cpus}
        gpus = _gpus(options, ray.cluster_resources())
        if gpus:
            room["GPU"] = gpus
        group = ray.util.placement_group([room] * options.nnodes, strategy="STRICT_SPREAD")
        try:
            if not self._wait_for(group, room):
                ray.util.remove_placement_group(group)
                return None
            placed = _Placed(group, self._addresses(group), self._actors(group, room))
            for end in placed.ends:
                ray.get(end.free_port.remote(), timeout=options.start_s)
            return placed
        except ray.exceptions.RayError as error:
            ray.util.remove_placement_group(group)
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            raise LaunchError(
                f"a node of the Ray cluster can't start an actor: {lines[-1]}",
                hint="the same distkit, in an environment for the same Python, must be on every node",
            ) from error
        except LaunchError:
            ray.util.remove_placement_group(group)
            raise

    def _wait_for(self, group: Any, room: Mapping[str, float]) -> bool:
        begin, said = time.monotonic(), False
        while self._stopped is None:
            if group.wait(1):
                return True
            waited = time.monotonic() - begin
            if waited > self._options.start_s:
                raise self._too_little(room)
            if waited > _SAY_AFTER_S and not said:
                said = True
                sys.stderr.write(f"distkit-run: waiting for room: {self._shortage(room)}\n")
                sys.stderr.flush()
        return False

    def _shortage(self, room: Mapping[str, float]) -> str:
        ray = self._ray
        nodes = [node for node in ray.nodes() if node["Alive"]]
        fit = [node for node in nodes if all(node["Resources"].get(kind, 0) >= n for kind, n in room.items())]
        free = ray.available_resources()
        each = ", ".join(f"{node['NodeManagerAddress']} with {_amounts(node['Resources'], room)}" for node in nodes)
        return (
            f"{self._options.nnodes} nodes with {_amounts(room, room)} each were asked for, and {len(fit)} such nodes are in "
            f"the Ray cluster ({each}); free in all: {_amounts(free, room)}"
        )

    def _too_little(self, room: Mapping[str, float]) -> LaunchError:
        return LaunchError(
            f"{self._shortage(room)}; waited timeouts.start_s={self._options.start_s:g}",
            hint="ray start --address HOST:PORT   on another host adds it; or a smaller --nnodes or --nproc",
        )

    def _addresses(self, group: Any) -> list[str]:
        """The nodes of the bundles."""
        ray = self._ray
        address = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
        nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
        return [address[nodes[place]] for place in range(self._options.nnodes)]

    def _actors(self, group: Any, room: Mapping[str, float]) -> list[Any]:
        strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        kind = self._ray.remote(NodeEnd)
        return [
            kind.options(
                num_cpus=room["CPU"],
                num_gpus=room.get("GPU", 0),
                max_concurrency=4,
                scheduling_strategy=strategy(placement_group=group, placement_group_bundle_index=place),
            ).remote()
            for place in range(self._options.nnodes)
        ]


class RayRun(FleetRun):
    """One attempt: agents in actors, with Ray between them and us instead of ssh.

    Args:
        ray: The package.
        options: The command line.
        placed: Where.
    """

    def __init__(self, ray: Any, options: argparse.Namespace, placed: _Placed) -> None:
        super().__init__(options.run_dir, placed.addresses, options.nproc, options.grace_s, SshOptions())
        self._ray, self._options, self._placed = ray, options, placed

    def begin(self, number: int) -> None:
        """Start the agents.

        Args:
            number: How many attempts there were before.

        Raises:
            LaunchError: The run's folder can't be made, or a node was lost.
        """
        options, ray, placed = self._options, self._ray, self._placed
        try:
            port = options.master_port or ray.get(placed.ends[0].free_port.remote(), timeout=options.start_s)
            pythons = ray.get([end.start.remote() for end in placed.ends], timeout=options.start_s)
        except ray.exceptions.RayError as error:
            raise LaunchError(
                f"a node of the Ray cluster was lost at the start: {type(error).__name__}", hint="ray status"
            ) from error
        commands = [
            HostCommand(
                python=python,
                run_dir=options.run_dir,
                name=options.name,
                nodes=options.nnodes,
                processes=options.nproc,
                start_s=options.start_s,
                grace_s=options.grace_s,
                step_s=options.step_s,
                worker=options.worker,
                node_rank=place,
                address=placed.addresses[0],
                port=port,
                hand_over=True,
            ).words()
            for place, python in enumerate(pythons)
        ]
        variables = {**exported(os.environ, options.export.split(",")), ATTEMPT_VARIABLE: str(number)}
        self.start(commands, [variables] * options.nnodes, sys.executable)

    def sweep(self) -> None:
        """End the actors, and with them what they look after; and give the room back."""
        self._close_rest()
        with contextlib.suppress(self._ray.exceptions.RayError):
            for end in self._placed.ends:
                self._ray.kill(end)
            self._ray.util.remove_placement_group(self._placed.group)

    def _open(self, place: int, python: str) -> Link:
        return _RayLink(self._ray, self._placed.ends[place])


class _RayLink:
    """An actor as a process whose standard streams are here."""

    def __init__(self, ray: Any, end: Any) -> None:
        self._ray, self._end = ray, end
        self._status: int | None = None
        self._ended = threading.Event()
        ours, self.stdin = _pipe()
        self.stdout, out = _pipe()
        self.stderr, err = _pipe()
        threading.Thread(target=self._feed, args=(ours,), daemon=True).start()
        threading.Thread(target=self._fetch, args=(out, err), daemon=True).start()

    def poll(self) -> int | None:
        """The exit status, once there is one."""
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Until it ends."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("ray", timeout or 0.0)
        return self._status or 0

    def kill(self) -> None:
        """End the actor."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._end)

    def _feed(self, source: IO[str]) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            for line in source:
                self._ray.get(self._end.write.remote(line))
            self._ray.get(self._end.close.remote())

    def _fetch(self, out: IO[str], err: IO[str]) -> None:
        status: int | None = None
        with out, err, contextlib.suppress(OSError):
            while status is None:
                try:
                    lines, status = self._ray.get(self._end.read.remote())
                except self._ray.exceptions.RayError as error:
                    lines, status = [(True, f"Ray lost the node's actor: {type(error).__name__}\n")], _LOST
                for is_error, line in lines:
                    (err if is_error else out).write(line)
                out.flush()
                err.flush()
        self._status = _LOST if status is None else status
        self._ended.set()


def _pipe() -> tuple[IO[str], IO[str]]:
    """Its ends to read and to write."""
    read, write = os.pipe()
    return (
        os.fdopen(read, "r", encoding="utf-8", errors="replace"),
        os.fdopen(write, "w", encoding="utf-8", errors="replace"),
    )


def _connect(address: str) -> Any:
    """Ray, connected.

    Raises:
        StrategyUnavailable: It isn't installed.
        LaunchError: No cluster is there.
    """
    try:
        ray = import_module("ray")
    except ImportError as error:
        raise StrategyUnavailable("--launcher ray needs Ray", hint="pip install 'distkit[ray]'") from error
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdecimal():  # Ray itself would try for a minute
            socket.create_connection((host, int(port)), _REACH_S).close()
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise LaunchError(
            f"no Ray cluster can be reached at {address!r}: {lines[0]}",
            hint="ray start --head   here, or --job address=HOST:PORT   on a host that belongs to the cluster",
        ) from error
    return ray


def _gpus(options: argparse.Namespace, there: Mapping[str, float]) -> int:
    if options.gpus == "auto":
        return int(options.nproc) if there.get("GPU", 0) else 0
    return int(options.gpus)


def _amounts(amounts: Mapping[str, float], kinds: Mapping[str, float]) -> str:
    return " and ".join(f"{amounts.get(kind, 0):g} {kind}s" for kind in kinds)


if __name__ == "__main__":
    sys.exit(main())
