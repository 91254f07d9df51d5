"""DeepSpeed's engine with the seams that the accumulation window needs, and the module that scripts call."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from distkit.errors import StrategyUnavailable
from distkit.strategies.tensor_parallel.sharded import ShardedTensor
from distkit.strategies.zero_optimizer import PartitionOptimizer
from distkit.strategies.zero_partitions import Layout, layout_of

if TYPE_CHECKING:
    from distkit.strategies.zero_units import Unit
    from distkit.world import World

import deepspeed
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import ZERO_OPTIMIZATION
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

__all__ = [
    "Bundle",
    "Engine",
    "ZeroModule",
    "computes_fp16",
    "gathered",
    "join",
    "leave",
    "release",
    "split_at_birth",
    "start_engine",
]


def _see_parts() -> None:
    """Stage 3 puts an autograd function around each module's inputs and outputs, to gather and free weights in backward
    (parameter_offload.py:434). Around a tensor that is split over a tensor group it belongs around this rank's part, since
    autograd sees nothing else of it."""
    whole = zero_utils.apply_to_tensors_only
    if getattr(whole, "sees_parts", False):
        return

    def apply(function: Any, value: Any, warning_msg_fn: Any = None) -> Any:
        if isinstance(value, ShardedTensor):
            return value.with_local(whole(function, value.local, warning_msg_fn))
        return whole(function, value, warning_msg_fn)

    apply.sees_parts = True  # type: ignore[attr-defined]
    zero_utils.apply_to_tensors_only = parameter_offload.apply_to_tensors_only = apply


class TensorGroups:
    """What DeepSpeed asks of Megatron's ``mpu``: which ranks share each layer, and which see different batches."""

    def __init__(self, world: World) -> None:
        self._world = world

    def get_model_parallel_rank(self) -> int:
        return self._world.tensor.rank

    def get_model_parallel_world_size(self) -> int:
        return self._world.tensor.size

    def get_model_parallel_group(self) -> Any:
        return self._world.collectives.tensor_group

    def get_data_parallel_rank(self) -> int:
        return self._world.data.rank

    def get_data_parallel_world_size(self) -> int:
        return self._world.data.size

    def get_data_parallel_group(self) -> Any:
        return self._world.collectives.data_group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group


