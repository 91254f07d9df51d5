"""What the tests of the zero strategies run in worker processes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import distkit
from distkit.state import Region
from tests.contract.cases import checkpoint_digest, digests, read_log
from tests.contract.models import TinyGPT, Tokens, groups, sample_losses


def start(run_dir: str, strategy: str, **settings: Any) -> distkit.Trainer:
    base = {
        "strategy": strategy,
        "run_dir": run_dir,
        "log.to": ["jsonl"],
        "log.every_steps": 1,
        "checkpoint.at_end": False,
        "batch.per": "global",
    }
    return distkit.Trainer({**base, **settings})


def trained(
    run_dir: str,
    strategy: str,
    *,
    settings: dict[str, Any] | None = None,
    optimizer: str = "AdamW",
    steps: int = 4,
    model: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A short training; its log, and what steps and was made of it."""
    trainer = start(run_dir, strategy, max_steps=steps, **(settings or {}))
    net = TinyGPT(**(model or {}))
    own = getattr(torch.optim, optimizer)(groups(net), lr=1e-2)
    net, opt, loader = trainer.prepare(net, own, DataLoader(Tokens(36), batch_size=12, shuffle=True))
    names = set(net.state_dict())
    for _ in trainer.epochs(3):
        for item in loader:
            trainer.step(sample_losses(net, item).mean())
    state = trainer.model_state_dict(net)
    unit = trainer.strategy.units[0] if hasattr(trainer.strategy, "units") else None
    result = {
        "optimizer": type(opt).__name__,
        "same_optimizer": opt is own,
        "names": sorted(names),
        "model": digests({name: t.float() for name, t in state.items()}),
        "dtypes": sorted({str(t.dtype) for t in state.values()}),
        "runs": len(unit.partitioned.runs) if unit else 0,
        "swapped": sum(p.swapped for p in unit.layout.partitions) if unit else 0,
    }
    trainer.close()
    return {**result, "log": read_log(run_dir)}


def two_backwards(run_dir: str, strategy: str) -> list[float]:
    """Two forwards, then two backwards, in one window; the norm of the sum."""
    trainer = start(run_dir, strategy)
    net = TinyGPT()
    net, opt, loader = trainer.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2), DataLoader(Tokens(36), batch_size=12)
    )
    norms = []
    for _ in trainer.epochs(1):
        for item in loader:
            losses = [sample_losses(net, item).mean(), sample_losses(net, item).square().mean()]
            for loss in losses:
                trainer.backward(loss, optimizer=opt)
            trainer.optimizer_step(opt)
            norms.append(0.0)
    trainer.close()
    return [line["grad_norm"] for line in read_log(run_dir)]


