#!/usr/bin/env python3
"""How much host memory does a rank need for saving and loading a checkpoint, above what it holds anyway?

A GPT of 100 million parameters with AdamW, on 4 processes. After one step a blocking save is measured, and in fresh
processes the start of a run that resumes from it. For each rank:

  anonymous   largest RssAnon meanwhile above that before: memory that the system must find
  file        the same of RssFile: pages of mapped files, which the system can drop at any time
  transient   what of `anonymous` is free again afterwards (after a load the optimizer's state stays)

The bound is the rank's shard plus the largest tensor, plus --allowance for buffers, interpreter and allocator: `empty` is
what the same save and load need with a model of a few thousand parameters. A shard is what the rank writes in a save, and
what it holds after a load.

RSS is sampled every millisecond, since the kernel's exact VmHWM (reset through /proc/self/clear_refs) doesn't tell
anonymous pages from those of files; it stands beside as `exact`, of both together, and shows that the samples missed
nothing. The allocator is told to give freed blocks back (MALLOC_MMAP_THRESHOLD_), or memory that is used again would not
be seen.

Examples:
  scripts/benchmarks/checkpoint_memory.py
  scripts/benchmarks/checkpoint_memory.py --strategies fsdp,zero3 --processes 2 --layers 4
  scripts/benchmarks/checkpoint_memory.py --json memory.json --allowance 32
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from venv_of_checkout import ROOT, use_venv

if TYPE_CHECKING:
    from rich.table import Table

STRATEGIES = ("fsdp", "zero3", "ddp", "zero1", "zero2")
MIB = 1 << 20
EMPTY = 0
"""Layers of the model by which the allowance is judged."""


@dataclass(frozen=True)
class Row:
    """One rank's save or load. Bytes.

    Args:
        shard: See the help.
        largest: Of the largest whole tensor.
        empty: `anonymous` with a model of a few thousand parameters, the largest of all ranks.
    """

    strategy: str
    what: str
    rank: int
    shard: int
    largest: int
    anonymous: int
    file: int
    exact: int
    transient: int
    empty: int

    @property
    def bound(self) -> int:
        return self.shard + self.largest


def main() -> int:
    use_venv()
    arguments = parse_arguments()
    if arguments.measure is not None:
        measure(arguments.measure, arguments.layers)
        return 0
    rows: list[Row] = []
    for strategy in arguments.strategies:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            print(f"{strategy} ...", file=sys.stderr, flush=True)
            empty = measured(strategy, EMPTY, Path(folder, "empty"), arguments.processes, {})
            found = measured(strategy, arguments.layers, Path(folder, "whole"), arguments.processes, empty)
            rows += [row for of_one in found.values() for row in of_one]
    show(rows, arguments.allowance * MIB)
    if arguments.json:
        lines = [{**asdict(row), "bound": row.bound} for row in rows]
        Path(arguments.json).write_text(json.dumps(lines, indent=1), encoding="utf-8")
    over = [row for row in rows if row.anonymous > row.bound + arguments.allowance * MIB]
    for row in over:
        print(
            f"{row.strategy}, {row.what}, rank {row.rank}: {row.anonymous / MIB:.0f} MiB are above "
            f"{row.bound / MIB:.0f} MiB and the allowance of {arguments.allowance} MiB",
            file=sys.stderr,
        )
    return int(bool(over))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", type=names, default=list(STRATEGIES), help="names with commas between")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--layers", type=int, default=11, help="blocks of 7 million parameters; 25 million lie outside")
    parser.add_argument("--allowance", type=int, default=64, metavar="MIB", help="above the bound; 64 MiB")
    parser.add_argument("--folder", help="where checkpoints are written meanwhile; the system's temporary folder")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON too, in bytes")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # what the started processes are given
    return parser.parse_args()


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def measured(
    strategy: str, layers: int, folder: Path, processes: int, empty: dict[str, list[Row]]
) -> dict[str, list[Row]]:
    """A save and a load, by what they are; one row a rank."""
    save = run(folder / "save", "save", strategy, layers, processes)
    source = folder / "save" / "checkpoints"
    load = run(folder / "load", "load", strategy, layers, processes, source)
    return {
        what: [
            Row(strategy, what, rank, **values, empty=max((row.anonymous for row in empty.get(what, [])), default=0))
            for rank, values in enumerate(found)
        ]
        for what, found in (("save", save), ("load", load))
    }


def run(
    folder: Path, what: str, strategy: str, layers: int, processes: int, source: Path | None = None
) -> list[dict[str, int]]:
    """Fresh processes through distkit-run; what each measured."""
    settings = {
        "device": "cpu",
        "checkpoint.at_end": "false",
        "checkpoint.background": "false",
        "checkpoint.resume": source or "none",
        "optim.lr_scaling": "none",
        "log.to": "[jsonl]",
    }
    command = [sys.executable, "-c", "from distkit.launch.command import main; main()"]
    command += ["-s", strategy, "--nproc", str(processes), "--run-dir", str(folder)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    command += [__file__, "--measure", what, "--layers", str(layers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{strategy}, {what}: failed with status {done.returncode}:\n{done.stderr[-3000:]}")
    return [json.loads((folder / f"memory-{rank}.json").read_text(encoding="utf-8")) for rank in range(processes)]


def show(rows: list[Row], allowance: int) -> None:
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=max(console.width, 130))).print(table(rows, allowance))


def table(rows: list[Row], allowance: int) -> Table:
    from rich.table import Table

    made = Table(title="host memory above that before, MiB")
    columns = ("shard", "largest tensor", "bound", "anonymous", "transient", "file", "exact", "empty")
    for name in ("strategy", "what", "rank"):
        made.add_column(name)
    for name in columns:
        made.add_column(name, justify="right")
    for row in rows:
        values = [row.shard, row.largest, row.bound, row.anonymous, row.transient, row.file, row.exact]
        texts = [f"{value / MIB:.1f}" for value in (*values, row.empty)]
        if row.anonymous > row.bound + allowance:
            texts[3] = f"[bold red]{texts[3]}[/]"
        made.add_row(row.strategy, row.what, str(row.rank), *texts)
    return made


# -- in the started processes ---------------------------------------------------------------------------------------


class Peak:
    """Memory while it is open: anonymous and file pages by samples, both together exactly."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.before = self.highest = resident()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        self.exact = status("VmHWM") - sum(self.before)
        gc.collect()
        self.after = resident()

    def _sample(self) -> None:
        while not self._done.is_set():
            now = resident()
            self.highest = (max(self.highest[0], now[0]), max(self.highest[1], now[1]))
            time.sleep(0.001)

    def report(self) -> dict[str, int]:
        anonymous = self.highest[0] - self.before[0]
        return {
            "anonymous": anonymous,
            "file": self.highest[1] - self.before[1],
            "exact": self.exact,
            "transient": self.highest[0] - max(self.before[0], self.after[0]),
        }