class Engine(DeepSpeedEngine):  # type: ignore[misc]
    """DeepSpeed's engine in which the end of a window and the step are two calls.

    Between them the gradients can be scaled, measured and clipped by the same arithmetic as in every other strategy.
    """

    window_closed = False
    """Whether the gradients of the window are reduced."""

    def _do_optimizer_sanity_check(self, basic_optimizer: Optimizer) -> Any:
        """Always the ZeRO optimizer: for stage 1 in bf16 with fp32 accumulation DeepSpeed 0.19.8 takes another class
        (BF16_Optimizer, engine.py:2316), which keeps whole fp32 gradients for good and can't do without its own norm,
        though its stage-1 class accumulates in fp32 too (``use_grad_accum_attribute``)."""
        return ZERO_OPTIMIZATION

    def _broadcast_model(self) -> None:
        """DeepSpeed's own sends each parameter as bytes, as which one without dimensions can't be viewed (engine.py:2059)."""
        scalars = [p for p in self.module.parameters() if p.dim() == 0]
        for parameter in scalars:
            parameter.data = parameter.data.view(1)
        super()._broadcast_model()
        for parameter in scalars:
            parameter.data = parameter.data.view(())

    def _create_module_forward_pre_hook(self) -> Any:
        """DeepSpeed's own (engine.py:2916), out of torch.compile's sight: it would trace timers, logs and checks too."""
        run = torch.compiler.disable(lambda module, inputs, kwargs: self._forward_prologue(inputs, kwargs))
        return self.module.register_forward_pre_hook(run, with_kwargs=True)

    def _create_module_forward_post_hook(self) -> Any:
        """See above."""
        return self.module.register_forward_hook(torch.compiler.disable(lambda *given: self._forward_epilogue()))

    def allreduce_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Not a second time: step() calls it again for stage 1."""
        if not self.window_closed:
            super().allreduce_gradients(*args, **kwargs)

    def close_window(self) -> None:
        """Reduce what is left to reduce, so that this rank's partitions hold their gradients."""
        if not self.zero_optimization_partition_weights():  # stage 3 reduces in every backward, and needs no more
            self._running_engine_step = True  # what is_gradient_accumulation_boundary() answers by (engine.py:3442)
            try:
                if self.zero_optimization_partition_gradients():
                    type(self.optimizer).finalize_gradient_accumulation_boundary(self.optimizer)
                else:
                    self.allreduce_gradients()
            finally:
                self._running_engine_step = False
        self.window_closed = True

    def begin_window(self) -> None:
        """The step is done, or its gradients are forgotten."""
        self.window_closed = False

    # -- the loss scale of fp16 -------------------------------------------------------------------------------------
    #
    # DeepSpeed's scaler finds the scale, and the step is told that it is 1: DeepSpeed 0.19.8 divides gradients by the scale
    # after it has grown it (stage_1_and_2.py, step: _update_scale before unscale_and_clip_grads), so that once in
    # loss_scale_window steps the gradient would be half of what it is.

    @property
    def scales_losses(self) -> bool:
        """Whether it computes in fp16."""
        return bool(self.fp16_enabled())

    def scale_losses(self) -> None:
        """Losses that come are multiplied by the present scale."""
        if self.scales_losses:
            self.optimizer.override_loss_scale(self.optimizer.loss_scaler.cur_scale)

    def take_loss_scale(self) -> float:
        """The scale in the gradients, for the caller to divide by; 1 from now on."""
        if not self.scales_losses:
            return 1.0
        scale = float(self.optimizer.loss_scale)
        self.optimizer.override_loss_scale(1.0)
        return scale

    def loss_scale_state(self) -> dict[str, Any]:
        """What its scaler must remember; JSON values."""
        return {k: v for k, v in vars(self.optimizer.loss_scaler).items() if isinstance(v, int | float)}

    def load_loss_scale_state(self, state: dict[str, Any]) -> None:
        """Take it back."""
        vars(self.optimizer.loss_scaler).update(state)

    def expect_foreign_backward(self) -> None:
        """Another engine's loss may run through this model; its hooks are not to ask for this one's loss scale."""
        self._manual_backward_expected = True

    def backward_is_over(self) -> None:
        """No backward runs through this model now.

        Stage 3 adds to the gradients from the second backward on, but counts at the next forward (stage3.py,
        clear_backward_seen_flag): two forwards followed by two backwards would lose the first one's gradients. And each
        forward's output counts as one entry into backward, but its end as one exit, whatever the number of forwards.
        """
        self.optimizer.clear_backward_seen_flag()
        self.optimizer._backward_active_depth = 0