class Late(nn.Module):
    """A second branch that takes part in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.always(x) + (self.sometimes(x) if both else 0.0)


def sometimes_used(run_dir: str, strategy: str, accumulate: int = 1) -> dict[str, Any]:
    """The branch is used in steps 2 and 4 of 5, there in the last micro batch only; state and a checkpoint of it."""
    trainer = start(
        run_dir, strategy, **{"optim.unused_parameters": "allow", "batch.accumulate": accumulate, "max_steps": 5}
    )
    torch.manual_seed(0)
    net = Late()
    net, opt, loader = trainer.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1), DataLoader(Tokens(60), batch_size=12)
    )
    micro = 0
    for _ in trainer.epochs(1):
        for item in loader:
            step, last = micro // accumulate, micro % accumulate == accumulate - 1
            x = item["x"].float() / 32
            trainer.step(net(x, step in (1, 3) and last).square().mean())
            micro += 1
    path = trainer.save()
    from distkit.checkpoint import CheckpointReader

    state = {k: t.flatten().tolist() for k, t in trainer.model_state_dict(net).items()}
    trainer.close()
    reader = CheckpointReader(path, verify="fast")
    steps = {
        name: float(reader.read("optimizer", name, "step", Region((), ())))
        for name in reader.manifest.tensors["optimizer"]
    }
    return {"state": state, "steps": steps, "log": read_log(run_dir)}


def reloaded(run_dir: str, strategy: str, source: str) -> dict[str, float]:
    """Load the checkpoint above and write it out again."""
    trainer = start(run_dir, strategy, **{"checkpoint.resume": source, "optim.unused_parameters": "allow"})
    net = Late()
    net, opt, loader = trainer.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1), DataLoader(Tokens(60), batch_size=12)
    )
    path = trainer.save()
    trainer.close()
    from distkit.checkpoint import CheckpointReader

    reader = CheckpointReader(path, verify="fast")
    return {
        f"{name}/{kind}": float(reader.read("optimizer", name, kind, Region.whole(entry.shape)).double().sum())
        for name, kinds in reader.manifest.tensors["optimizer"].items()
        for kind, entry in kinds.items()
    }


def used_on_one_rank(run_dir: str, strategy: str) -> str:
    trainer = start(run_dir, strategy, **{"optim.unused_parameters": "allow"})
    net = Late()
    net, opt, loader = trainer.prepare(net, torch.optim.AdamW(net.parameters()), DataLoader(Tokens(24), batch_size=12))
    for item in loader:
        trainer.step(net(item["x"].float(), trainer.is_main).square().mean())
    return "no error"


def one_optimizer_two_models(run_dir: str, strategy: str) -> dict[str, Any]:
    """An encoder and a decoder under one optimizer, and a teacher that nothing trains."""
    trainer = start(run_dir, strategy, max_steps=3)
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(8, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 8))
    teacher = nn.Linear(8, 8).requires_grad_(False)
    opt = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
    encoder, decoder, teacher, opt, loader = trainer.prepare(
        encoder, decoder, teacher, opt, DataLoader(Tokens(36), batch_size=12)
    )
    for _ in trainer.epochs(1):
        for item in loader:
            x = item["x"].float() / 32
            trainer.step((decoder(encoder(x)) - teacher(x)).square().mean())
    states = [trainer.model_state_dict(m) for m in (encoder, decoder, teacher)]
    trainer.close()
    return {"log": read_log(run_dir), "states": [{k: t.flatten().tolist() for k, t in s.items()} for s in states]}


def refused(run_dir: str, strategy: str, what: str) -> str:
    trainer = start(run_dir, strategy)
    net = TinyGPT()
    if what == "two optimizers":
        parameters = list(net.parameters())
        trainer.prepare(net, torch.optim.SGD(parameters[:4], lr=1), torch.optim.SGD(parameters[4:], lr=1))
    elif what == "apart":
        trainer.prepare(net)
        trainer.prepare(torch.optim.SGD(net.parameters(), lr=1))
    elif what == "whole tensors":
        trainer.prepare(net, torch.optim.Adafactor(net.parameters()))
    elif what == "empty":
        net.none = torch.nn.Parameter(torch.zeros(0, 4))
        trainer.prepare(net, torch.optim.SGD(net.parameters(), lr=1))
    elif what == "nothing to train":
        trainer.prepare(net, torch.optim.SGD(net.requires_grad_(False).parameters(), lr=1))
    return "no error"


def state_from_before(run_dir: str, strategy: str) -> list[float]:
    """The optimizer had state when it was prepared."""
    trainer = start(run_dir, strategy, max_steps=3)
    torch.manual_seed(0)
    net = TinyGPT()
    opt = torch.optim.AdamW(groups(net), lr=1e-2)
    sample_losses(net, {k: v[None] for k, v in Tokens(8)[0].items() if isinstance(v, torch.Tensor)}).mean().backward()
    opt.step()
    opt.zero_grad()
    net, opt, loader = trainer.prepare(net, opt, DataLoader(Tokens(36), batch_size=12))
    for item in loader:
        trainer.step(sample_losses(net, item).mean())
    trainer.close()
    return [line["loss"] for line in read_log(run_dir)]


class Tempered(TinyGPT):
    """With a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.temperature


