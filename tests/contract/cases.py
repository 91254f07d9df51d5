"""What the contract suite runs inside of worker processes. Each function gives one JSON value a rank."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import distkit
from tests.contract.models import TinyGPT, Tokens, groups, sample_losses


def train(
    strategy: str,
    run_dir: str,
    *,
    settings: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    data: int = 36,
    batch: int = 12,
    epochs: int = 2,
    weighted: bool = False,
    scheduler: bool = False,
    shuffle: bool = True,
    drop_last: bool = False,
    optimizer: str = "AdamW",
    stop_after: int | None = None,
    lr: float = 1e-2,
    look_at_start: bool = False,
) -> dict[str, Any]:
    """Train a tiny GPT; the log of rank 0, and on every rank digests of the final state.

    Args:
        batch: Samples in one optimizer step (batch.per is global).
        weighted: Use the data's weight of each sample, through trainer.step(loss, weight=...).
        look_at_start: Give digests of the parameters before the first step too.
        stop_after: Leave without closing after so many steps, as a killed process would.
    """
    base = {"strategy": strategy, "run_dir": run_dir, "batch.per": "global", "log.every_steps": 1, "log.to": ["jsonl"]}
    trainer = distkit.Trainer({**base, "checkpoint.keep": None, **(settings or {})})
    net = TinyGPT(**(model or {}))
    kinds = {
        "AdamW": lambda g: torch.optim.AdamW(g, lr=lr),
        "SGD": lambda g: torch.optim.SGD(g, lr=10 * lr, momentum=0.9),
    }
    opt = kinds[optimizer](groups(net))
    loader = DataLoader(Tokens(data), batch_size=batch, shuffle=shuffle, drop_last=drop_last)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0 / (1 + step)) if scheduler else None
    objects = [net, opt, loader, *([schedule] if schedule else [])]
    net, opt, loader = trainer.prepare(*objects)[:3]
    start: dict[str, str] = {}
    order: list[list[int]] = []
    for _ in trainer.epochs(epochs):
        for item in loader:
            if look_at_start and not order:
                start = digests(trainer.model_state_dict(net))
            order.append([] if loader.info.padding else item["index"].tolist())
            losses = sample_losses(net, item)
            if weighted:
                total = item["weight"].sum()
                trainer.step((losses * item["weight"]).sum() / total, weight=total)
            else:
                trainer.step(losses.mean())
            if stop_after is not None and trainer.global_step >= stop_after:
                trainer._checkpoints.settle()  # else it depends on the machine which checkpoint is the last whole one
                trainer.strategy.close()
                return {"log": read_log(run_dir), "order": order}
    state = trainer.model_state_dict(net)
    result = {
        "order": order,
        "tensor_rank": trainer.world.tensor.rank,
        "start": start,
        "model": digests(state),
        "values": {name: tensor.flatten()[:4].tolist() for name, tensor in state.items()},
        "norm": float(torch.sqrt(sum(t.double().pow(2).sum() for t in state.values()))) if state else 0.0,
        "step": trainer.global_step,
    }
    trainer.close()
    return {**result, "log": read_log(run_dir), "shards": checkpoint_digest(run_dir)}


def read_log(run_dir: str) -> list[dict[str, Any]]:
    path = Path(run_dir) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if '"loss"' in line] if path.exists() else []


def digests(state: dict[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest()[:16] for name, t in sorted(state.items())
    }


def checkpoint_digest(run_dir: str) -> dict[str, str]:
    """A digest of every whole tensor (parameters, buffers, optimizer state) of the newest checkpoint; on rank 0."""
    if os.environ.get("RANK", "0") != "0":
        return {}
    from distkit.checkpoint import CheckpointReader
    from distkit.state import Region

    newest = sorted((Path(run_dir) / "checkpoints").glob("step-*"))
    if not newest:
        return {}
    reader = CheckpointReader(newest[-1], verify="full")
    found = {}
    for group, names in reader.manifest.tensors.items():
        for name, kinds in names.items():
            for kind, entry in kinds.items():
                tensor = reader.read(group, name, kind, Region.whole(entry.shape))
                key = f"{group}/{name}/{kind}"
                found[key] = hashlib.sha256(
                    tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
                ).hexdigest()[:16]
    return found


def resume_only(
    strategy: str,
    run_dir: str,
    source: str,
    *,
    model: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    data: int = 36,
) -> dict[str, str]:
    """Load a checkpoint under this strategy and write it out again at once; digests of what was written."""
    trainer = distkit.Trainer(
        {
            "strategy": strategy,
            "run_dir": run_dir,
            "batch.per": "global",
            "log.to": ["jsonl"],
            "checkpoint.resume": source,
            **(settings or {}),
        }
    )
    net = TinyGPT(**(model or {}))
    opt = torch.optim.AdamW(groups(net), lr=1e-2)
    loader = DataLoader(Tokens(data), batch_size=12, shuffle=True)
    net, opt, loader = trainer.prepare(net, opt, loader)
    trainer.save()
    trainer.strategy.close()
    return checkpoint_digest(run_dir)


def evaluate(strategy: str, run_dir: str, *, sizes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Metrics of evaluations of one model on sets of other sizes.

    Args:
        sizes: Samples in the set and in a batch, of each evaluation.
    """
    trainer = distkit.Trainer(
        {"strategy": strategy, "run_dir": run_dir, "log.to": ["jsonl"], "checkpoint.at_end": False}
    )
    net = TinyGPT()
    opt = torch.optim.AdamW(net.parameters())
    train_loader = DataLoader(Tokens(8), batch_size=2)
    net, opt, train_loader = trainer.prepare(net, opt, train_loader)

    def index_sum(model: Any, item: dict[str, Any]) -> torch.Tensor:
        return item["index"].float().mean()

    found = []
    for data, batch in sizes:
        loader = DataLoader(Tokens(data), batch_size=batch)
        metrics = trainer.evaluate(net, loader, loss_fn=lambda m, b: sample_losses(m, b).mean(), metric_fn=index_sum)
        found.append(metrics)
    trainer.close()
    return found


