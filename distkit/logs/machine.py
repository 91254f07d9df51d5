"""What environment.json says: when, where, with which versions and devices a run was started. Never a secret."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit.masking import mask_arguments, mask_environment

if TYPE_CHECKING:
    from distkit.world import World

__all__ = ["describe_rank", "describe_run"]

PACKAGES = (
    "distkit",
    "torch",
    "deepspeed",
    "horovod",
    "megatron-core",
    "accelerate",
    "transformers",
    "tensorflow",
    "safetensors",
    "numpy",
)

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTHONHASHSEED",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "GLOO_SOCKET_IFNAME",
    "NCCL_ALGO",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "HOROVOD_CYCLE_TIME",
    "HOROVOD_FUSION_THRESHOLD",
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
)
"""Environment variables that change speed or results. Others are not looked at: any of them might be a secret."""

_GIT_TIMEOUT_S = 5.0


def describe_run(world: World, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The whole of environment.json; on rank 0.

    Args:
        world: For its sizes.
        ranks: :func:`describe_rank` of every rank.
    """
    import torch

    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "command": mask_arguments(sys.orig_argv),
        "directory": str(Path.cwd()),
        "git": _git(Path(sys.argv[0]).resolve().parent if sys.argv and sys.argv[0] else Path.cwd()),
        "packages": _versions(PACKAGES),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "world": {
            "size": world.size,
            "nodes": world.nodes,
            "data": world.data.size,
            "tensor": world.tensor.size,
            "backend": world.backend,
            "launcher": world.environment.source,
        },
        "ranks": list(ranks),
        "variables": mask_environment({name: os.environ[name] for name in VARIABLES if name in os.environ}),
    }


def describe_rank(world: World) -> dict[str, Any]:
    """Where this rank runs; on every rank."""
    import torch

    device: dict[str, Any] = {"device": str(world.device)}
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        device |= {"gpu": properties.name, "gpu_memory": properties.total_memory}
    place = {"rank": world.rank, "local_rank": world.local_rank, "node_rank": world.node_rank}
    return {**place, "data": world.data.rank, "tensor": world.tensor.rank, "host": socket.gethostname(), **device}


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed; nothing is imported."""
    found: dict[str, str] = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit of the script's repository and whether tracked files differ from it; None outside of one."""
    commit = _git_says(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return {"commit": commit, "changed": bool(_git_says(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git_says(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
