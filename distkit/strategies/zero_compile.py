"""Compiling an operator of DeepSpeed: once on a machine, with a word about how long it takes."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.ops.op_builder import AsyncIOBuilder
from torch.utils.cpp_extension import _get_build_directory

from distkit.errors import StrategyUnavailable

if TYPE_CHECKING:
    from distkit.world import World

__all__ = ["load_async_io", "load_operator"]

PATIENCE_S = 2.0
"""A compiled operator loads in less than this; what takes longer is being compiled."""

TELL_EVERY_S = 30.0

BATON = "lock"
"""The file by which torch lets one process at a time compile (torch/utils/file_baton.py). It outlives a process that is
killed meanwhile, and then every later one waits for ever."""

_FORGOTTEN_S = 600.0
"""Where no lock of ours can be had (a network file system without flock), a baton that is older has no owner."""


def load_operator(builder: Any, world: World) -> Exception | None:
    """Compile and load an operator: minutes on the first use on a machine, seconds after that.

    Args:
        builder: Such as ``CPUAdamBuilder()``.
        world: Of all ranks; the first on each node says how long it has taken.

    Returns:
        What went wrong.
    """
    problem: list[Exception] = []

    def load() -> None:
        try:
            with _alone(Path(_get_build_directory(builder.name, verbose=False))):
                builder.load(verbose=False)
        except Exception as error:  # whatever a compiler, ninja or the loader throws
            problem.append(error)

    thread = threading.Thread(target=load, name=f"distkit-{builder.name}", daemon=True)
    began = time.monotonic()
    thread.start()
    thread.join(PATIENCE_S)
    while thread.is_alive():
        if world.local_rank == 0:
            passed = time.monotonic() - began
            sys.stderr.write(f"compiling DeepSpeed's {builder.name}, once on this machine: {passed:.0f} s so far\n")
            sys.stderr.flush()
        thread.join(TELL_EVERY_S)
    return problem[0] if problem else None


def load_async_io(world: World) -> None:
    """Compile and load what reads and writes NVMe.

    Raises:
        StrategyUnavailable: It can't be compiled here.
    """
    failed = None
    for builder in (*_loaded_by_async_io(), AsyncIOBuilder()):
        failed = failed or load_operator(builder, world)
    if not world.all(failed is None):
        raise StrategyUnavailable(
            "offload_optimizer.device=nvme was set, but DeepSpeed's async_io operator can't be compiled here: "
            f"{failed or 'it failed on another rank'}",
            hint="apt-get install g++ ninja-build libaio-dev   or --set engine.deepspeed.zero_optimization.offload_optimizer."
            "device=cpu",
        ) from failed


def _loaded_by_async_io() -> list[Any]:
    """What its builder compiles and loads before itself (op_builder/async_io.py:99), out of sight of our lock."""
    try:
        from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder
    except ImportError:  # DeepSpeed before 0.19
        return []
    return [PinMemoryBuilder()]


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time, by a lock that the kernel takes back from a dead process; a baton that is left is removed."""
    baton = folder / BATON
    with (folder / "distkit.lock").open("w") as file:
        owned = _lock(file.fileno())
        if baton.exists() and not _is_open_here(baton) and (owned or _age(baton) > _FORGOTTEN_S):
            sys.stderr.write(f"removed {baton}: a process that compiled was killed, and left it\n")
            baton.unlink(missing_ok=True)
        yield


def _lock(descriptor: int) -> bool:
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except (ImportError, OSError):
        return False
    return True


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _is_open_here(path: Path) -> bool:
    """Whether a process on this host has the file open, as one that compiles does."""
    wanted = path.resolve()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if link.readlink() == wanted:
                return True
    return not Path("/proc/self/fd").exists()
