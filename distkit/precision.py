"""One precision policy for every strategy.

``bf16`` and ``fp16`` compute in 16 bits under autocast and keep parameters, gradients and optimizer states in fp32.
``bf16-pure`` keeps everything in bf16; it is a choice of its own, since small updates are lost to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distkit.errors import ConfigError
from distkit.forward import around_forward, map_tensors

__all__ = ["Precision"]

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "bf16-pure": torch.bfloat16}


class Precision:
    """How a forward is cast and a loss is scaled.

    Args:
        name: The config key ``precision``.
        device: Where the model computes.

    Raises:
        ConfigError: The device can't compute in this dtype.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.compute_dtype = COMPUTE[name]
        self.pure = name == "bf16-pure"
        if device.type == "cuda" and self.compute_dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
            raise ConfigError(
                f"precision was set to {name!r}, but {torch.cuda.get_device_name(device)} has no bf16",
                hint="--set precision=fp16",
            )

    @property
    def mixed(self) -> bool:
        """Whether compute is in 16 bits over fp32 master weights."""
        return self.compute_dtype is not torch.float32 and not self.pure

    def new_scaler(self) -> torch.amp.GradScaler | None:
        """A loss scaler for fp16, whose gradients would otherwise underflow; None for the others."""
        return torch.amp.GradScaler(self.device.type) if self.name == "fp16" else None

    def apply(self, model: nn.Module) -> nn.Module:
        """Make the model's forward compute in the policy's dtype and give fp32 results; in place.

        Inputs stay as they are under autocast, and floating ones are cast for ``bf16-pure``. Floating outputs come back in
        fp32, so that a loss computed outside of the model is computed in fp32.
        """
        if self.pure:
            model.to(self.compute_dtype)
            around_forward(model, self._forward_pure)
        elif self.mixed:
            around_forward(model, self._forward_mixed)
        return model

    def _forward_mixed(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.autocast(self.device.type, dtype=self.compute_dtype):
            output = forward(*args, **kwargs)
        return map_tensors(output, _to_fp32)

    def _forward_pure(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = map_tensors((args, kwargs), self._to_compute)
        return map_tensors(forward(*args, **kwargs), _to_fp32)

    def _to_compute(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.compute_dtype) if tensor.is_floating_point() else tensor


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
