"""What the tests of horovod run in worker processes."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader

import distkit
from distkit.config import load_config
from distkit.strategies.registry import strategy_class
from distkit.world import detect_environment
from tests.contract.cases import read_log
from tests.contract.models import TinyGPT, Tokens, groups, sample_losses


def connect(**settings):
    config = load_config(script={"strategy": "horovod", **settings}).config
    strategy = strategy_class("horovod")(config)
    strategy.connect(detect_environment())
    return strategy


def world_case(name, **arguments):
    """A case of the tests of World, over Horovod."""
    from tests.world import cases

    cases.connect = lambda **settings: connect(**settings).world
    return getattr(cases, name)(**arguments)


def dtypes():
    """Each verb with each dtype, as [verb, dtype, right]."""
    strategy = connect()
    world, found = strategy.world, []
    n, r = world.size, world.rank
    kinds = [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
    ]
    for dtype in [*kinds, torch.uint8, torch.bool, torch.complex64]:
        mine = torch.arange(4).add(r).to(dtype)
        expected = [torch.arange(4).add(k).to(dtype) for k in range(n)]
        reduced = world.all_reduce(mine)
        summed = torch.stack([e.to(torch.complex128) for e in expected]).sum(0)
        right = (
            (reduced.to(torch.complex128) != 0) == (summed != 0)
            if dtype == torch.bool
            else reduced.to(torch.complex128) == summed
        )
        found.append(["sum", str(dtype), bool(right.all()) and reduced.dtype == dtype])
        found.append(["broadcast", str(dtype), torch.equal(world.broadcast(mine, n - 1), expected[-1])])
        gathered = world.all_gather(mine.reshape(2, 2))
        found.append(
            [
                "all_gather",
                str(dtype),
                all(torch.equal(a, b.reshape(2, 2)) for a, b in zip(gathered, expected, strict=True)),
            ]
        )
    turned = world.all_reduce(torch.arange(6.0).reshape(2, 3).t())
    found.append(["sum", "transposed", torch.equal(turned, n * torch.arange(6.0).reshape(2, 3).t())])
    strategy.close()
    return found


def missing_rank(limit):
    """Rank 1 comes late to a barrier with a time limit."""
    strategy = connect(**{"timeouts.step_s": limit})
    begin, message = time.monotonic(), "no error"
    try:
        if strategy.world.rank == 1:
            time.sleep(2 * limit)
        strategy.world.barrier()
    except distkit.errors.LaunchError as error:
        message = str(error)
    return [message, time.monotonic() - begin]


def start(run_dir, model=None, make=None, **settings):
    base = {"strategy": "horovod", "run_dir": run_dir, "log.to": ["jsonl"], "checkpoint.at_end": False}
    trainer = distkit.Trainer({**base, "batch.per": "global", "log.every_steps": 1, **settings})
    net = TinyGPT() if model is None else model
    optimizer = (make or (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2)))(net)
    loader = DataLoader(Tokens(30), batch_size=12, shuffle=True)
    return trainer, *trainer.prepare(net, optimizer, loader)


def train(run_dir, strategy="horovod", kind="adamw", epochs=2, **settings):
    """The log, the state's sums and the optimizer's counters."""
    kinds = {
        "adamw": lambda m: torch.optim.AdamW(groups(m), lr=1e-2),
        "foreach": lambda m: torch.optim.AdamW(groups(m), lr=1e-2, foreach=True),
        "fused": lambda m: torch.optim.AdamW(groups(m), lr=1e-2, fused=True),
        "tensor_lr": lambda m: torch.optim.AdamW(groups(m), lr=torch.tensor(1e-2)),
    }
    trainer, net, _, loader = start(run_dir, make=kinds[kind], strategy=strategy, **settings)
    for _ in trainer.epochs(epochs):
        for batch in loader:
            trainer.step(sample_losses(net, batch).mean())
    sums = [p.detach().double().sum().item() for p in net.parameters()]
    trainer.close()
    return {"log": read_log(run_dir), "sums": sums}


def traffic(run_dir, accumulate, bucket_cap_mb):
    """Buckets that were sent in each micro batch: before backward returned, and after."""
    from distkit.strategies import horovod_collectives

    trainer, net, _, loader = start(
        run_dir, **{"batch.accumulate": accumulate, "engine.horovod": {"bucket_cap_mb": bucket_cap_mb}}
    )
    sent, original = [], horovod_collectives.hvd.allreduce_async_

    def spy(tensor, name, op):
        if ".bucket." in name:
            sent.append(name)
        return original(tensor, name=name, op=op)

    horovod_collectives.hvd.allreduce_async_ = spy
    found = []
    for batch in loader:
        sent.clear()
        trainer.backward(sample_losses(net, batch).mean())
        during = len(sent)
        ended = trainer.optimizer_step()
        found.append([ended, during, len(sent) - during])
    horovod_collectives.hvd.allreduce_async_ = original
    trainer.close()
    return found


class Branches(nn.Module):
    """`odd` is used on odd ranks only, `never` on none."""

    def __init__(self):
        super().__init__()
        self.always, self.odd, self.never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x, rank):
        return self.always(x) + (self.odd(x) if rank % 2 else 0)


def branches(run_dir):
    """Gradients after the exchange, with weight decay that must not touch what has none."""
    settings = {"optim.unused_parameters": "allow", "optim.lr_scaling": "none"}
    trainer, net, optimizer, _ = start(
        run_dir, Branches(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.5), **settings
    )
    rank, size = trainer.world.rank, trainer.world.size
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    seen = {}

    def look(*_):
        seen.update({name: None if p.grad is None else p.grad.tolist() for name, p in net.named_parameters()})

    optimizer.register_step_pre_hook(look)
    trainer.step(net(torch.full((1, 3), rank + 1.0), rank).sum(), weight=1.0)
    moved = {name: not torch.equal(p, before[name]) for name, p in net.named_parameters()}
    trainer.close()
    return {
        "bias": seen["odd.bias"],
        "weight": seen["always.weight"],
        "never": seen["never.bias"],
        "moved": moved,
        "size": size,
    }


def late_group(run_dir):
    """A parameter group that is added after prepare, and one that is frozen later."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    trainer, net, optimizer, _ = start(
        run_dir, model, lambda m: torch.optim.SGD(m[0].parameters(), lr=0.1), **{"optim.lr_scaling": "none"}
    )
    generator = torch.Generator().manual_seed(trainer.world.rank)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": list(net[1].parameters())})
        if step == 3:
            net[0].requires_grad_(False)
        trainer.step(net(torch.randn(4, 8, generator=generator)).square().mean())
    sums = [p.detach().double().sum().item() for p in net.parameters()]
    trainer.close()
    return sums