def status(*fields: str) -> int:
    """Sum of fields of /proc/self/status, in bytes."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return sum(
        int(value) << 10 for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE) if name in fields
    )


def resident() -> tuple[int, int]:
    """Anonymous pages, shared ones included, and pages of files."""
    return status("RssAnon", "RssShmem"), status("RssFile")


def measure(what: str, layers: int) -> None:
    """What each process does."""
    sys.path.insert(0, str(ROOT / "recipes" / "gpt"))
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import distkit
    from distkit.memory import count_state

    from model import GPT, GPTConfig

    size = {"vocab_size": 32000, "n_embd": 768, "n_head": 12} if layers else {"vocab_size": 32, "n_embd": 32}
    trainer = distkit.Trainer()
    model = GPT(GPTConfig(n_layer=layers or 2, block_size=16, **size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 32, (64, 16))
    loader = DataLoader(TensorDataset(tokens, tokens), batch_size=1)
    model, optimizer, loader = trainer.prepare(model, optimizer, loader)
    epochs = trainer.epochs(1)
    if what == "load":
        with Peak() as peak:
            next(epochs)
        held = count_state(trainer.strategy)
        shard = held.parameters + held.optimizer + held.buffers
    else:
        next(epochs)
        inputs, targets = next(iter(loader))
        trainer.step(torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
        with Peak() as peak:
            trainer.save()
        shard = sum(s.tensor.numel() * s.tensor.element_size() for s in trainer.strategy.shards())
    shapes = trainer.strategy.global_shapes(trainer.unwrap(model)).values()
    largest = max(4 * torch.Size(shape).numel() for shape in shapes)
    values = {**peak.report(), "shard": shard, "largest": largest}
    (trainer.run_dir / f"memory-{trainer.world.rank}.json").write_text(json.dumps(values), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
