"""What the tests of ddp run in worker processes."""

import torch
import torch.distributed as dist
from torch.distributed import GradBucket
from torch.utils.data import DataLoader

import distkit
from tests.contract.models import TinyGPT, Tokens, sample_losses


def start(run_dir, **settings):
    base = {
        "strategy": "ddp",
        "run_dir": run_dir,
        "log.to": ["jsonl"],
        "checkpoint.at_end": False,
        "batch.per": "global",
    }
    trainer = distkit.Trainer({**base, **settings})
    net = TinyGPT()
    loader = DataLoader(Tokens(30), batch_size=12, shuffle=True)
    return trainer, *trainer.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), loader)


def traffic(run_dir, accumulate):
    """Buckets that travelled in each micro batch."""
    trainer, net, _, loader = start(run_dir, **{"batch.accumulate": accumulate})
    counted = [0]

    def hook(state, bucket: GradBucket):
        counted[0] += 1
        return (
            dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
            .get_future()
            .then(lambda f: f.value()[0])
        )

    net.register_comm_hook(None, hook)
    found = []
    for batch in loader:
        counted[0] = 0
        ended = trainer.step(sample_losses(net, batch).mean())
        found.append([ended, counted[0]])
    trainer.close()
    return found


def compressed(run_dir, method):
    trainer, net, _, loader = start(run_dir, **{"compress.method": method, "log.every_steps": 1})
    for _ in trainer.epochs(2):
        for batch in loader:
            trainer.step(sample_losses(net, batch).mean())
    state = [p.detach().double().sum().item() for p in net.parameters()]
    trainer.close()
    from tests.contract.cases import read_log

    return {"log": read_log(run_dir), "state": state}


def attributes(run_dir):
    """A script that reads the model's own attributes and methods runs under ddp too."""
    trainer, net, _, _ = start(run_dir)
    found = [len(net.blocks), net.head.weight is net.wte.weight, isinstance(trainer.unwrap(net), TinyGPT)]
    try:
        net.nothing  # noqa: B018
    except AttributeError as error:
        found.append(str(error))
    trainer.close()
    return found


def compiled(run_dir, compile):
    trainer, net, _, loader = start(
        run_dir, compile=compile, **{"log.every_steps": 1, "engine.compile": {"backend": "aot_eager"}}
    )
    for batch in loader:
        trainer.step(sample_losses(net, batch).mean())
    names = sorted(trainer.model_state_dict(net))
    trainer.close()
    from tests.contract.cases import read_log

    return {"log": read_log(run_dir), "names": names}


def bad_argument(run_dir):
    start(run_dir, **{"engine.ddp": {"bucket_cap": 3}})


def frozen_teacher(run_dir):
    """DDP refuses a module without trained parameters; a teacher is one."""
    trainer = distkit.Trainer({"strategy": "ddp", "run_dir": run_dir, "log.to": ["jsonl"], "checkpoint.at_end": False})
    torch.manual_seed(trainer.world.rank)
    teacher = TinyGPT().requires_grad_(False)
    teacher = trainer.prepare(teacher)
    total = sum(float(p.sum()) for p in teacher.parameters())
    trainer.close()
    return total


def unprepared_loader(run_dir, ranks):
    """Batches from a loader of the user's own: windows by count, and a short one at the epoch's end."""
    trainer = distkit.Trainer(
        {"strategy": "ddp", "run_dir": run_dir, "log.to": ["jsonl"], "batch.accumulate": 2, "log.every_steps": 1}
    )
    net = TinyGPT()
    net, opt = trainer.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    data = Tokens(20)
    stride = trainer.world.size
    for _ in trainer.epochs(2):
        for i in range(5):
            items = [data[4 * i + j] for j in range(trainer.world.rank, 4, stride)]
            batch = {key: torch.stack([item[key] for item in items]) for key in ("x", "y")}
            trainer.step(sample_losses(net, batch).mean())
    trainer.close()
    from tests.contract.cases import read_log

    return read_log(run_dir)


def unnamed(run_dir):
    """A script that names no strategy, started by torchrun."""
    trainer = distkit.Trainer({"run_dir": run_dir, "log.to": ["jsonl"], "checkpoint.at_end": False})
    found = [trainer.config.strategy, trainer.world.size]
    trainer.close()
    return found
