"""What the engines themselves do, in worker processes: train, save in their own way, note the truth, train on.

Each trains a tiny GPT for three steps, saves it, writes whole parameters and moments into ``truth.pt``, and trains for
three steps more on the batches with which an epoch begins; their losses are the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import default_collate

from tests.contract.models import TinyGPT, Tokens, groups, sample_losses

BATCH, STEPS = 12, 3
MOMENTS = ("exp_avg", "exp_avg_sq")


def batches() -> Iterator[dict[str, Any]]:
    """This rank's rows of the batches of an epoch that is not shuffled."""
    data, rank, size = Tokens(36), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    share = BATCH // size
    for step in range(STEPS):
        start = BATCH * step + share * rank
        yield default_collate([data[i] for i in range(start, start + share)])


def make(model: dict[str, Any] | None, names: bool = False) -> tuple[TinyGPT, torch.optim.Optimizer, LambdaLR]:
    torch.manual_seed(0)
    net = TinyGPT(**(model or {}))
    optimizer = torch.optim.AdamW(groups(net), lr=1e-2)
    return net, optimizer, LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def run(step: Callable[[dict[str, Any]], torch.Tensor]) -> list[float]:
    """The losses over all ranks."""
    losses = []
    for batch in batches():
        loss = step(batch).detach().clone()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        losses.append(float(loss))
    return losses


def note_truth(folder: str, tensors: dict[str, torch.Tensor]) -> None:
    if os.environ["RANK"] == "0":
        torch.save({name: tensor.detach().clone() for name, tensor in tensors.items()}, Path(folder) / "truth.pt")


def truth_of(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in net.named_parameters():
        found[f"{name}/parameter"] = whole(parameter)
        for moment in MOMENTS if parameter in optimizer.state else ():
            found[f"{name}/{moment}"] = whole(optimizer.state[parameter][moment])
    found["calls/buffer"] = net.get_buffer("calls")
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def deepspeed(folder: str, stage: int, *, bf16: bool = False, model: dict[str, Any] | None = None) -> list[float]:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from distkit.strategies.zero_engine import leave

    # Counters that ranks compare, and that stand elsewhere in a worker that lived through fewer engines.
    deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    deepspeed.zero.Init.param_id = 0
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # minutes of compiling, for inference only
    leave()
    deepspeed.init_distributed("gloo", verbose=False)
    net, optimizer, scheduler = make(model)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH // int(os.environ["WORLD_SIZE"]),
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 10_000,
            "stage3_param_persistence_threshold": 100,
            "sub_group_size": 3_000,  # several groups of stage 3 for one of the optimizer's
        },
        "gradient_clipping": 0.0,  # 1.0 by default
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if bf16:
        config["bf16"] = {"enabled": True}
    engine = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]

    def step(batch: dict[str, Any]) -> torch.Tensor:
        loss = sample_losses(engine, batch).mean()
        engine.backward(loss)
        engine.step()
        return loss

    run(step)
    engine.save_checkpoint(folder, client_state={"epoch": 1, "mine": "kept by the user"})
    if stage == 0:
        note_truth(folder, truth_of(net, optimizer))
    else:
        if stage < 3:  # DeepSpeed 0.19.8 links state after the first group's first step, when the second has none yet
            engine.optimizer._hp_optimizer_states_linked = False
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        found = {}
        for name, p in net.named_parameters():
            if p.requires_grad:
                found[f"{name}/parameter"] = safe_get_full_fp32_param(p)
                for moment in MOMENTS:
                    found[f"{name}/{moment}"] = safe_get_full_optimizer_state(p, moment)
            else:
                with deepspeed.zero.GatheredParameters([p], enabled=stage == 3):
                    found[f"{name}/parameter"] = p.detach().clone()
        note_truth(folder, {**found, "calls/buffer": net.get_buffer("calls")})
    losses = run(step)
    engine.destroy()
    leave()
    dist.destroy_process_group()
    return losses


