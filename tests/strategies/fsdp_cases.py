"""What the tests of fsdp and hsdp run in worker processes; with strategy="single" in one, for comparison."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import distkit
from tests.contract.cases import checkpoint_digest, digests, read_log
from tests.contract.models import TinyGPT, Tokens, groups, sample_losses


class Awkward(TinyGPT):
    """Parameters that split badly: a scalar (under two names), one row, three rows.

    With `overflow` set, the gradient of the last of the three rows is infinite, and no other.
    """

    overflow = False

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()) * 1.2)
        self.twin = nn.Module()
        self.twin.scale = self.scale
        self.row = nn.Parameter(torch.randn(1, 32) * 0.1)
        self.three = nn.Parameter(torch.randn(3) * 0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        three = self.three.clone()
        if self.overflow:
            three.register_hook(lambda gradient: gradient + gradient.new_tensor([0.0, 0.0, float("inf")]))
        return super().forward(tokens) * self.scale * self.twin.scale + self.row * three.sum()


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    """A small residual network for 8x8 images of 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(Residual(8), Residual(8))
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.layer2 = nn.Sequential(Residual(16), Residual(16))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer1(F.relu(self.bn(self.stem(x))))
        return self.fc(self.layer2(self.down(x)).mean(dim=(2, 3)))


