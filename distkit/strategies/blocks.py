"""The repeated blocks of a model: what is checkpointed, sharded and compiled one by one."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any

from torch import nn

from distkit.errors import ConfigError
from distkit.forward import around_forward, plain_class

__all__ = ["apply_activation_checkpointing", "find_blocks"]


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost repeated blocks: at least two siblings of one class, with parameters, in one ModuleList,
    Sequential or the like.

    Returns:
        Names and modules, in the model's order; empty when nothing repeats.
    """
    found: list[tuple[str, nn.Module]] = []
    _collect(model, "", found)
    return found


def _collect(module: nn.Module, prefix: str, found: list[tuple[str, nn.Module]]) -> None:
    children = list(module.named_children())
    counts = Counter(plain_class(child) for _, child in children)
    container = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    for name, child in children:
        full = f"{prefix}{name}"
        composite = any(True for _ in child.children()) and any(True for _ in child.parameters())
        if (
            container
            and counts[plain_class(child)] > 1
            and composite
            and not isinstance(child, nn.ModuleList | nn.ModuleDict)
        ):
            found.append((full, child))
        else:
            _collect(child, full + ".", found)


def apply_activation_checkpointing(model: nn.Module, mode: str) -> int:
    """Recompute the repeated blocks' activations in backward; in place, names don't change.

    Non-reentrant, so that DDP sees each parameter's gradient once.

    Args:
        model: The user's module, not wrapped yet.
        mode: ``none``, ``full`` (keep only each block's input) or ``selective`` (keep the results of matrix products
            and attention too, recompute the rest).

    Returns:
        Number of blocks.

    Raises:
        ConfigError: The model has no repeated blocks.
    """
    if mode == "none":
        return 0
    blocks = find_blocks(model)
    if not blocks:
        raise ConfigError(
            f"memory.activation_checkpointing was set to {mode!r}, but {type(model).__name__} has no repeated blocks "
            "(two or more modules of one class in a ModuleList or Sequential)",
            hint="--set memory.activation_checkpointing=none   and use torch.utils.checkpoint inside the model",
        )
    around = _recompute_all if mode == "full" else _recompute_cheap
    for _, block in blocks:
        around_forward(block, around)
    return len(blocks)


def _recompute_all(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _recompute_cheap(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(_policy)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    save = operator in _dear_operators()
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


@lru_cache(maxsize=1)
def _dear_operators() -> set[Any]:
    """Matrix products and attention kernels: dear to compute, and their results are small beside the rest."""
    import torch

    aten = torch.ops.aten
    names = (
        "mm",
        "bmm",
        "addmm",
        "linear",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    return {getattr(aten, name).default for name in names if hasattr(aten, name)}
