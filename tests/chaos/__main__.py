"""``python -m tests.chaos --rounds 100 --seed 1``: play rounds and say how many lost or spoilt a checkpoint."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from tests.chaos.chaos import Outcome, References, play
from tests.chaos.disks import can_mount
from tests.chaos.rounds import KINDS, Round, draw

ENOUGH_ROUNDS = 20
"""From so many rounds on, a quarter of the strikes must fall inside a save, or they prove little about saves."""


def main() -> int:
    """Play rounds; 0 if all is well."""
    options = _parse()
    if not can_mount():
        sys.stderr.write("chaos: needs root, for small disks and read-only folders\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that disks are unmounted
    background = {"true": True, "false": False, "drawn": None}[options.background]
    numbers = [options.only] if options.only is not None else range(options.first, options.first + options.rounds)
    plans = [draw(options.seed, n, background=background, strategies=tuple(options.strategy)) for n in numbers]
    plans = [plan for plan in plans if not options.kind or plan.kind in options.kind]
    folder = Path(tempfile.mkdtemp(prefix="distkit-chaos-"))
    began, outcomes = time.monotonic(), []
    for outcome in _play(plans, folder, options):
        outcomes.append(outcome)
        _say(outcome, len(outcomes), len(plans), options)
    seconds = time.monotonic() - began
    bad = [outcome for outcome in outcomes if outcome.problems]
    if not bad and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    inside = sum(outcome.inside for outcome in outcomes)
    few = len(outcomes) >= ENOUGH_ROUNDS and inside * 4 < len(outcomes)
    if options.json:
        print(json.dumps({"seconds": round(seconds), "rounds": [_record(outcome) for outcome in outcomes]}))
    else:
        _table(outcomes)
        missed = sum(not outcome.struck for outcome in outcomes)
        print(
            f"{len(outcomes)} rounds in {seconds:.0f} s, {inside} struck inside a save, {missed} ended before they were "
            f"struck, {len(bad)} with a problem"
        )
        if few:
            print("too few strikes fell inside a save")
    return 1 if bad or few else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=len(KINDS), help="how many")
    parser.add_argument("--seed", type=int, default=1, help="all that is drawn follows from it")
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--only", type=int, help="this round alone")
    parser.add_argument("--jobs", type=int, default=1, help="rounds at the same time")
    parser.add_argument("--kind", action="append", default=[], choices=KINDS, help="only rounds of this kind")
    parser.add_argument("--strategy", action="append", default=[], help="draw from these strategies")
    parser.add_argument("--background", default="drawn", choices=("true", "false", "drawn"), help="for all rounds")
    parser.add_argument("--keep", action="store_true", help="keep the folders of rounds that went well, too")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON; progress goes to stderr")
    return parser.parse_args()


def _play(plans: list[Round], folder: Path, options: argparse.Namespace) -> Iterator[Outcome]:
    references = References(folder)
    with ThreadPoolExecutor(options.jobs) as pool:
        name = "round-{}".format
        waiting = [
            pool.submit(play, plan, references, folder / name(plan.name.replace(":", "-")), keep=options.keep)
            for plan in plans
        ]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            for future in waiting:
                future.cancel()


def _say(outcome: Outcome, count: int, total: int, options: argparse.Namespace) -> None:
    plan, file = outcome.plan, sys.stderr if options.json else sys.stdout
    where = f"{plan.strategy} x {plan.nproc}"
    if plan.changed:
        where += f" -> {plan.next_strategy} x {plan.next_nproc}"
    how = "background" if plan.background else "blocking"
    struck = "inside a save" if outcome.inside else "between saves" if outcome.struck else "not struck"
    result = "FAILED" if outcome.problems else "ok"
    print(
        f"{count}/{total}  {plan.name}  {plan.kind:<19} {where:<24} {how:<10} {struck:<13} {outcome.seconds:5.1f} s  {result}",
        file=file,
        flush=True,
    )
    if outcome.problems:
        seed, _, number = plan.name.partition(":")
        chosen = "".join(f" --strategy {name}" for name in options.strategy)
        chosen += "" if options.background == "drawn" else f" --background {options.background}"
        lines = [*outcome.problems, f"files: {outcome.folder}", str(plan)]
        lines.append(f"repeat: python -m tests.chaos --seed {seed} --only {number}{chosen}")
        print(*("    " + line.replace("\n", "\n    ") for line in lines), sep="\n", file=file, flush=True)


def _table(outcomes: list[Outcome]) -> None:
    row = "{:<20} {:>7} {:>14} {:>6} {:>6} {:>6}".format
    print(row("disturbance", "rounds", "inside a save", "lost", "wrong", "other"))
    for kind in (*KINDS, "all"):
        mine = [outcome for outcome in outcomes if kind in (outcome.plan.kind, "all")]
        if mine:
            counts = [sum(bool(getattr(o, what)) for o in mine) for what in ("inside", "lost", "wrong", "other")]
            print(row(kind, len(mine), *counts))


def _record(outcome: Outcome) -> dict[str, object]:
    return {**asdict(outcome), "problems": outcome.problems}


if __name__ == "__main__":
    sys.exit(main())
