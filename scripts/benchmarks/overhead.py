#!/usr/bin/env python3
"""What does distkit cost? Trains the same model under each strategy, and with the engine used by hand, in one process.

Both loops live in the same processes and take turns of a few steps, so a busy machine slows both alike. Each reads its
batches from a DataLoader (the hand-written one with a DistributedSampler), clips to a norm of 1, and reads the loss
every tenth step. The ratio is the median over all turns of distkit's time to the hand-written loop's time.

Examples:
  scripts/benchmarks/overhead.py
  scripts/benchmarks/overhead.py --strategies ddp,zero2 --models small --turns 60
  scripts/benchmarks/overhead.py --within 1.05 --json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from venv_of_checkout import ROOT, use_venv

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

STRATEGIES = ("single", "ddp", "horovod", "fsdp", "zero1", "zero2", "zero3")
MODELS = {
    "tiny": {"n_layer": 2, "n_embd": 32, "block": 32, "batch": 4},
    "small": {"n_layer": 3, "n_embd": 96, "block": 64, "batch": 8},
}
"""Sizes of the gpt recipe's model; `batch` is a rank's."""

CLIP = 1.0
LOG_EVERY = 10
STEPS_A_TURN = 10


def main() -> int:
    use_venv()
    arguments = parse_arguments()
    if arguments.measure:
        measure(arguments.measure, arguments.turns)
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for strategy in arguments.strategies:
            for model in arguments.models:
                processes = 1 if strategy == "single" else arguments.processes
                rows.append(run(Path(folder, f"{strategy}-{model}"), strategy, processes, model, arguments.turns))
                if not arguments.json:
                    show(rows[-1], first=len(rows) == 1)
    if arguments.json:
        print(json.dumps(rows, indent=1))
    slow = [row for row in rows if arguments.within is not None and row["ratio"] > arguments.within]
    for row in slow:
        print(
            f"{row['strategy']}, {row['model']}: {row['ratio']:.3f} is above --within {arguments.within:g}",
            file=sys.stderr,
        )
    return int(bool(slow))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", type=names, default=list(STRATEGIES), help="names with commas between")
    parser.add_argument("--models", type=names, default=list(MODELS), help="tiny, small")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=30, help=f"turns of {STEPS_A_TURN} steps for each loop")
    parser.add_argument("--within", type=float, help="exit with status 1 if a ratio is above this")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # what the started processes are given
    arguments = parser.parse_args()
    for what, known in (("strategies", STRATEGIES), ("models", tuple(MODELS))):
        for name in getattr(arguments, what):
            if name not in known:
                parser.error(f"--{what} has {name!r}; there are: {', '.join(known)}")
    return arguments


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def run(folder: Path, strategy: str, processes: int, model: str, turns: int) -> dict[str, Any]:
    """Both loops through distkit-run; what rank 0 measured."""
    settings = {
        "device": "cpu",
        "optim.clip_norm": CLIP,
        "optim.lr_scaling": "none",
        "checkpoint.at_end": "false",
        "log.every_steps": LOG_EVERY,
        "log.to": "[jsonl]",
    }
    command = [sys.executable, "-c", "from distkit.launch.command import main; main()"]
    command += ["-s", strategy, "--nproc", str(processes), "--run-dir", str(folder)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    command += [__file__, "--measure", model, "--turns", str(turns)]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{strategy} on {processes} failed with status {done.returncode}:\n{done.stderr[-3000:]}")
    bare, own = json.loads((folder / "turns.json").read_text(encoding="utf-8"))
    ratios = [b / a for a, b in zip(bare, own, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "strategy": strategy,
        "processes": processes,
        "model": model,
        "bare_ms": round(statistics.median(bare), 3),
        "distkit_ms": round(statistics.median(own), 3),
        "ratio": round(statistics.median(ratios), 4),
        "quartiles": [round(low, 4), round(high, 4)],
    }


def show(row: dict[str, Any], *, first: bool) -> None:
    if first:
        print(
            f"{'strategy':<10}{'processes':>10}  {'model':<7}{'bare ms':>9}{'distkit ms':>12}{'ratio':>8}   middle half of the ratios"
        )
    low, high = row["quartiles"]
    print(
        f"{row['strategy']:<10}{row['processes']:>10}  {row['model']:<7}{row['bare_ms']:>9.2f}{row['distkit_ms']:>12.2f}"
        f"{row['ratio']:>8.3f}   {low:.3f} to {high:.3f}",
        flush=True,
    )


# -- in the started processes -----------------------------------------------------------------------------------------------


def measure(size: str, turns: int) -> None:
    """Time both loops in turns; rank 0 writes milliseconds a step for each turn."""
    sys.path.insert(0, str(ROOT / "recipes" / "gpt"))
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    import distkit

    from data import Blocks, read_text
    from model import GPT, GPTConfig

    chosen = MODELS[size]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return GPT(GPTConfig(n_layer=chosen["n_layer"], n_embd=chosen["n_embd"], block_size=chosen["block"]))

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    data: Dataset[Any] = Blocks(read_text(400_000)[0], chosen["block"])
    trainer = distkit.Trainer()
    world = trainer.world
    own = distkit_steps(trainer, build, adam, DataLoader(data, batch_size=chosen["batch"], shuffle=True))
    sampler = DistributedSampler(data, world.size, world.rank, drop_last=True)
    loader = DataLoader(data, batch_size=chosen["batch"], sampler=sampler, drop_last=True)
    bare = BARE[trainer.config.strategy](build, adam, batches(loader, sampler))
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 2):
        for which, steps in enumerate((bare, own) if turn % 2 else (own, bare)):
            world.barrier()
            start = time.perf_counter()
            for _ in range(STEPS_A_TURN):
                next(steps)
            world.barrier()
            if turn >= 2:  # the first turns warm up
                times[which if turn % 2 else 1 - which].append((time.perf_counter() - start) / STEPS_A_TURN * 1e3)
    if world.is_main:
        (trainer.run_dir / "turns.json").write_text(json.dumps(times), encoding="utf-8")


def distkit_steps(trainer: Any, build: Any, adam: Any, loader: DataLoader[Any]) -> Iterator[None]:
    import torch

    model = build()
    model, optimizer, loader = trainer.prepare(model, adam(model), loader)
    for _ in trainer.epochs(1000):
        for tokens, targets in loader:
            trainer.step(torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()))
            yield


def batches(loader: DataLoader[Any], sampler: Any) -> Iterator[Any]:
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        yield from loader


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    import torch

    tokens, targets = batch
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def read_every_tenth(step: int, loss: torch.Tensor) -> None:
    if step % LOG_EVERY == 0:
        loss.item()


def plain_loop(model: Any, optimizer: Any, items: Iterable[Any], clip: Callable[[], Any]) -> Iterator[None]:
    for step, batch in enumerate(items):
        loss = loss_of(model, batch)
        loss.backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()
        read_every_tenth(step, loss)
        yield


def bare_single(build: Any, adam: Any, items: Iterable[Any]) -> Iterator[None]:
    from torch.nn.utils import clip_grad_norm_

    model = build()
    return plain_loop(model, adam(model), items, lambda: clip_grad_norm_(model.parameters(), CLIP))


def bare_ddp(build: Any, adam: Any, items: Iterable[Any]) -> Iterator[None]:
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.utils import clip_grad_norm_

    model = DistributedDataParallel(build())
    return plain_loop(model, adam(model), items, lambda: clip_grad_norm_(model.parameters(), CLIP))


def bare_fsdp(build: Any, adam: Any, items: Iterable[Any]) -> Iterator[None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.utils import clip_grad_norm_

    model = build()
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain_loop(model, adam(model), items, lambda: clip_grad_norm_(model.parameters(), CLIP))


def bare_horovod(build: Any, adam: Any, items: Iterable[Any]) -> Iterator[None]:
    import horovod.torch as hvd
    from torch.nn.utils import clip_grad_norm_

    model = build()
    named = [(f"bare.{name}", parameter) for name, parameter in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(adam(model), named_parameters=named)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step, batch in enumerate(items):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.synchronize()
        clip_grad_norm_(model.parameters(), CLIP)
        with optimizer.skip_synchronize():
            optimizer.step()
        read_every_tenth(step, loss)
        yield


def bare_zero(stage: int) -> Callable[[Any, Any, Iterable[Any]], Iterator[None]]:
    def loop(build: Any, adam: Any, items: Iterable[Any]) -> Iterator[None]:
        import deepspeed

        model = build()
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        engine, _, _, _ = deepspeed.initialize(
            model=model, optimizer=adam(model), config=settings, dist_init_required=False
        )
        for step, batch in enumerate(items):
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            read_every_tenth(step, loss)
            yield

    return loop


BARE: dict[str, Callable[[Any, Any, Iterable[Any]], Iterator[None]]] = {
    "single": bare_single,
    "ddp": bare_ddp,
    "horovod": bare_horovod,
    "fsdp": bare_fsdp,
    "zero1": bare_zero(1),
    "zero2": bare_zero(2),
    "zero3": bare_zero(3),
}

if __name__ == "__main__":
    sys.exit(main())
