#!/usr/bin/env python3
"""Do checkpoints move between any two strategies and numbers of processes, with nothing lost?

For every ordered pair of (strategy, number of processes): the source trains some steps, writes a checkpoint and goes on.
The target loads it and writes it out again at once. Every tensor (parameters, buffers, each field of the optimizer), the
parameter groups, and what the Trainer remembers must be equal, tensors bit for bit. Then the target trains on, and its
losses must be those of the source, which stayed.

The model has tied weights, parameters of one, two and three rows, one without dimensions, frozen ones, and buffers that
training changes. Cells show the largest difference of a loss; "refused" stands where a strategy says before training that
it can't step this optimizer or compute in this precision.

Examples:
  scripts/benchmarks/checkpoint_matrix.py
  scripts/benchmarks/checkpoint_matrix.py --strategies fsdp,zero3 --sizes 1,4
  scripts/benchmarks/checkpoint_matrix.py --optimizer SGD:momentum=0.9 --json matrix.json
  scripts/benchmarks/checkpoint_matrix.py --set precision=bf16
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from venv_of_checkout import ROOT, use_venv

sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tests.contract.matrix import Move, Options, Place, Source

WITHIN = {"fp32": 1e-6}
WITHIN_HALF = 0.02
"""In 16 bits two engines round differently; only runs of one strategy are held to this, the others are shown."""


def main() -> int:
    use_venv()
    arguments = parse_arguments()
    from rich.console import Console

    console = Console(stderr=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        moves = run_all(arguments, Path(folder), console)
    summary = summarise(moves, arguments, time.monotonic() - started)
    out = Console()
    wide = Console(width=max(out.width, 150)) if not out.is_terminal else out
    for table in tables(moves, arguments):
        wide.print(table)
    for move in moves:
        if problem(move, arguments):
            out.print(f"{move.source} -> {move.target}: {problem(move, arguments)}", markup=False, soft_wrap=True)
    for text, pairs in refusals(moves).items():
        out.print(f"refused in {pairs} pairs: {text}", markup=False, soft_wrap=True)
    out.print(summary["text"], markup=False, soft_wrap=True)
    if arguments.json:
        rows = [as_json(move, arguments) for move in moves]
        Path(arguments.json).write_text(json.dumps({"summary": summary, "moves": rows}, indent=1), encoding="utf-8")
    return int(summary["failed"] > 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", type=names, help="names with commas between, such as fsdp,zero2+offload; all")
    parser.add_argument("--sizes", type=numbers, default=[1, 2, 4], help="numbers of processes with commas between")
    parser.add_argument(
        "--optimizer", default="AdamW", help="class in torch.optim and arguments, such as SGD:momentum=0.9"
    )
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="for all runs")
    parser.add_argument(
        "--within",
        type=float,
        help="largest difference of a loss; 1e-6 in fp32. In 16 bits 0.02, and only where source and target are of one strategy",
    )
    parser.add_argument("--after", type=int, default=5, help="steps that are compared")
    parser.add_argument("--json", metavar="FILE", help="write all pairs as JSON too")
    arguments = parser.parse_args()
    import yaml

    from distkit.config.load import load_config

    arguments.precision = load_config(overrides=arguments.settings).config.precision
    pairs = (item.partition("=") for item in arguments.settings)
    arguments.settings = {key: yaml.safe_load(value) for key, _, value in pairs}
    if arguments.within is None:
        arguments.within = WITHIN.get(arguments.precision, WITHIN_HALF)
    from tests.contract.matrix import VARIANTS, places

    try:
        arguments.places = places(arguments.strategies, arguments.sizes)
    except Exception as error:  # a mistyped name, with the nearest one in the message
        parser.error(f"{error} (besides: {', '.join(VARIANTS)})")
    return arguments


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def numbers(text: str) -> list[int]:
    return [int(number) for number in names(text)]


# -- running --------------------------------------------------------------------------------------------------------


def run_all(arguments: argparse.Namespace, folder: Path, console: Console) -> list[Move]:
    """Every source, then every pair, all targets of one place behind each other in the same processes."""
    from tests.contract.matrix import Options, make_source
    from tests.pool import Pool

    options = Options(arguments.optimizer, arguments.settings, after=arguments.after)
    pool = Pool(output=folder / "output.log")
    found: list[Place] = arguments.places
    try:
        with bar(console) as progress:
            task = progress.add_task("sources", total=len(found)) if progress else None
            sources = []
            for number, place in enumerate(found):
                sources.append(make_source(pool, place, folder / f"source-{number}", options))
                if progress:
                    progress.advance(task)
            if not progress:
                console.print(f"{len(sources)} sources trained", markup=False)
            return move_all(pool, sources, found, folder, options, console, progress)
    finally:
        pool.close()


def move_all(
    pool: Any,
    sources: Sequence[Source],
    targets: Sequence[Place],
    folder: Path,
    options: Options,
    console: Console,
    progress: Any,
) -> list[Move]:
    from tests.contract.matrix import Move, make_move

    refused = {source.place: source.refused for source in sources if source.refused}
    moves: list[Move] = []
    task = progress.add_task("pairs", total=len(sources) * len(targets)) if progress else None
    for number, target in enumerate(targets):
        began = time.monotonic()
        for place, source in enumerate(sources):
            start = time.monotonic()
            if target in refused:  # as it was when it was to be a source
                move = Move(source.place, target, refused=refused[target])
            else:
                move = make_move(pool, source, target, folder / f"target-{number}-{place}", options)
            moves.append(replace(move, seconds=round(time.monotonic() - start, 2)))
            if progress:
                progress.update(task, advance=1, description=f"pairs, to {target}")
        if not progress:
            seconds = time.monotonic() - began
            console.print(f"{number + 1}/{len(targets)} to {target}: {seconds:.0f} s", markup=False)
    return moves


def bar(console: Console) -> Any:
    """A progress bar on a terminal; None elsewhere."""
    if not console.is_terminal:
        return nullcontext()
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


# -- showing --------------------------------------------------------------------------------------------------------


def problem(move: Move, arguments: argparse.Namespace) -> str:
    """What is wrong with a pair; empty if nothing is."""
    if move.failed or move.refused:
        return move.failed
    held = arguments.precision == "fp32" or move.source == move.target
    if held and not move.difference <= arguments.within:
        return f"a loss is {move.difference:.1e} from that of staying, more than {arguments.within:g}"
    return ""


def cell(move: Move, arguments: argparse.Namespace) -> str:
    if move.refused:
        return "[dim]refused[/]"
    if move.failed:
        return "[bold red]FAILED[/]"
    text = "0" if move.difference == 0 else f"{move.difference:.1e}"
    return f"[bold red]{text}[/]" if problem(move, arguments) else text


def tables(moves: Sequence[Move], arguments: argparse.Namespace) -> list[Table]:
    """One a number of processes of the targets: sources down, targets across."""
    from rich.table import Table

    found = {(move.source, move.target): move for move in moves}
    made = []
    for size in arguments.sizes:
        targets = [place for place in arguments.places if place.size == size]
        if not targets:
            continue
        table = Table(title=f"to {size} process{'es' if size > 1 else ''}")
        table.add_column("from")
        for target in targets:
            table.add_column(target.label, justify="right", no_wrap=True)
        for source in arguments.places:
            table.add_row(str(source), *(cell(found[source, target], arguments) for target in targets))
        made.append(table)
    return made


def refusals(moves: Sequence[Move]) -> dict[str, int]:
    """Reasons, and in how many pairs."""
    counts: dict[str, int] = {}
    for move in moves:
        if move.refused:
            text = " ".join(move.refused.split())
            counts[text] = counts.get(text, 0) + 1
    return counts


def summarise(moves: Sequence[Move], arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    failed = sum(bool(problem(move, arguments)) for move in moves)
    refused = sum(bool(move.refused) for move in moves)
    moved = [move for move in moves if not move.refused and not move.failed]
    largest = max((move.difference for move in moved if not math.isnan(move.difference)), default=0.0)
    tensors = max((move.tensors for move in moves), default=0)
    text = (
        f"{len(moves)} ordered pairs of {len(arguments.places)} places, {arguments.optimizer}, {arguments.precision}: "
        f"{len(moved)} moved with all {tensors} tensors, groups and counters the same bits, "
        f"{refused} refused before training, {failed} failed; largest difference of {arguments.after} losses "
        f"{largest:.1e} (allowed {arguments.within:g}); {seconds:.0f} s"
    )
    return {
        "optimizer": arguments.optimizer,
        "precision": arguments.precision,
        "pairs": len(moves),
        "moved": len(moved),
        "refused": refused,
        "failed": failed,
        "largest_difference": largest,
        "within": arguments.within,
        "seconds": round(seconds, 1),
        "text": text,
    }


def as_json(move: Move, arguments: argparse.Namespace) -> dict[str, Any]:
    difference = None if math.isnan(move.difference) else move.difference
    sides = {"source": str(move.source), "target": str(move.target)}
    return {**asdict(move), **sides, "difference": difference, "problem": problem(move, arguments)}


if __name__ == "__main__":
    sys.exit(main())
