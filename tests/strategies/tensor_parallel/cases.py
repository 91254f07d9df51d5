"""What runs inside of worker processes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from distkit.strategies.tensor_parallel.apply import apply_layout, part_of
from distkit.strategies.tensor_parallel.detect import detect
from distkit.strategies.tensor_parallel.group import TensorGroup
from distkit.strategies.tensor_parallel.sharded import local_part
from distkit.world import detect_environment
from tests.strategies.tensor_parallel.models import model_and_run


class CountedGroup(TensorGroup):
    """Counts what travels; its copies count together."""

    def __init__(self, rank: int, size: int, group: Any, *, sequence: bool = False) -> None:
        super().__init__(rank, size, group, sequence=sequence)
        self.counts: Counter[str] = Counter()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.counts["small" if tensor.dim() < 3 and tensor.is_floating_point() else "all_reduce"] += 1
        return super().all_reduce(tensor)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        self.counts["reduce_scatter"] += 1
        return super().reduce_scatter(tensor, dim)

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        self.counts["small"] += 1
        return super().maximum(tensor)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.counts["all_gather"] += 1
        return super().all_gather(tensor)


def against_whole(model: str, *, steps: int = 20, sequence: bool = False) -> dict[str, Any]:
    """Train a split model beside a whole one: largest differences of losses and of gradients (relative), and counts."""
    environment = detect_environment()
    dist.init_process_group("gloo")
    build, run = model_and_run(model)
    torch.manual_seed(0)
    split = build()
    torch.manual_seed(0)
    whole = build()
    layout = detect(split, run, environment.size)
    group = CountedGroup(environment.rank, environment.size, dist.group.WORLD, sequence=sequence)
    places = apply_layout(split, layout, group)
    lookups = [0]
    for name, _ in layout.of_style("vocabulary"):
        split.get_submodule(name).register_forward_pre_hook(lambda *_: lookups.__setitem__(0, lookups[0] + 1))
    models = (split, whole)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in models]
    worst, gradients, counts = 0.0, {}, []
    for step in range(steps):
        losses = []
        for one, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            group.counts.clear()
            lookups[0] = 0
            logits = run(one)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), _targets(logits))
            forward = Counter(group.counts)
            loss.backward()
            counts.append((forward, group.counts - forward, lookups[0]))
            losses.append(loss.item())
        worst = max(worst, abs(losses[0] - losses[1]) / max(1.0, losses[1]))
        gradients = gradients or _gradient_differences(split, whole, places, environment.rank)
        for optimizer in optimizers:
            optimizer.step()
    dist.destroy_process_group()
    rows = [name for name, _ in layout.of_style("row")]
    placed = {id(p): p.numel() for p in map(whole.get_parameter, places)}
    share = sum(placed.values()) / sum(p.numel() for p in whole.parameters())
    return {
        "loss": worst,
        "gradients": gradients,
        "rows": rows,
        "forward": counts[0][0],
        "backward": counts[0][1],
        "lookups": counts[0][2],
        "heads": sum(split.leaves for split in layout.splits.values()),
        "share": share,
        "bytes": sum(p.nbytes for p in split.parameters()),
        "whole_bytes": sum(p.nbytes for p in whole.parameters()),
    }


def use_of_logits(model: str) -> dict[str, Any]:
    """What scripts compute from logits, and the norm of the head's gradient by each loss."""
    environment = detect_environment()
    dist.init_process_group("gloo")
    build, run = model_and_run(model)
    torch.manual_seed(0)
    net: Any = build()
    layout = detect(net, run, max(2, environment.size))
    if environment.size > 1:
        apply_layout(net, layout, TensorGroup(environment.rank, environment.size, dist.group.WORLD))
    logits = run(net)
    flat, targets = logits.flatten(0, 1), _targets(logits)
    F = torch.nn.functional
    weight = torch.linspace(0.5, 1.5, flat.shape[-1])
    losses = {
        "mean": F.cross_entropy(flat, targets),
        "sum": F.cross_entropy(flat, targets, reduction="sum"),
        "none": F.cross_entropy(flat, targets, reduction="none").mean(),
        "ignored": F.cross_entropy(flat, targets.clamp(min=0), ignore_index=3),
        "classes in the middle": F.cross_entropy(logits.transpose(1, 2), targets.view(logits.shape[:2])),
        "weighted": F.cross_entropy(flat, targets, weight=weight),
        "smoothed": F.cross_entropy(flat, targets, label_smoothing=0.1),
        "log_softmax": -F.log_softmax(flat, -1)[torch.arange(len(flat)), targets.clamp(min=0)].mean(),
        "capped": F.cross_entropy((flat / 30).tanh() * 30 + weight, targets),
        "half": F.cross_entropy(flat.to(torch.bfloat16).float(), targets),
    }
    found: dict[str, Any] = {}
    for name, loss in losses.items():
        net.zero_grad()
        loss.backward(retain_graph=True)
        own = sum(p.grad.pow(2).sum() for p in [net.ln_f.weight, net.wpe.weight])
        found[name] = [loss.item(), float(own)]
    for wrong in (-1, 64):
        try:
            F.cross_entropy(flat, torch.full_like(targets, wrong))
        except IndexError as error:
            found[f"class {wrong}"] = str(error)
    masked = logits.detach().clone()
    masked[:, :3] = 0.0
    found["written"] = masked.float().sum().item()
    found |= {
        "argmax": logits.argmax(-1).tolist(),
        "topk": logits.topk(3).values.tolist(),
        "list": logits.detach().cpu().tolist(),
        "array": logits.detach().numpy().sum().item(),
        "one class": logits[..., 40].tolist(),
        "some classes": logits[..., 30:40].tolist(),
        "probabilities": logits.softmax(-1).max().item(),
        "stacked": torch.stack([logits, logits]).sum((0, 3)).tolist(),
    }
    dist.destroy_process_group()
    return found