class Choosy(nn.Module):
    """Uses `left` for even samples and `right` for odd ones, `never` not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never, self.scale = (
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Parameter(torch.tensor(2.0)),
        )

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        y: torch.Tensor = self.right(x) * self.scale if odd else self.left(x)
        return y


def trainer_of(strategy: str, run_dir: str, **settings: Any) -> distkit.Trainer:
    base = {"strategy": strategy, "run_dir": run_dir, "log.to": ["jsonl"], "log.every_steps": 1, "batch.per": "global"}
    return distkit.Trainer({**base, **settings})


def build(name: str) -> nn.Module:
    if name == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 32, "n_positions": 8}
        return GPT2LMHeadModel(
            GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
        )
    return {"awkward": Awkward, "tiny": TinyGPT, "untied": lambda: TinyGPT(tied=False)}[name]()


def loss_of(model: nn.Module, item: dict[str, Any]) -> torch.Tensor:
    logits = model(item["x"])
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits.float().flatten(0, 1), item["y"].flatten())


def train(
    strategy: str,
    run_dir: str,
    model: str = "tiny",
    settings: dict[str, Any] | None = None,
    *,
    optimizer: str = "AdamW",
    evaluate: bool = False,
    deferred: bool = False,
    broken: tuple[int, int] | None = None,
    epochs: int = 2,
) -> dict[str, Any]:
    """Train; log, final values and what was said at the start.

    Args:
        evaluate: Evaluate after each epoch and save, so that state is read after a forward without a backward.
        deferred: Build under trainer.init_model().
        broken: A rank and which of its batches has an infinite gradient, counted from 1.
    """
    trainer = trainer_of(strategy, run_dir, **(settings or {}))
    if deferred:
        with trainer.init_model():
            net = build(model)
    else:
        net = build(model)
    kinds = {
        "AdamW": lambda g: torch.optim.AdamW(g, lr=1e-2),
        "fused": lambda g: torch.optim.AdamW(g, lr=1e-2, fused=True),
        "SGD": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9),
        "Adafactor": lambda g: torch.optim.Adafactor(g, lr=1e-2),
        "Adagrad": lambda g: torch.optim.Adagrad(g, lr=1e-2, initial_accumulator_value=0.1),
        "Muon": lambda g: torch.optim.Muon(list(g[0]["params"]), lr=1e-2),
        "NAdam": lambda g: torch.optim.NAdam(g, lr=1e-2),
    }
    opt = kinds[optimizer](groups(net))
    net, opt, loader = trainer.prepare(net, opt, DataLoader(Tokens(29), batch_size=12, shuffle=True))
    start = digests({name: tensor.float() for name, tensor in trainer.model_state_dict(net).items()})
    evaluated = []
    seen = 0
    for _ in trainer.epochs(epochs):
        for item in loader:
            seen += 1
            if broken is not None:
                trainer.unwrap(net).overflow = list(broken) == [trainer.world.rank, seen]
            trainer.step(loss_of(net, item))
        if evaluate:
            evaluated.append(trainer.evaluate(net, DataLoader(Tokens(13), batch_size=3), loss_fn=loss_of)["loss"])
            trainer.save()
    state = trainer.model_state_dict(net)
    notes = trainer.strategy.notes()
    dtypes = sorted({str(p.dtype) for p in net.parameters()})
    trainer.close()
    return {
        "log": read_log(run_dir),
        "start": start,
        "model": digests({name: tensor.float() for name, tensor in state.items()}),
        "values": {name: tensor.flatten().tolist() for name, tensor in state.items()},
        "evaluated": evaluated,
        "notes": notes,
        "dtypes": dtypes,
        "shards": checkpoint_digest(run_dir),
    }


def traffic(strategy: str, run_dir: str, settings: dict[str, Any]) -> list[list[Any]]:
    """Collectives of each micro batch: whether the window ended, reductions, all-gathers."""
    from torch.distributed.tensor.debug import CommDebugMode

    trainer = trainer_of(strategy, run_dir, **{"batch.accumulate": 3, "checkpoint.at_end": False, **settings})
    net = TinyGPT()
    net, opt, loader = trainer.prepare(net, torch.optim.AdamW(net.parameters()), DataLoader(Tokens(24), batch_size=12))
    found = []
    for item in loader:
        with CommDebugMode() as counter:
            trainer.backward(sample_losses(net, item).mean())
        counts = {str(key): value for key, value in counter.get_comm_counts().items()}
        reduced = sum(v for k, v in counts.items() if "reduce" in k)
        gathered = sum(v for k, v in counts.items() if "all_gather" in k or "allgather" in k)
        found.append([trainer.optimizer_step(), reduced, gathered])
    trainer.close()
    return found


def conv(strategy: str, run_dir: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """A residual network with BatchNorm: losses, statistics before and after an evaluation, what is on disk."""
    trainer = trainer_of(strategy, run_dir, **(settings or {}))
    made = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 10, (48,), generator=made)
    images = torch.randn(48, 1, 8, 8, generator=made) + labels.view(-1, 1, 1, 1) * 0.3
    net = ResNet()
    pairs = list(zip(images, labels, strict=True))
    net, opt, loader = trainer.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9), DataLoader(pairs, batch_size=24, shuffle=True)
    )
    for _ in trainer.epochs(6):
        for x, y in loader:
            trainer.step(F.cross_entropy(net(x), y))
    trained = net.bn.running_mean.tolist()
    metrics = trainer.evaluate(
        net, DataLoader(pairs, batch_size=5), loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1])
    )
    evaluated = net.bn.running_mean.tolist()
    trainer.close()
    return {
        "log": read_log(run_dir),
        "trained": trained,
        "evaluated": evaluated,
        "loss": metrics["loss"],
        "samples": metrics["samples"],
    }


def choosy(strategy: str, run_dir: str, accumulate: int = 1) -> dict[str, Any]:
    """Ranks use different parameters; one is used by none."""
    trainer = trainer_of(
        strategy, run_dir, **{"optim.unused_parameters": "allow", "batch.per": "device", "batch.accumulate": accumulate}
    )
    net = Choosy()
    net, opt = trainer.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5))
    data = torch.randn(12, 2, 8, generator=torch.Generator().manual_seed(3))
    mine = range(2) if trainer.world.size == 1 else [trainer.world.rank]
    for rows in data:
        if trainer.world.size == 1:
            trainer.step(torch.stack([net(rows[i : i + 1], odd=i == 1).square().mean() for i in mine]).mean())
        else:
            (i,) = mine
            trainer.step(net(rows[i : i + 1], odd=i == 1).square().mean())
    state = trainer.model_state_dict(net)
    trainer.close()
    return {name: tensor.flatten().tolist() for name, tensor in state.items()}


def warm_optimizer(strategy: str, run_dir: str) -> dict[str, Any]:
    """The optimizer has taken a step before it is prepared: its state goes on."""
    trainer = trainer_of(strategy, run_dir)
    net = Awkward()
    opt = torch.optim.AdamW(groups(net), lr=1e-2)
    loss_of(net, {k: torch.stack([Tokens(4)[i][k] for i in range(4)]) for k in ("x", "y")}).backward()
    opt.step()
    opt.zero_grad()
    net, opt, loader = trainer.prepare(net, opt, DataLoader(Tokens(24), batch_size=12))
    for item in loader:
        trainer.step(loss_of(net, item))
    trainer.close()
    return {"log": read_log(run_dir)}


def empty_parameter(strategy: str, run_dir: str) -> dict[str, Any]:
    """Train a model with a parameter that has no elements."""
    trainer = trainer_of(strategy, run_dir)
    net = nn.Linear(8, 32)
    net.none = nn.Parameter(torch.zeros(0, 4))
    net, opt, loader = trainer.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2), DataLoader(Tokens(24), batch_size=12)
    )
    for item in loader:
        trainer.step(net(item["x"].float() / 32).square().mean() + net.none.sum())
    trainer.save()
    trainer.close()
    return {"log": read_log(run_dir), "shards": checkpoint_digest(run_dir)}


def not_deferred(strategy: str, run_dir: str) -> None:
    """On the meta device without trainer.init_model()."""
    trainer = trainer_of(strategy, run_dir)
    with torch.device("meta"):
        net = TinyGPT()
    trainer.prepare(net, torch.optim.AdamW(net.parameters()))


def unprepared_loader(strategy: str, run_dir: str, settings: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Batches from a loader of the script's own: the last window of an epoch ends unforeseen."""
    trainer = trainer_of(strategy, run_dir, **{"batch.accumulate": 2, "batch.per": "device", **(settings or {})})
    net = Awkward()
    net, opt = trainer.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    data = Tokens(20)
    for _ in trainer.epochs(2):
        for i in range(5):
            items = [data[4 * i + j] for j in range(trainer.world.rank, 4, trainer.world.size)]
            trainer.step(loss_of(net, {key: torch.stack([item[key] for item in items]) for key in ("x", "y")}))
    trainer.close()
    return read_log(run_dir)