class Bundle(nn.ModuleList):
    """Several modules that one optimizer trains, as the one module that an engine takes."""

    def forward(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Run one of them."""
        return self[index](*args, **kwargs)


class ZeroModule(nn.Module):
    """What a script calls in its model's place.

    Args:
        module: The script's own module.
        run: Runs it inside of its engine.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self.__dict__["_run"] = run  # not a submodule: the engine holds the module too

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        return self._run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def join(world: World) -> None:
    """Let DeepSpeed use the process group that the world was made with.

    Raises:
        StrategyUnavailable: DeepSpeed chose another kind of device earlier in this process.
    """
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))  # its engine reads it (engine.py:1967)
    # Without this, every start compiles a shared-memory all-reduce for minutes (comm/ccl.py, build_shm_op), which only
    # inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    # DeepSpeed 0.19.8 calls collectives by names that torch 2.13 has given others; they do the same.
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+` is deprecated", FutureWarning)
    kind = deepspeed.get_accelerator()._name
    if kind != world.device.type:
        raise StrategyUnavailable(
            f"this process computes on {world.device.type}, but DeepSpeed found {kind} when it was imported",
            hint=f"export DS_ACCELERATOR={world.device.type}",
        )
    leave()  # of a world in this process that wasn't closed
    # Counters by which stage 3 compares its modules between ranks (parameter_offload.py:335): other ranks may not have
    # lived through the same worlds.
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    deepspeed.zero.Init.param_id = 0
    deepspeed.comm.init_distributed(dist_backend=world.backend, dist_init_required=False, verbose=False)


def computes_fp16() -> bool:
    """Whether DeepSpeed's engine would take fp16 on this device (engine.py:2003)."""
    return bool(deepspeed.get_accelerator().is_fp16_supported())


@contextmanager
def split_at_birth(settings: dict[str, Any]) -> Iterator[None]:
    """Modules that are made here have their parameters cut over the ranks (deepspeed.zero.Init)."""
    with _scalars_split(), deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(settings)):
        yield


@contextmanager
def _scalars_split() -> Iterator[None]:
    """While it is open stage 3 takes parameters without dimensions too, such as a temperature.

    It cuts them like others, but first sends their values round as bytes, as which they can't be viewed
    (partition_parameters.py:1204).
    """
    cut = deepspeed.zero.Init._zero_init_param

    def cut_scalar_too(init: Any, parameter: nn.Parameter) -> None:
        if parameter.dim() > 0:
            cut(init, parameter)
            return
        init._convert_to_deepspeed_param(parameter)
        group = init.get_partition_dp_group(parameter)
        torch.distributed.broadcast(parameter.data, torch.distributed.get_global_rank(group, 0), group=group)
        parameter.partition()  # type: ignore[attr-defined]

    deepspeed.zero.Init._zero_init_param = cut_scalar_too
    try:
        yield
    finally:
        deepspeed.zero.Init._zero_init_param = cut


@contextmanager
def gathered(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Stage-3 parameters whole on every rank."""
    with deepspeed.zero.GatheredParameters(parameters):
        yield


def release(unit: Unit) -> None:
    """End an engine so that its memory is free."""
    for hook in unit.hooks:
        hook.remove()
    unit.engine.destroy()


def leave() -> None:
    """Take back what DeepSpeed left in globals; the process group itself is the world's.

    Stage 3 leaves its own ``torch.nn.functional.linear`` behind for good (partition_parameters.py:411). Its backward
    visits parameters in another order, so ranks with and without it would fill the buckets of a later engine differently.
    """
    original = getattr(deepspeed.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses, "linear_bk", None)
    if original is not None:
        torch.nn.functional.linear = original
    # Stage 3 keeps every root module, and through a cache on a method every module and its coordinator.
    parameter_offload.FWD_MODULE_STACK.clear()
    release = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    inspect.getclosurevars(release).nonlocals["func"].cache_clear()
    deepspeed.utils.groups._release_process_group_references()
    deepspeed.comm.comm.cdb = None


def start_engine(
    module: nn.Module, optimizer: Optimizer, settings: dict[str, Any], world: World
) -> tuple[Engine, Layout]:
    """DeepSpeed's engine over a module, stepping the script's optimizer.

    What ``deepspeed.initialize`` does for a plain model, with :class:`Engine` in the place of its class.

    Args:
        module: On any device.
        optimizer: The script's.
        settings: DeepSpeed's JSON.
        world: Its data-parallel ranks share the optimizer's states.
    """
    mpu = None
    if world.tensor.size > 1:
        mpu = TensorGroups(world)
        _see_parts()
    settings = {**copy.deepcopy(settings), "zero_force_ds_cpu_optimizer": False}  # zero_cpu_adam.py follows that key
    partitioned = PartitionOptimizer(optimizer)
    deepspeed.zero.partition_parameters.shutdown_init_context()
    try:
        parsed = DeepSpeedConfig(settings, mpu)
        with _scalars_split():
            engine = Engine(
                args=None,
                model=module,
                optimizer=partitioned,
                config=settings,
                config_class=parsed,
                mpu=mpu,
                dist_init_required=False,
            )
    finally:
        deepspeed.zero.partition_parameters.restore_init_context()
    zero = engine.optimizer
    zero.clip_grad = 0.0  # clip_grad_norm does it, with the norm that it reports
    zero.finalize_gradient_accumulation_boundary = lambda: None  # close_window() has done it when step() asks
    # A host value, so that step() neither waits for the device nor reduces a norm of its own.
    if hasattr(zero, "scaled_global_norm"):
        zero.scaled_global_norm = lambda norm_type=2: torch.zeros(())
    else:
        zero._get_norm_groups = lambda: [torch.zeros(())]
    layout = layout_of(zero)
    layout.share_masters()
    partitioned.adopt(layout.partitions)
    return engine, layout