def two_losses(run_dir):
    """Two backwards in one micro batch: as much as one of their sum."""
    result = []
    for split in (False, True):
        trainer, net, _, loader = start(f"{run_dir}/{split}")
        for batch in loader:
            losses = sample_losses(net, batch)
            if split:
                trainer.backward(losses.mean())
                trainer.backward(sample_losses(net, batch).square().mean())
            else:
                trainer.backward(losses.mean() + losses.square().mean())
            trainer.optimizer_step()
        trainer.close()
        result.append([line["grad_norm"] for line in read_log(f"{run_dir}/{split}")])
    return result


def batch_norm(run_dir, steps=2):
    """Running statistics after steps on different data."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    trainer, net, _, _ = start(run_dir, model)
    generator = torch.Generator().manual_seed(trainer.world.rank)
    for _ in range(steps):
        trainer.step(net(torch.randn(6, 4, generator=generator)).square().mean())
    found = [net[1].running_mean.tolist(), net[1].running_var.tolist(), int(net[1].num_batches_tracked)]
    trainer.close()
    return found


def restored_optimizer(run_dir):
    """Rank 0 comes with a used optimizer (as after loading a checkpoint by hand), the others with fresh ones."""
    import os

    model = nn.Linear(4, 2)
    used = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    if os.environ["RANK"] == "0":
        for group in used.param_groups:
            group["lr"] = 0.05
        model(torch.ones(1, 4)).sum().backward()
        used.step()
        used.zero_grad()
    trainer, net, optimizer, _ = start(run_dir, model, lambda m: used)
    state = [[float(s["step"]), s["exp_avg"].tolist()] for s in optimizer.state.values()]
    found = {"state": state, "lr": optimizer.param_groups[0]["lr"], "sum": float(net.weight.sum())}
    trainer.close()
    return found


def fresh_optimizer(run_dir):
    """prepare() moves no parameter and makes no state."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()
    trainer, net, optimizer, _ = start(
        run_dir, model, lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5)
    )
    found = [torch.equal(before, net.weight) if trainer.is_main else True, len(optimizer.state)]
    trainer.close()
    return found


def overflow(run_dir):
    """fp16: one rank's gradient overflows in the second step; all skip it."""
    trainer, net, _, loader = start(run_dir, precision="fp16")
    for step, batch in enumerate(loader):
        losses = sample_losses(net, batch)
        scale = float("inf") if step == 1 and trainer.world.rank == trainer.world.size - 1 else 1.0
        trainer.step(losses.mean() * scale)
    sums = [p.detach().double().sum().item() for p in net.parameters()]
    trainer.close()
    return {"log": read_log(run_dir), "sums": sums}


def process_sets(run_dir):
    """A script's own sum over two of four ranks."""
    import horovod.torch as hvd

    trainer = distkit.Trainer(
        {
            "strategy": "horovod",
            "run_dir": run_dir,
            "log.to": ["jsonl"],
            "engine.horovod": {"process_sets": [[0, 1], [2, 3]]},
        }
    )
    rank = trainer.world.rank
    mine = trainer.strategy.process_sets[rank // 2]
    total = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum, name=f"own.{rank // 2}", process_set=mine)
    trainer.world.barrier()
    trainer.close()
    return float(total)


def unprepared_loader(run_dir, strategy):
    """Batches from a loader of the user's own: windows by count, and a short one at the epoch's end."""
    trainer = distkit.Trainer(
        {
            "strategy": strategy,
            "run_dir": run_dir,
            "log.to": ["jsonl"],
            "batch.accumulate": 2,
            "log.every_steps": 1,
            "optim.lr_scaling": "none",
        }
    )
    net = TinyGPT()
    net, _ = trainer.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    data, stride = Tokens(20), trainer.world.size
    for _ in trainer.epochs(2):
        for i in range(5):
            items = [data[4 * i + j] for j in range(trainer.world.rank, 4, stride)]
            batch = {key: torch.stack([item[key] for item in items]) for key in ("x", "y")}
            trainer.step(sample_losses(net, batch).mean())
    trainer.close()
    return read_log(run_dir)


def lines(run_dir, **settings):
    """What the start of the log says, and the rates that were used."""
    trainer, net, _, loader = start(run_dir, **settings)
    said = []
    trainer._log.say = said.append
    for batch in loader:
        trainer.step(sample_losses(net, batch).mean())
    trainer.close()
    return {"said": said, "lr": [line["lr"] for line in read_log(run_dir)]}


def beside_torch(run_dir):
    """A script that has a process group of torch's own, too."""
    import torch.distributed as dist

    trainer, net, _, loader = start(run_dir)
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    for batch in loader:
        trainer.step(sample_losses(net, batch).mean())
    trainer.close()
    dist.destroy_process_group()
    return float(total)
