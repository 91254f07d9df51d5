"""Seeds: one for all that must be equal on all ranks, and derived ones for all that must differ."""

from __future__ import annotations

__all__ = ["mix_seed", "seed_everything"]

MASK = 2**64 - 1


def mix_seed(*parts: int) -> int:
    """One 63-bit seed from several numbers; near numbers give unrelated seeds (SplitMix64, Steele et al. 2014)."""
    state = 0
    for part in parts:
        state = (state ^ (part & MASK)) + 0x9E3779B97F4A7C15 & MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return state >> 1


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), numpy and random; the same on all ranks, so that they build the same model."""
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