def without_dimensions(run_dir: str, strategy: str, optimizer: str, in_pieces: bool = False) -> dict[str, Any]:
    """Train a model that has a parameter without dimensions; Adagrad has state from the start, and that parameter's looks
    like a count of steps."""
    trainer = start(run_dir, strategy, max_steps=3)
    with trainer.init_model() if in_pieces else nullcontext():
        net = Tempered()
    made = {
        "Adagrad": lambda: torch.optim.Adagrad(net.parameters(), lr=1e-2, initial_accumulator_value=0.1),
        "AdamW": lambda: torch.optim.AdamW(net.parameters(), lr=1e-2),
    }
    net, opt, loader = trainer.prepare(net, made[optimizer](), DataLoader(Tokens(36), batch_size=12))
    for item in loader:
        trainer.step(sample_losses(net, item).mean())
    trainer.save()
    trainer.close()
    return {"log": read_log(run_dir), "shards": sorted(checkpoint_digest(run_dir))}


def built_in_pieces(run_dir: str, strategy: str) -> dict[str, Any]:
    """A model that is made under init_model; no rank has all of it."""
    settings = {"engine.deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}
    trainer = start(run_dir, strategy, max_steps=3, **settings)
    torch.manual_seed(trainer.world.rank)  # rank 0's numbers are to win
    with trainer.init_model():
        net = TinyGPT()
    held = sum(p.numel() for p in net.parameters())
    net, opt, loader = trainer.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2), DataLoader(Tokens(36), batch_size=12)
    )
    start_state = trainer.model_state_dict(net)
    with trainer.strategy.full_parameters(net):
        whole = sum(p.numel() for p in trainer.unwrap(net).parameters())
    for item in loader:
        trainer.step(sample_losses(net, item).mean())
    tied = trainer.unwrap(net).head.weight is trainer.unwrap(net).wte.weight
    trainer.close()
    return {
        "held": held,
        "whole": whole == sum(p.numel() for p in TinyGPT().parameters()),
        "tied": tied,
        "start": {k: t.flatten().tolist() for k, t in start_state.items()},
        "log": read_log(run_dir),
    }


def half(run_dir: str, strategy: str, *, precision: str = "fp16", overflow_at: int | None = None) -> dict[str, Any]:
    """fp16 on a CPU that DeepSpeed thinks has none: torch computes in it all the same, slowly."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    before = accelerator.is_fp16_supported
    accelerator.is_fp16_supported = lambda: True
    try:
        engine = {"fp16": {"initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 3}}
        trainer = start(run_dir, strategy, precision=precision, max_steps=8, **{"engine.deepspeed": engine})
        net = TinyGPT()
        opt = torch.optim.SGD(groups(net), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
        net, opt, loader, schedule = trainer.prepare(net, opt, DataLoader(Tokens(36), batch_size=12), schedule)
        scales, count = [], 0
        for _ in trainer.epochs(3):
            for item in loader:
                loss = sample_losses(net, item).mean()
                trainer.step(loss * float("inf") if count == overflow_at else loss)
                count += 1
                scales.append(trainer.strategy.units[0].zero.loss_scaler.cur_scale)
        state = trainer.strategy.state_dict()
        trainer.close()
        return {"log": read_log(run_dir), "scales": scales, "saved": state}
    finally:
        accelerator.is_fp16_supported = before


def fp16_is_refused(run_dir: str, strategy: str) -> str:
    start(run_dir, strategy, precision="fp16")
    return "no error"


def engines_in_a_row(run_dir: str, strategy: str, count: int) -> list[int]:
    """Objects of DeepSpeed that live after each of several trainers was closed."""
    import gc

    living = []
    for number in range(count):
        trainer = start(f"{run_dir}/{number}", strategy, max_steps=2)
        net = TinyGPT()
        net, opt, loader = trainer.prepare(
            net, torch.optim.AdamW(net.parameters(), lr=1e-2), DataLoader(Tokens(24), batch_size=12)
        )
        for item in loader:
            trainer.step(sample_losses(net, item).mean())
        trainer.close()
        del trainer, net, opt, loader, item
        gc.collect()
        living.append(sum(isinstance(o, nn.Module) for o in gc.get_objects()))
    return living


def linear_after(run_dir: str, strategy: str) -> bool:
    before = nn.functional.linear
    trained(run_dir, strategy, steps=1)
    return nn.functional.linear is before


def state_bytes(run_dir: str, strategy: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """Bytes of this rank by kind: after a backward, at the window's end, and after the step. With P and N."""
    from distkit.memory import count_state

    whole = {"engine.deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}
    settings = {**(whole if strategy == "zero3" else {}), **(settings or {})}
    trainer = start(run_dir, strategy, **{"batch.accumulate": 2, **settings})
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(150)])
    numel = sum(p.numel() for p in net.parameters())
    net, opt, loader = trainer.prepare(net, torch.optim.AdamW(net.parameters()), DataLoader(Tokens(16), batch_size=8))
    found: dict[str, Any] = {"P": numel, "N": trainer.world.size}
    micro = 0
    for item in loader:
        loss = net(item["x"].float().repeat(1, 8)).square().mean()
        trainer.backward(loss, optimizer=opt)
        if micro == 2:  # the second step's first backward: optimizer states are there
            found["backward"] = vars(count_state(trainer.strategy))
        if micro == 3:
            trainer.strategy.scale_gradients(opt, 2.0)
            found["window"] = vars(count_state(trainer.strategy))
        trainer.optimizer_step(opt)
        micro += 1
    found["step"] = vars(count_state(trainer.strategy))
    trainer.close()
    return found