def teacher(strategy: str, run_dir: str) -> dict[str, Any]:
    """A student learns a teacher's outputs; ranks start with different teachers, and rank 0's is the one."""
    trainer = trainer_of(strategy, run_dir, **{"checkpoint.at_end": False})
    torch.manual_seed(trainer.world.rank)
    teacher, student, nothing = TinyGPT().requires_grad_(False), TinyGPT(), nn.Softmax(dim=-1)
    teacher, student, nothing = trainer.prepare(teacher, student, nothing)
    opt = torch.optim.AdamW(student.parameters(), lr=1e-2, fused=True)
    opt, loader = trainer.prepare(opt, DataLoader(Tokens(24), batch_size=12))
    for item in loader:
        with torch.no_grad():
            wanted = nothing(teacher(item["x"]))
        trainer.step(-(wanted * F.log_softmax(student(item["x"]), dim=-1)).sum(-1).mean())
    with trainer.strategy.full_parameters(teacher):
        total = sum(float(p.detach().double().pow(2).sum()) for p in teacher.parameters())
    trainer.close()
    return {"teacher": total, "log": read_log(run_dir)}


def forgotten(strategy: str, run_dir: str, forget: bool) -> dict[str, Any]:
    """A micro batch in mid-window whose gradients are thrown away."""
    trainer = trainer_of(strategy, run_dir, **{"checkpoint.at_end": False})
    net = Awkward()
    net, opt, loader = trainer.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(Tokens(24), batch_size=12)
    )
    if forget:
        item = {key: torch.stack([Tokens(4)[i][key] for i in range(4)]) for key in ("x", "y")}
        trainer.strategy.set_gradient_sync(False)
        trainer.strategy.backward(loss_of(net, item))
        trainer.strategy.zero_grad(opt)
    for item in loader:
        trainer.step(loss_of(net, item))
    trainer.close()
    return {"log": read_log(run_dir)}


def mesh(strategy: str, run_dir: str, settings: dict[str, Any]) -> dict[str, Any]:
    trainer = trainer_of(strategy, run_dir, **settings)
    found = {
        "mesh": list(trainer.world.mesh.shape),
        "names": list(trainer.world.mesh.mesh_dim_names),
        "notes": trainer.strategy.notes(),
    }
    found["data"] = [trainer.world.data.rank, trainer.world.data.size]
    trainer.close()
    return found


def wire(strategy: str, run_dir: str, settings: dict[str, Any]) -> list[str]:
    """Dtypes in which parameters are gathered and gradients reduced."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._schema.name
            if name.startswith("c10d::") and ("gather" in name or "reduce_scatter" in name):
                tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
                seen.add(f"{'gather' if 'gather' in name else 'reduce'} {tensors[0].dtype}")
            return func(*args, **(kwargs or {}))

    trainer = trainer_of(strategy, run_dir, **{"checkpoint.at_end": False, **settings})
    net = TinyGPT()
    net, opt, loader = trainer.prepare(net, torch.optim.AdamW(net.parameters()), DataLoader(Tokens(12), batch_size=12))
    for item in loader:
        with Watch():
            trainer.backward(sample_losses(net, item).mean())
        trainer.optimizer_step()
    trainer.close()
    return sorted(seen)
