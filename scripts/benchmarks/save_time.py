#!/usr/bin/env python3
"""How long does a checkpoint hold training up? In the background, blocking, and by torch itself, in one run.

All ways write parameters and AdamW's states of the same model, in turns, into the same folder, flushed to the disk.
`held up` is until the call returns, `written` until the files are on the disk; medians over the turns, the slowest rank.
`ratio` compares with distkit's blocking save. torch.save gathers on rank 0, which is its usual way under ddp;
torch.distributed.checkpoint (DCP) writes from all ranks.

Examples:
  scripts/benchmarks/save_time.py
  scripts/benchmarks/save_time.py --strategies fsdp --processes 4 --parameters 100 --folder /mnt/scratch
  scripts/benchmarks/save_time.py --held-up 0.1 --written 1.2 --json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from venv_of_checkout import ROOT, use_venv

if TYPE_CHECKING:
    import torch

WIDTH = 1024
"""A layer has WIDTH x WIDTH weights: about a million."""

Way = Callable[[Path], float | None]
"""Saves into a folder; returns when training may go on. Gives the seconds until the files are on the disk, if later."""


def main() -> int:
    use_venv()
    arguments = parse_arguments()
    if arguments.measure:
        measure(arguments.parameters, arguments.turns)
        return 0
    rows: list[dict[str, Any]] = []
    for strategy in arguments.strategies:
        processes = 1 if strategy == "single" else arguments.processes
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            rows += run(Path(folder), strategy, processes, arguments)
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows)
    return judge(rows, arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", type=lambda text: text.split(","), default=["single", "ddp", "fsdp"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--parameters", type=int, default=50, help="millions of them (default 50: 600 MB with AdamW)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; the default is the system's temporary folder")
    parser.add_argument("--held-up", type=float, help="exit with status 1 if background/blocking is above this")
    parser.add_argument("--written", type=float, help="exit with status 1 if background/blocking is above this")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)  # in the started processes
    return parser.parse_args()


def run(folder: Path, strategy: str, processes: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All ways under one strategy, through distkit-run."""
    command = [sys.executable, "-c", "from distkit.launch.command import main; main()"]
    command += ["-s", strategy, "--nproc", str(processes), "--run-dir", str(folder)]
    for setting in ("device=cpu", "checkpoint.at_end=false", "log.to=[jsonl]", "checkpoint.keep=null"):
        command += ["--set", setting]
    command += [__file__, "--measure", "--turns", str(arguments.turns), "--parameters", str(arguments.parameters)]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{strategy} on {processes} failed with status {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads((folder / "times.json").read_text(encoding="utf-8"))
    blocking = [statistics.median(column) for column in zip(*found["blocking"], strict=True)]
    rows = []
    for way, times in found.items():
        held, written = (statistics.median(column) for column in zip(*times, strict=True))
        rows.append(
            {
                "strategy": strategy,
                "processes": processes,
                "way": way,
                "held_up_s": round(held, 4),
                "written_s": round(written, 4),
                "held_up_ratio": round(held / blocking[0], 4),
                "written_ratio": round(written / blocking[1], 4),
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'strategy':<10}{'processes':>10}  {'way':<22}{'held up s':>10}{'ratio':>8}{'written s':>11}{'ratio':>8}")
    for row in rows:
        print(
            f"{row['strategy']:<10}{row['processes']:>10}  {row['way']:<22}{row['held_up_s']:>10.3f}"
            f"{row['held_up_ratio']:>8.3f}{row['written_s']:>11.3f}{row['written_ratio']:>8.3f}"
        )


def judge(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> int:
    bad = 0
    for row in rows:
        for what, limit in (("held_up", arguments.held_up), ("written", arguments.written)):
            ratio = row[f"{what}_ratio"]
            if row["way"] == "background" and limit is not None and ratio > limit:
                print(f"{row['strategy']}: {what} {ratio:g} is above {limit:g}", file=sys.stderr)
                bad = 1
    return bad


# -- in the started processes -----------------------------------------------------------------------------------------------


def measure(millions: int, turns: int) -> None:
    """Rank 0 writes for each way a list of (held up, written) in seconds, of the slowest rank."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    import distkit

    trainer = distkit.Trainer()
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(max(1, round(millions * 1e6 / WIDTH**2)))))
    optimizer: Any = torch.optim.AdamW(model.parameters(), foreach=False)
    model, optimizer, loader = trainer.prepare(model, optimizer, DataLoader(torch.rand(8, WIDTH)))
    for _ in trainer.epochs(1):
        for x in loader:
            trainer.step(model(x).square().mean())
    ways = {"blocking": blocking(trainer), "background": background(trainer), **torch_ways(trainer, model, optimizer)}
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    order = list(ways.items())
    for turn in range(turns + 1):
        order = order[1:] + order[:1]  # none always follows the same one, whose pages are still being freed
        for name, way in order:
            folder = trainer.run_dir / f"{name.replace(' ', '-')}-{turn}"
            trainer.world.barrier()
            start = time.perf_counter()
            later = way(folder)
            held = time.perf_counter() - start if later is None else later
            trainer.world.barrier()
            row = trainer.world.all_reduce(
                torch.tensor([held, time.perf_counter() - start], dtype=torch.float64), "max"
            )
            if turn:  # the first warms up
                times[name].append((float(row[0]), float(row[1])))
            if trainer.is_main:
                shutil.rmtree(folder, ignore_errors=True)
                shutil.rmtree(trainer.run_dir / "checkpoints", ignore_errors=True)
            trainer.world.barrier()
    if trainer.is_main:
        (trainer.run_dir / "times.json").write_text(json.dumps(times), encoding="utf-8")


def blocking(trainer: Any) -> Way:
    def save(folder: Path) -> None:
        trainer.save()

    return save


def background(trainer: Any) -> Way:
    def save(folder: Path) -> float:
        start = time.perf_counter()
        path = trainer.save(wait=False)
        held = time.perf_counter() - start
        while not (path / "manifest.json").exists():
            time.sleep(0.005)
        return held

    return save


def torch_ways(trainer: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Way]:
    """torch.save where a rank has everything; DCP under every strategy whose state torch can gather."""
    from torch.distributed import is_initialized

    ways: dict[str, Way] = {}
    if trainer.config.strategy in ("single", "dp", "ddp"):

        def torch_save(folder: Path) -> None:
            if trainer.is_main:
                folder.mkdir()
                _flushed(folder / "all.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            trainer.world.barrier()

        ways["torch.save"] = torch_save
    if is_initialized():
        ways |= _dcp_ways(model, optimizer)
    return ways


def _flushed(path: Path, state: dict[str, Any]) -> None:
    import torch

    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _dcp_ways(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Way]:
    import torch.distributed as dist
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    aside = dist.new_group(backend="gloo")

    def state() -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def save(folder: Path) -> None:
        dcp.save(state(), checkpoint_id=folder)

    def async_save(folder: Path) -> float:
        start = time.perf_counter()
        future = dcp.async_save(state(), checkpoint_id=folder, process_group=aside)
        held = time.perf_counter() - start
        future.result()
        return held

    return {"DCP save": save, "DCP async_save": async_save}


if __name__ == "__main__":
    sys.exit(main())