def batch_norm(run_dir: str, strategy: str) -> dict[str, Any]:
    """Statistics that each rank collects for itself: evaluation and checkpoint use rank 0's."""
    trainer = start(run_dir, strategy, max_steps=3)
    torch.manual_seed(trainer.world.rank)
    net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    net, opt, loader = trainer.prepare(
        net, torch.optim.SGD(net.parameters(), lr=1e-2), DataLoader(Tokens(36), batch_size=12)
    )
    for item in loader:
        trainer.step(net(item["x"].float() / 32).square().mean())
    raw = trainer.unwrap(net)[1].running_mean.tolist()
    net.eval()
    with torch.no_grad():
        net(torch.ones(2, 8))
    after = trainer.unwrap(net)[1].running_mean.tolist()
    trainer.close()
    return {"raw": raw, "after": after}


def host_adam(run_dir: str, strategy: str, *, source: str | None = None, optimizer: str = "AdamW") -> dict[str, Any]:
    """Offload with DeepSpeedCPUAdam, which is compiled on its first use."""
    settings: dict[str, Any] = {
        "memory.offload": "optimizer",
        "engine.deepspeed": {"zero_force_ds_cpu_optimizer": True},
        "checkpoint.at_end": True,
    }
    if source is not None:
        settings["checkpoint.resume"] = source
    return trained(run_dir, strategy, settings=settings, optimizer=optimizer, steps=4 if source is None else 6)


def on_nvme(run_dir: str, strategy: str, disk: str, *, source: str | None = None, steps: int = 4) -> dict[str, Any]:
    """Optimizer states in a folder, in host memory ("host") or where they are (""). Wide enough that partitions are worth
    swapping (1 MiB)."""
    settings: dict[str, Any] = {"checkpoint.at_end": True, "optim.clip_norm": 0.5}
    if disk:
        nvme = {"device": "nvme", "nvme_path": disk, "buffer_count": 5}
        zero = {"offload_optimizer": {"device": "cpu"} if disk == "host" else nvme}
        settings |= {"memory.offload": "optimizer", "engine.deepspeed": {"zero_optimization": zero}}
    if source is not None:
        settings["checkpoint.resume"] = source
    result = trained(run_dir, strategy, settings=settings, steps=steps, model={"width": 256})
    return {**result, "shards": checkpoint_digest(run_dir)}


def stale_batons(folder: str) -> list[bool]:
    """Whether torch's lock file is still there: left by a dead process, and held by a live one."""
    from distkit.strategies.zero_compile import BATON, _alone

    found = []
    baton = Path(folder) / BATON
    holder = f"import os, sys; os.open({str(baton)!r}, os.O_CREAT | os.O_EXCL); print(flush=True); sys.stdin.read()"
    for kill in (True, False):
        with subprocess.Popen([sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            if kill:
                process.kill()
                process.wait()
            with _alone(Path(folder)):
                found.append(baton.exists())
            process.kill()
    return found
