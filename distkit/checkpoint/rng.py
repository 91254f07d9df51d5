"""States of the random number generators, as tensors."""

from __future__ import annotations

import random
import sys

import torch

__all__ = ["collect_rng", "restore_rng"]


def collect_rng(device: torch.device | str) -> dict[str, torch.Tensor]:
    """States of Python's, numpy's (if it is loaded), torch's and the accelerator's global generators.

    numpy's global generator is kept if it is the Mersenne Twister, which it is unless ``numpy.random.set_bit_generator``
    was called.

    Args:
        device: Where this rank computes. Of CUDA the other visible devices are kept too, since DataParallel draws there.

    Returns:
        A dict for :func:`restore_rng`, all on the CPU.
    """
    device = torch.device(device)
    version, words, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    if "numpy" in sys.modules:
        states.update(_numpy_state())
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
        own = torch.cuda.current_device() if device.index is None else device.index
        for index in range(torch.cuda.device_count()):
            if index != own:
                states[f"cuda:{index}"] = torch.cuda.get_rng_state(index)
    elif device.type == "mps":
        states["mps"] = torch.mps.get_rng_state()
    return states


def restore_rng(states: dict[str, torch.Tensor], device: torch.device | str) -> None:
    """Set the generators; those that the checkpoint has no state of stay as they are.

    Args:
        states: From :func:`collect_rng`.
        device: Where this rank computes; need not be the device of the run that saved.
    """
    device = torch.device(device)
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "python" in states:
        version, *words = states["python"].tolist()
        gauss = states["python_gauss"].tolist() if "python_gauss" in states else []
        random.setstate((version, tuple(words), gauss[0] if gauss else None))
    if "numpy" in states:
        _restore_numpy(states)
    if device.type == "cuda":
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)
        own = torch.cuda.current_device() if device.index is None else device.index
        for index in range(torch.cuda.device_count()):
            if index != own and f"cuda:{index}" in states:
                torch.cuda.set_rng_state(states[f"cuda:{index}"], index)
    elif device.type == "mps" and "mps" in states:
        torch.mps.set_rng_state(states["mps"])


def _numpy_state() -> dict[str, torch.Tensor]:
    import numpy as np

    state = np.random.get_state(legacy=False)
    if not isinstance(state, dict) or state["bit_generator"] != "MT19937":
        return {}
    inner = state["state"]
    return {
        "numpy": torch.tensor([*inner["key"].tolist(), int(inner["pos"]), int(state["has_gauss"])], dtype=torch.int64),
        "numpy_gauss": torch.tensor([float(state["gauss"])], dtype=torch.float64),
    }


def _restore_numpy(states: dict[str, torch.Tensor]) -> None:
    import numpy as np

    *key, pos, has_gauss = states["numpy"].tolist()
    gauss = float(states["numpy_gauss"][0]) if "numpy_gauss" in states else 0.0
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), pos, has_gauss, gauss))
