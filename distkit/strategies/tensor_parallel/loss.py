"""Cross entropy over logits of which each rank has some classes: no rank sees them all (Megatron-LM, arXiv 1909.08053, 3)."""

from __future__ import annotations

from typing import Any

import torch

from distkit.strategies.tensor_parallel.group import TensorGroup

__all__ = ["cross_entropy_of_part"]


def cross_entropy_of_part(
    logits: torch.Tensor, target: torch.Tensor, group: TensorGroup, *, ignore_index: int, reduction: str
) -> torch.Tensor:
    """What ``torch.nn.functional.cross_entropy`` gives for whole logits.

    Args:
        logits: This rank's classes, [samples, classes / ranks].
        target: Classes of all samples, [samples], integers.
        group: The tensor group, rank r with the r-th part of the classes.
        ignore_index: Samples of this class have no loss.
        reduction: ``none``, ``sum`` or ``mean``.

    Returns:
        A scalar, or [samples] for ``none``; of the logits' type, fp32 under autocast.

    Raises:
        IndexError: A target is no class, as torch says it; on a GPU, where asking would wait for it, the loss is NaN.
    """
    kept = target != ignore_index
    wrong = kept & ((target < 0) | (target >= logits.shape[-1] * group.size))
    if target.device.type == "cpu" and bool(wrong.any()):
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")
    losses: torch.Tensor = _CrossEntropy.apply(logits, target.masked_fill(~kept, 0), kept, group)  # type: ignore[no-untyped-call]
    losses = losses.masked_fill(wrong, float("nan"))
    if not torch.is_autocast_enabled(logits.device.type):
        losses = losses.to(logits.dtype)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / kept.sum() if reduction == "mean" else total


class _CrossEntropy(torch.autograd.Function):
    """Three exchanges of one number a sample: the largest logit, the sum of exponentials, the target's logit."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, kept: torch.Tensor, group: TensorGroup
    ) -> torch.Tensor:
        classes, wide = logits.shape[-1], torch.promote_types(logits.dtype, torch.float32)
        shifted = logits.to(wide) - group.maximum(logits.max(-1).values.to(wide)).unsqueeze(-1)
        own = target - group.rank * classes
        outside = (own < 0) | (own >= classes)
        own = own.masked_fill(outside, 0).unsqueeze(-1)
        wanted = shifted.gather(-1, own).squeeze(-1).masked_fill(outside, 0.0)
        exponentials = shifted.exp()
        total, wanted = group.all_reduce(torch.stack([exponentials.sum(-1), wanted])).unbind()
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), own, outside, kept)
        ctx.dtype = logits.dtype
        return (total.log() - wanted).masked_fill(~kept, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        probabilities, own, outside, kept = ctx.saved_tensors
        here = (~outside).to(probabilities.dtype).unsqueeze(-1)
        change = probabilities.scatter_add(-1, own, -here)
        scale = gradients[0].to(change.dtype).masked_fill(~kept, 0.0)
        return (change * scale.unsqueeze(-1)).to(ctx.dtype), None, None, None