def dropout_masks() -> dict[str, list[list[bool]]]:
    """What was dropped between two split layers (on this rank), and behind them."""
    environment = detect_environment()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 8), torch.nn.Dropout(0.5)
    )
    x = torch.rand(6, 8)
    layout = detect(net, lambda m: m(x), 2)
    assert sorted(layout.splits) == ["0", "2"]
    if environment.size > 1:
        apply_layout(net, layout, TensorGroup(environment.rank, environment.size, dist.group.WORLD))
    found: dict[str, Any] = {}
    for name in ("1", "3"):
        net.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name: found.__setitem__(name, (local_part(out) == 0).tolist())
        )
    net(x)
    dist.destroy_process_group()
    return {"between": found["1"], "behind": found["3"]}


def _targets(logits: torch.Tensor) -> torch.Tensor:
    """Every class once or more, and one sample that has no loss."""
    targets = torch.arange(logits.shape[:-1].numel()) % logits.shape[-1]
    targets[0] = -100
    return targets


def _gradient_differences(split: Any, whole: Any, places: Any, rank: int) -> dict[str, float]:
    found = {}
    expected = dict(whole.named_parameters())
    for name, parameter in split.named_parameters():
        gradient = expected[name].grad
        if gradient is None or gradient.abs().max() < 1e-7:  # a key's bias has none in exact arithmetic
            continue
        part = part_of(gradient, places[name], rank) if name in places else gradient
        found[name] = float((parameter.grad - part).abs().max() / gradient.abs().max())
    return found


def interleaved_losses(strategy: str, run_dir: str, settings: dict[str, Any]) -> list[list[float]]:
    """Loss and norm of each step of a model with a norm inside of each head, through the Trainer."""
    import distkit
    from tests.contract.cases import read_log
    from tests.strategies.tensor_parallel.models import Interleaved

    base = {"strategy": strategy, "run_dir": run_dir, "batch.per": "global", "log.every_steps": 1, "log.to": ["jsonl"]}
    trainer = distkit.Trainer({**base, "checkpoint.at_end": False, **settings})
    model: Any = Interleaved()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randint(0, 60, (24, 8), generator=torch.Generator().manual_seed(2))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=8)  # type: ignore[arg-type]
    model, optimizer, loader = trainer.prepare(model, optimizer, loader)
    for _ in trainer.epochs(2):
        for batch in loader:
            trainer.step(torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()))
    trainer.close()
    return [[line["loss"], line["grad_norm"]] for line in read_log(run_dir)]


def evaluated(strategy: str, run_dir: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Evaluation, and what trainer.gather and trainer.export make of a model with a split head."""
    import distkit
    from tests.strategies.tensor_parallel.models import SmallGPT

    trainer = distkit.Trainer({"strategy": strategy, "run_dir": run_dir, "checkpoint.at_end": False, **settings})
    torch.manual_seed(0)
    model: Any = SmallGPT()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randint(0, 60, (12, 9), generator=torch.Generator().manual_seed(2))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = trainer.prepare(model, optimizer, loader)
    metrics = trainer.evaluate(
        model,
        torch.utils.data.DataLoader(data[:10], batch_size=2),  # type: ignore[arg-type]
        loss_fn=lambda m, x: torch.nn.functional.cross_entropy(m(x).flatten(0, 1), x.flatten()),
        metric_fn=lambda m, x: {"first": (m(x).argmax(-1) == x).float().mean()},
    )
    logits = model(data[:2])
    rows = trainer.gather(logits)
    file = trainer.export(f"{run_dir}/model.safetensors", model)
    trainer.world.barrier()
    from safetensors.torch import load_model

    whole = SmallGPT()
    load_model(whole, str(file))
    with torch.no_grad():
        expected = whole(data[:2])
    trainer.close()
    rounded = all(torch.equal(p, p.bfloat16().float()) for p in whole.parameters())
    return {
        "exact": not rounded,
        "metrics": metrics,
        "rows": list(rows.shape),
        "apart": float((rows[:2] - expected).abs().max() / expected.abs().max()),
    }