def _sharded() -> tuple[TinyGPT, torch.optim.Optimizer, Callable[[dict[str, Any]], torch.Tensor]]:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = TinyGPT()
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    optimizer = torch.optim.AdamW(groups(net), lr=1e-2)

    def step(batch: dict[str, Any]) -> torch.Tensor:
        loss = sample_losses(net, batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return net, optimizer, step


def dcp(folder: str, *, flat: bool = False, titan: bool = False) -> list[float]:
    """FSDP2, saved with torch.distributed.checkpoint; ``titan`` as torchtitan lays it out."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    net, optimizer, step = _sharded()
    run(step)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, state = get_state_dict(net, optimizer, options=options)
    if titan:
        saved = {**model, "optimizer": state, "train_state": {"step": torch.tensor(STEPS)}}
    else:
        saved = {"model": model, "optimizer": state, "epoch": 1, "step": STEPS, "extra": {"a": torch.ones(2)}}
    checkpoint.save(saved, checkpoint_id=folder)
    note_truth(folder, truth_of(net, optimizer))
    losses = run(step)
    dist.destroy_process_group()
    return losses


def accelerate_fsdp(folder: str, *, full: bool = False) -> list[float]:
    """FSDP2 through the functions that save_state calls; Accelerator itself takes FSDP on accelerators only."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    net, optimizer, step = _sharded()
    run(step)
    kind = "FULL_STATE_DICT" if full else "SHARDED_STATE_DICT"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    accelerator = Accelerator(cpu=True)
    save_fsdp_model(plugin, accelerator, net, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, net, folder)
    torch.save({"step": 0, "random_state": object}, Path(folder) / f"random_states_{os.environ['RANK']}.pkl")
    note_truth(folder, truth_of(net, optimizer))
    losses = run(step)
    accelerator.end_training()
    accelerator.free_memory()
    type(accelerator.state)._reset_state(True)
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses


def accelerate(folder: str, *, safe: bool = True) -> list[float]:
    """One process, the usual loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net, optimizer, scheduler = accelerator.prepare(*make(None))

    def step(batch: dict[str, Any]) -> torch.Tensor:
        loss = sample_losses(net, batch).mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss

    run(step)
    accelerator.save_state(folder, safe_serialization=safe)
    note_truth(folder, truth_of(accelerator.unwrap_model(net), optimizer.optimizer))
    losses = run(step)
    type(accelerator.state)._reset_state(True)
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses


def plain(folder: str, *, lightning: bool = False, names: bool = False) -> list[float]:
    """A loop of one's own and ``torch.save``; or the same state in the form of a ``.ckpt`` of Lightning 2.6."""
    net, optimizer, scheduler = make(None)
    if names:
        for group in optimizer.param_groups:
            known = {id(p): name for name, p in net.named_parameters()}
            group["param_names"] = [known[id(p)] for p in group["params"]]

    def step(batch: dict[str, Any]) -> torch.Tensor:
        loss = sample_losses(net, batch).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss

    run(step)
    Path(folder).mkdir(parents=True, exist_ok=True)
    state = net.state_dict()
    if lightning:
        saved: dict[str, Any] = {
            "epoch": 1,
            "global_step": STEPS,
            "pytorch-lightning_version": "2.6.6",
            "state_dict": {f"net.{name}": tensor for name, tensor in state.items()},
            "loops": {"fit_loop": {"epoch_progress": {"current": {"completed": 1}}}},
            "callbacks": {"ModelCheckpoint{}": {"best_model_path": ""}},
            "optimizer_states": [optimizer.state_dict()],
            "lr_schedulers": [scheduler.state_dict()],
            "hparams_name": "kwargs",
            "hyper_parameters": {"width": 16},
        }
    else:
        saved = {
            "model_state_dict": {f"module.{name}": tensor for name, tensor in state.items()},
            "optimizer_state_dict": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": 1,
            "best": 3.5,
        }
    torch.save(saved, Path(folder) / "last.ckpt")
    note_truth(folder, truth_of(net, optimizer))
    return run(step)


def build() -> TinyGPT:
    """For --model."""
    return TinyGPT()


def build_with_optimizer() -> tuple[TinyGPT, torch.optim.Optimizer]:
    net = TinyGPT()
    return net, torch.optim.AdamW(groups(net), lr=1e-2)


def build_other() -> TinyGPT:
    return TinyGPT(width=32)


def build_frozen() -> TinyGPT:
    return TinyGPT(frozen=True)
