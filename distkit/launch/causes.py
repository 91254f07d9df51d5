"""Likely causes of failures whose own words don't say what to do."""

from __future__ import annotations

import re

from distkit.launch.failure import Failure

__all__ = ["likely_cause"]

_CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"EADDRINUSE|[Aa]ddress already in use",
        "another process listens at this port: --master-port N, or end the run that still has it",
    ),
    (
        r"OutOfMemoryError|CUDA out of memory|out of memory",
        "the device's memory is full: --set batch.size=... smaller with batch.accumulate larger, "
        "memory.activation_checkpointing, or -s zero3 with memory.offload",
    ),
    (
        r"DataLoader worker .*(killed|bus error)|[Bb]us error|insufficient shared memory",
        "the loader's workers ran out of shared memory: fewer num_workers, or a larger /dev/shm (docker --shm-size)",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "the disk is full: checkpoint.keep smaller, or --run-dir on another",
    ),
    (
        r"size mismatch for |Missing key\(s\) in state_dict|Unexpected key\(s\) in state_dict",
        "the checkpoint is of another model: distkit checkpoint inspect DIR shows its names and shapes",
    ),
    (
        r"ncclSystemError|ncclInternalError|ncclRemoteError|Bootstrap : no socket interface|NET/Socket|"
        r"Unable to find address for|connectFullMesh|No route to host|Network is unreachable",
        "the hosts can't reach each other on this interface: --interface NAME (ip -brief address), NCCL_DEBUG=INFO",
    ),
    (
        r"Connection closed by peer|Connection reset by peer|Broken pipe|HorovodInternalError",
        "another rank ended before; if none is named here, look at the logs of the other ranks",
    ),
    (
        r"[Tt]imed out|[Tt]imeout|WorkNCCL\(",
        "ranks waited for one that didn't come: it does other work (main_first() allows that), is slow, or has stopped; "
        "timeouts.step_s is the limit",
    ),
    (
        r"No module named",
        "this Python environment lacks a package that others may have: distkit doctor on that host",
    ),
    (
        r"no kernel image is available|CUDA driver version is insufficient|forward compatibility was attempted",
        "torch was built for other GPUs or drivers than this host's: distkit doctor",
    ),
)


def likely_cause(failure: Failure) -> str | None:
    """A sentence that says what it may be and what to do; None where that isn't known or the error says so itself."""
    if failure.lost or failure.late:
        return None
    record = failure.record
    if record is None and failure.code == -9:
        return "SIGKILL came from outside; when memory runs out, the kernel sends it (see: dmesg | tail)"
    if record is not None and "\nHint:" in record.message:
        return None
    text = f"{record.type}: {record.message}" if record is not None else "\n".join(failure.tail)
    return next((cause for pattern, cause in _CAUSES if re.search(pattern, text)), None)