def gather_by_hand(strategy: str, run_dir: str, *, data: int, batch: int) -> list[int]:
    """An evaluation loop of the user's own, with trainer.gather."""
    trainer = distkit.Trainer(
        {"strategy": strategy, "run_dir": run_dir, "log.to": ["jsonl"], "checkpoint.at_end": False}
    )
    net = TinyGPT()
    net, opt, _, loader = trainer.prepare(
        net,
        torch.optim.AdamW(net.parameters()),
        DataLoader(Tokens(8), batch_size=2),
        DataLoader(Tokens(data), batch_size=batch),
    )
    found: list[int] = []
    with torch.no_grad():
        for item in loader:
            net(item["x"])
            found += trainer.gather(item["index"]).tolist()
    trainer.close()
    return found


def half_save(strategy: str, run_dir: str) -> str:
    """Only rank 0 calls save; the others go on."""
    trainer = distkit.Trainer({"strategy": strategy, "run_dir": run_dir, "batch.per": "global", "log.to": ["jsonl"]})
    net = TinyGPT()
    net, opt, loader = trainer.prepare(net, torch.optim.AdamW(net.parameters()), DataLoader(Tokens(36), batch_size=12))
    try:
        for item in loader:
            trainer.step(sample_losses(net, item).mean())
            if trainer.is_main:
                trainer.save()
    finally:
        # Connections end as with the process, or the other rank would wait at them; Horovod's close() waits for it, too.
        if strategy != "horovod":
            trainer.strategy.close()
    return "no error"


def different_models(strategy: str, run_dir: str, *, rank_env: str = "RANK") -> str:
    trainer = distkit.Trainer({"strategy": strategy, "run_dir": run_dir, "log.to": ["jsonl"]})
    net = TinyGPT(width=16 if os.environ[rank_env] == "0" else 32)
    trainer.prepare(net, torch.optim.AdamW(net.parameters()))
    return "no error"


def initial_parameters(strategy: str, run_dir: str) -> dict[str, str]:
    """Ranks start from different random weights; after prepare all hold rank 0's."""
    trainer = distkit.Trainer({"strategy": strategy, "run_dir": run_dir, "log.to": ["jsonl"]})
    torch.manual_seed(int(os.environ["RANK"]))
    net: Any = TinyGPT()
    net.example_input_array = torch.zeros(2, 8, dtype=torch.long)  # for strategies that must see its forward
    net, _ = trainer.prepare(net, torch.optim.AdamW(net.parameters()))
    with trainer.strategy.full_parameters(net):
        found = digests({n: p.detach().clone() for n, p in trainer.unwrap(net).named_parameters()})
    trainer.close()
    return found


def gan(run_dir: str, strategy: str, *, steps: int = 4) -> dict[str, Any]:
    """Two models, two optimizers, the two halves of a step."""
    from torch import nn

    trainer = distkit.Trainer(
        {"strategy": strategy, "run_dir": run_dir, "batch.per": "global", "log.every_steps": 1, "log.to": ["jsonl"]}
    )
    generator, critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 1)
    generator.example_input_array, critic.example_input_array = torch.rand(2, 4), torch.rand(2, 8)  # type: ignore[assignment]
    opt_g, opt_d = torch.optim.Adam(generator.parameters(), lr=1e-2), torch.optim.Adam(critic.parameters(), lr=1e-2)
    loader = DataLoader(Tokens(36), batch_size=12, shuffle=True)
    generator, critic, opt_d, opt_g, loader = trainer.prepare(generator, critic, opt_d, opt_g, loader)
    for _ in trainer.epochs(2):
        for item in loader:
            real, noise = item["x"].float() / 32, item["y"][:, :4].float() / 32
            fake = generator(noise)
            loss_d = (critic(fake.detach()) - critic(real)).mean()
            trainer.backward(loss_d, optimizer=opt_d)
            trainer.optimizer_step(opt_d)
            loss_g = -critic(fake).mean()
            trainer.backward(loss_g, optimizer=opt_g)
            trainer.optimizer_step(opt_g)
    result = {"norms": []}
    for model in (generator, critic):
        state = trainer.model_state_dict(model)
        result["norms"].append(float(sum(t.double().pow(2).sum() for t in state.values())) if state else 0.0)
    trainer.close()
    return {**result, "log": read_log(run_dir)}
