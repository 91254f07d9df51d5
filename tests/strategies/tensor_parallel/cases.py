"""What runs inside of worker processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from distkit.strategies.tensor_parallel.apply import apply_layout, part_of
from distkit.strategies.tensor_parallel.detect import detect
from distkit.strategies.tensor_parallel.group import TensorGroup
from distkit.world import detect_environment
from tests.strategies.tensor_parallel.models import model_and_run


class CountedGroup(TensorGroup):
    """Counts what travels."""

    count = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().all_reduce(tensor)


def against_whole(model: str, *, steps: int = 20) -> dict[str, Any]:
    """Train a split model beside a whole one: largest differences of losses and of gradients (relative), and counts."""
    environment = detect_environment()
    dist.init_process_group("gloo")
    build, run = model_and_run(model)
    torch.manual_seed(0)
    split = build()
    torch.manual_seed(0)
    whole = build()
    layout = detect(split, run, environment.size)
    group = CountedGroup(environment.rank, environment.size, dist.group.WORLD)
    places = apply_layout(split, layout, group)
    models = (split, whole)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in models]
    worst, gradients, counts = 0.0, {}, []
    for step in range(steps):
        losses = []
        for one, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            group.count = 0
            loss = run(one).float().log_softmax(-1)[..., 1].neg().mean()
            forward = group.count
            loss.backward()
            counts.append((forward, group.count - forward))
            losses.append(loss.item())
        worst = max(worst, abs(losses[0] - losses[1]))
        gradients = gradients or _gradient_differences(split, whole, places, environment.rank)
        for optimizer in optimizers:
            optimizer.step()
    dist.destroy_process_group()
    rows = [name for name, _ in layout.of_style("row")]
    share = sum(whole.get_parameter(n).numel() for n in places) / sum(p.numel() for p in whole.parameters())
    return {
        "loss": worst,
        "gradients": gradients,
        "rows": rows,
        "counts": counts[0],
        "share": share,
    }


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
    data = torch.randint(0, 60, (24, 9), generator=torch.Generator().manual_seed(2))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=8)  # type: ignore[arg-type]
    model, optimizer, loader = trainer.prepare(model, optimizer, loader)
    for _ in trainer.epochs(2):
        for batch in loader:
            trainer.step(torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()))
    trainer.close()
    return [[line["loss"], line["grad_norm"]] for line in read_log(run_dir)]
