"""How the engines go about what they are asked for: what a plan has to know of each, with where it can be read."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ENGINES", "Engine"]


@dataclass(frozen=True)
class Engine:
    """One of them.

    Args:
        master: Whether parameters are kept in 16 bits beside fp32 master copies, which the optimizer has; else parameters
            are fp32 and are cast for each use.
        gradient: Bytes of a gradient where computing is in 16 bits.
        scatters: Whether summed gradients go only to the rank that steps them; else to all, and the rest is dropped.
        kept: Elements of gathered parameters that stay until they are used again, where parameters are split.
        prefetched: Elements that are gathered ahead.
        outside_stays: Whether what belongs to no block is gathered once for forward and backward.
        small_stay: Whether small tensors stay whole on every rank, where parameters are split.
        whole_in_windows: Whether gradients are whole on every rank while micro batches are accumulated.
        twice_in_windows: Whether there are whole gradients beside the buckets while micro batches are accumulated.
        copies_gradients: Whether gradients travel in buffers beside the gradients themselves.
        cuts_flat: Whether what is split is cut out of all parameters in a row; a gradient that is cut is kept whole by both.
    """

    master: bool = False
    gradient: int = 4
    scatters: bool = True
    kept: float = 0.0
    prefetched: float = 0.0
    outside_stays: bool = False
    small_stay: bool = False
    whole_in_windows: bool = False
    twice_in_windows: bool = False
    copies_gradients: bool = False
    cuts_flat: bool = False


ENGINES = {
    # torch: fully_shard gathers a unit, and frees it after forward; the outermost one stays (its reshard_after_forward).
    # Between the micro batches of a window nothing is reduced (set_requires_gradient_sync).
    "torch": Engine(outside_stays=True, whole_in_windows=True),
    # torch's DDP: gradients are views of its buckets, but those of micro batches that aren't exchanged are tensors of their own.
    "ddp": Engine(twice_in_windows=True),
    # distkit: buckets are filled anew for each exchange (strategies/horovod_gradients.py).
    "horovod": Engine(copies_gradients=True),
    # DeepSpeed 0.19.8: stages 1 and 2 all-reduce buckets of several ranks' partitions (use_multi_rank_bucket_allreduce).
    # Stage 3 frees a parameter only if it isn't used again within stage3_max_reuse_distance (1e9) elements, and after
    # forward that counts the way to the model's end and back; it gathers stage3_prefetch_bucket_size (5e7) ahead.
    # Gradients are accumulated in fp32: data_types.grad_accum_dtype, which distkit sets.
    "deepspeed": Engine(master=True, scatters=False, kept=5e8, prefetched=5e7, small_stay=True, cuts_flat=True),
    # As arXiv 1910.02054 counts: gradients in 16 bits, nothing kept, nothing sent in vain.
    "published": Engine(master=True, gradient=2),
}
"""By name; ``published`` is no engine, and is there to compute the papers' figures."""
