"""DeepSpeedCPUAdam in the place of torch's Adam where the optimizer steps in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder
from torch.optim import Adam, AdamW, Optimizer

from distkit.errors import ConfigError, StrategyUnavailable
from distkit.strategies.zero_compile import load_operator

if TYPE_CHECKING:
    from distkit.config import Config
    from distkit.world import World

__all__ = ["HostAdam", "host_optimizer"]

KEY = "zero_force_ds_cpu_optimizer"
"""DeepSpeed's own key: with offload, true asks for its optimizer."""

Groups = list[dict[str, Any]]


class HostAdam(DeepSpeedCPUAdam):  # type: ignore[misc]
    """DeepSpeedCPUAdam with the groups and state of torch's Adam, so that checkpoints don't show which one stepped.

    It counts steps in a plain int and keeps a ``bias_correction`` in each group (ops/adam/cpu_adam.py, 0.19.8).

    Args:
        groups: Those of a torch Adam or AdamW.
        decoupled: Whether weight decay is AdamW's.
    """

    def __init__(self, groups: Groups, *, decoupled: bool) -> None:
        super().__init__(groups, adamw_mode=decoupled)
        for group in self.param_groups:
            group.pop("bias_correction")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of every parameter that has a gradient."""
        for state in self.state.values():
            state["step"] = int(state["step"])
        for group in self.param_groups:
            group["bias_correction"] = True
        result = super().step(closure)
        for group in self.param_groups:
            group.pop("bias_correction")
        for state in self.state.values():
            state["step"] = torch.tensor(float(state["step"]))
        return result


def host_optimizer(optimizer: Optimizer, config: Config, world: World) -> Optimizer:
    """The optimizer that is to step in host memory.

    With ``memory.offload`` on a GPU, a torch Adam or AdamW is exchanged for DeepSpeedCPUAdam, which does the same
    arithmetic with vector instructions on all cores; ``engine.deepspeed.zero_force_ds_cpu_optimizer`` says true (do, or
    fail) or false (don't). Where it can't be compiled the script's own optimizer stays.

    Raises:
        ConfigError: True was said, and the optimizer is another one.
        StrategyUnavailable: True was said, and the operator can't be compiled here.
    """
    wanted = config.engine.deepspeed.get(KEY)
    if config.memory.offload == "none" or wanted is False or (wanted is None and world.device.type == "cpu"):
        return optimizer
    problem = _why_not(optimizer)
    if problem is not None:
        if wanted:
            raise ConfigError(
                f"engine.deepspeed.{KEY}=true asks for DeepSpeedCPUAdam, but {problem}",
                hint=f"--set engine.deepspeed.{KEY}=false",
            )
        return optimizer
    failed = load_operator(CPUAdamBuilder(), world)
    if not world.all(failed is None):
        if wanted:
            raise StrategyUnavailable(
                f"engine.deepspeed.{KEY}=true asks for DeepSpeedCPUAdam, but its operator can't be compiled here: "
                f"{failed or 'it failed on another rank'}",
                hint=f"apt-get install g++ ninja-build   or --set engine.deepspeed.{KEY}=false",
            ) from failed
        return optimizer
    groups = [{**group, "lr": float(group["lr"])} for group in optimizer.param_groups]
    adam = HostAdam(groups, decoupled=isinstance(optimizer, AdamW))
    adam.state.update(optimizer.state)
    return adam


def _why_not(optimizer: Optimizer) -> str | None:
    if type(optimizer) not in (Adam, AdamW):
        return f"the optimizer is {type(optimizer).__name__}, and not Adam or AdamW"
    for flag in ("amsgrad", "maximize", "differentiable", "capturable"):
        if any(group.get(flag) for group in optimizer.param_groups):
            return f"the optimizer has {flag}=True"
    return None
