"""What a move of a checkpoint runs in the worker processes. Each function gives one JSON value a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import distkit
from distkit.checkpoint import CheckpointReader
from distkit.checkpoint.compare import compare_checkpoints
from tests.contract.cases import read_log
from tests.contract.models import Tokens

WIDTH, WORDS, SAMPLES, BATCH = 6, 33, 48, 8


class Half(nn.Module):
    """A block whose parameters have one, two and three rows: fewer than four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.squeeze = nn.Linear(WIDTH, 3)
        self.widen = nn.Linear(3, WIDTH)
        self.pair = nn.Parameter(torch.randn(2, 1, WIDTH) / 4)
        self.one_row = nn.Parameter(torch.randn(1, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.widen(torch.tanh(self.squeeze(self.norm(x)))) + x * self.pair.sum(0) + self.one_row


class Odd(nn.Module):
    """A next-token model with all that may go wrong in a move: tied weights, more ranks than rows, a parameter without
    dimensions, a convolution, frozen parameters, and buffers that training changes and the loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.basis = nn.Parameter(torch.randn(5, WIDTH), requires_grad=False)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)
        self.blocks = nn.ModuleList(Half() for _ in range(2))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean_gain", torch.ones(3))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("places", torch.arange(8.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.mean_gain.mul_(0.9).add_(0.1 * self.gain.detach())
        x = self.embed(tokens)
        x = x + (self.basis.mean(0) * torch.sin(self.places)[:, None]).to(x.dtype)
        x = x + self.mix(x.transpose(1, 2))[..., : tokens.shape[1]].transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x * self.gain) * self.mean_gain.mean()
        return logits / (1 + 0.01 * self.calls)


def make_optimizer(text: str, model: Odd) -> torch.optim.Optimizer:
    """An optimizer with three groups: matrices decayed, the blocks at another rate, the rest.

    Muon takes matrices only, so the rest is frozen for it.

    Args:
        text: Class in torch.optim and its arguments, as ``SGD:momentum=0.9,nesterov=true``.
        model: The model.
    """
    name, _, given = text.partition(":")
    arguments: dict[str, Any] = {"lr": 2e-3}
    for item in filter(None, given.split(",")):
        key, _, value = item.partition("=")
        arguments[key] = value == "true" if value in ("true", "false") else float(value)
    if name == "Muon":
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and parameter.dim() == 2)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    inner = [p for name, p in trained.items() if name.startswith("blocks.")]
    outer = [p for name, p in trained.items() if not name.startswith("blocks.")]
    groups = [
        {"params": [p for p in outer if p.dim() > 1], "weight_decay": 0.1},
        {"params": inner, "lr": arguments["lr"] / 2},
        {"params": [p for p in outer if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)([g for g in groups if g["params"]], **arguments)
    return optimizer


class Run:
    """A Trainer with the model, its optimizer, a scheduler and shuffled data."""

    def __init__(self, strategy: str, run_dir: str, optimizer: str, settings: dict[str, Any]) -> None:
        self.run_dir = run_dir
        self.trainer = distkit.Trainer(
            {
                "strategy": strategy,
                "run_dir": run_dir,
                "device": "cpu",
                "batch.per": "global",
                "optim.clip_norm": 1.0,
                "checkpoint.at_end": False,
                "checkpoint.background": False,
                "log.every_steps": 1,
                "log.to": ["jsonl"],
                **settings,
            }
        )
        model = Odd()
        made = make_optimizer(optimizer, model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made, 20)
        loader = DataLoader(Tokens(SAMPLES), batch_size=BATCH, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader = self.trainer.prepare(model, made, scheduler, loader)

    def train(self, until: int, save_at: int | None = None) -> Path | None:
        """Train up to a step; the checkpoint that was written on the way."""
        path = None
        for _ in self.trainer.epochs(100):
            for batch in self.loader:
                logits = self.model(batch["x"]).float()
                self.trainer.step(F.cross_entropy(logits.transpose(1, 2), batch["y"]))
                if self.trainer.global_step == save_at:
                    path = self.trainer.save()
                if self.trainer.global_step == until:
                    return path
        return path

    def losses(self, after: int) -> list[float]:
        """Logged losses of the steps behind a step, on every rank."""
        return [line["loss"] for line in read_log(self.run_dir) if line["step"] > after]

    def tied(self) -> bool:
        own = self.trainer.unwrap(self.model)
        return own.head.weight is own.embed.weight


def stay(
    strategy: str, run_dir: str, optimizer: str, settings: dict[str, Any], before: int, after: int
) -> dict[str, Any]:
    """Train, write a checkpoint, and go on: its folder, and the losses after it."""
    run = Run(strategy, run_dir, optimizer, settings)
    path = run.train(before + after, save_at=before)
    run.trainer.close()
    return {"checkpoint": str(path), "losses": run.losses(before)}


def move(
    strategy: str, run_dir: str, source: str, optimizer: str, settings: dict[str, Any], after: int
) -> dict[str, Any]:
    """Load a checkpoint, write it again at once, and train on: what differs between the two, and the losses."""
    run = Run(strategy, run_dir, optimizer, {**settings, "checkpoint.resume": source})
    copy = run.trainer.save()
    tied, start = run.tied(), run.trainer.global_step
    differences: list[str] = [] if tied else ["the tied weights came apart"]
    count = 0
    if run.trainer.is_main:
        count, found = compare(Path(source), copy)
        differences += found
    run.train(start + after)
    run.trainer.close()
    return {"tensors": count, "differences": differences, "losses": run.losses(start)}


def compare(first: Path, second: Path) -> tuple[int, list[str]]:
    """Number of tensors, and what isn't the same bit for bit in two checkpoints."""
    a, b = CheckpointReader(first, verify="fast"), CheckpointReader(second, verify="fast")
    tensors = list(compare_checkpoints(a, b))
    found = [f"{t.group} {t.name} {t.kind}: {t.what} ({t.largest:.1e})" for t in tensors if t.what != "equal"]
    for index, (left, right) in enumerate(zip(a.layouts(), b.layouts(), strict=True)):
        if left.groups != right.groups:
            found.append(f"groups of optimizer {index}: {left.groups} and {right.groups}")
        if left.fields != right.fields:
            found.append(f"fields of optimizer {index}")
        if _values(left.values) != _values(right.values):
            found.append(f"values of optimizer {index}: {left.values} and {right.values}")
    if a.manifest.aliases != b.manifest.aliases:
        found.append(f"aliases: {a.manifest.aliases} and {b.manifest.aliases}")
    left_state, right_state = a.trainer_state(), b.trainer_state()
    for key in sorted((left_state.keys() | right_state.keys()) - {"strategy"}):  # an engine's loss scale is its own
        if left_state.get(key) != right_state.get(key):
            found.append(f"the Trainer's {key}: {left_state.get(key)} and {right_state.get(key)}")
    return len(tensors), found


def _values(values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: kinds for name, kinds in values.items() if kinds}
