"""Which device a process computes on, and which back end its collectives use."""

from __future__ import annotations

import torch

from distkit.errors import ConfigError

__all__ = ["backend_for", "choose_device"]


def choose_device(wanted: str, local_rank: int, size: int) -> torch.device:
    """The device of this process.

    CUDA devices are numbered inside CUDA_VISIBLE_DEVICES, which is never changed.

    Args:
        wanted: The config key ``device``.
        local_rank: Place inside the node.
        size: Number of processes in all; mps serves one only.

    Raises:
        ConfigError: The device was asked for and isn't there, or there are more processes than GPUs.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted in ("auto", "cuda") and torch.cuda.is_available():
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise ConfigError(
                f"process {local_rank} of this node has no GPU: {count} visible",
                hint=f"--nproc {count}   or --set device=cpu",
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device
    mps = torch.backends.mps.is_available()
    if wanted == "mps" and size > 1:
        raise ConfigError(f"device was set to 'mps', which serves one process, but there are {size}", hint="--nproc 1")
    if wanted in ("cuda", "mps") and not (wanted == "mps" and mps):
        raise ConfigError(f"device was set to {wanted!r}, but torch finds none here", hint="--set device=auto")
    if mps and size == 1:
        return torch.device("mps")
    return torch.device("cpu")


def backend_for(device: torch.device) -> str:
    """nccl for CUDA tensors beside gloo for host tensors; gloo alone elsewhere."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
