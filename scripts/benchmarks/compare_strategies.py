#!/usr/bin/env python3
"""Do all strategies train alike? Trains the gpt recipe's model under each, and compares with one process, step by step.

The table shows, for each strategy and number of processes, the largest difference of the training loss from `single` and
the largest relative difference of the gradient norm. Three cases:

  plain        a global batch of 16 blocks, clipped to a norm of 1
  accumulate   the same batch in 4 micro batches
  weights      4 micro batches, and losses that are means over an uneven number of tokens in each

Examples:
  scripts/benchmarks/compare_strategies.py --strategies fsdp,hsdp
  scripts/benchmarks/compare_strategies.py --processes 4 --cases weights --steps 20
  scripts/benchmarks/compare_strategies.py --strategies zero3 --set memory.offload=optimizer --within 1e-5
  scripts/benchmarks/compare_strategies.py --set precision=bf16 --json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from venv_of_checkout import ROOT, use_venv

CASES = ("plain", "accumulate", "weights")
BATCH = 16


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    strategy: str
    processes: int
    case: str
    steps: int
    loss_difference: float
    norm_difference: float
    last_loss: float
    seconds: float


def main() -> int:
    use_venv()
    arguments = parse_arguments()
    if arguments.train is not None:
        train(arguments.train, arguments.layers, arguments.width)
        return 0
    rows: list[Row] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in arguments.cases:
            reference, _ = run(Path(folder, f"single-{case}"), "single", 1, case, arguments, arguments.settings_of_all)
            for strategy, processes in runs(arguments):
                name = f"{strategy} on {processes}, {case}"
                try:
                    log, seconds = run(
                        Path(folder, f"{strategy}-{processes}-{case}"),
                        strategy,
                        processes,
                        case,
                        arguments,
                        arguments.settings,
                    )
                except subprocess.CalledProcessError as error:
                    failed.append(name)
                    print(f"{name} failed with status {error.returncode}:\n{error.stderr[-2000:]}", file=sys.stderr)
                    continue
                rows.append(compare(strategy, processes, case, log, reference, seconds))
                if not arguments.json:
                    show(rows[-1], first=len(rows) == 1)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    too_far = [row for row in rows if arguments.within is not None and row.loss_difference > arguments.within]
    for row in too_far:
        print(
            f"{row.strategy} on {row.processes}, {row.case}: {row.loss_difference:.1e} from single, "
            f"more than --within {arguments.within:g}",
            file=sys.stderr,
        )
    return int(bool(failed or too_far))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", type=names, default=None, help="names with commas between; all installed ones")
    parser.add_argument("--processes", type=numbers, default=[2, 4], help="numbers with commas between")
    parser.add_argument("--cases", type=names, default=list(CASES), help="any of plain, accumulate, weights")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="for all but single"
    )
    parser.add_argument(
        "--set-all", dest="settings_of_all", action="append", default=[], metavar="KEY=VALUE", help="for single too"
    )
    parser.add_argument("--within", type=float, help="exit with status 1 if a loss is further from single's")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--train", help=argparse.SUPPRESS)  # what the started processes are given
    arguments = parser.parse_args()
    for case in arguments.cases:
        if case not in CASES:
            parser.error(f"--cases has {case!r}; there are: {', '.join(CASES)}")
    arguments.settings = [*arguments.settings_of_all, *arguments.settings]
    return arguments


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def numbers(text: str) -> list[int]:
    return [int(number) for number in names(text)]


def runs(arguments: argparse.Namespace) -> list[tuple[str, int]]:
    """Which strategies on how many processes; the ones whose engine isn't installed are left out with a word."""
    from distkit.strategies.checks import engine_installed
    from distkit.strategies.registry import strategy_class, strategy_names

    chosen = []
    for name in arguments.strategies or [name for name in strategy_names() if name != "single"]:
        strategy = strategy_class(name)
        if not engine_installed(strategy):
            print(f"{name}: {strategy.capabilities.engine} is not installed", file=sys.stderr)
        elif strategy.capabilities.processes == "one":
            chosen.append((name, 1))
        else:
            chosen += [(name, count) for count in arguments.processes]
    return chosen


def run(
    folder: Path, strategy: str, processes: int, case: str, arguments: argparse.Namespace, settings: list[str]
) -> tuple[dict[int, tuple[float, float]], float]:
    """Train through distkit-run.

    Returns:
        Loss and gradient norm by step; seconds in all.
    """
    micro = BATCH // processes // (1 if case == "plain" else 4)
    chosen = {
        "batch.per": "global",
        "batch.micro": max(1, micro),
        "max_steps": arguments.steps,
        "log.every_steps": 1,
        "log.to": "[jsonl]",
        "optim.clip_norm": 1.0,
        "optim.warmup_steps": 50,  # as in the recipe
        "checkpoint.at_end": "false",
        "device": "cpu",
    }
    if strategy == "single" and case == "plain":
        del chosen["batch.micro"]
    command = [sys.executable, "-c", "from distkit.launch.command import main; main()"]
    command += ["-s", strategy, "--nproc", str(processes), "--run-dir", str(folder)]
    for setting in [*(f"{key}={value}" for key, value in chosen.items()), *settings]:
        command += ["--set", setting]
    command += [__file__, "--train", case, "--layers", str(arguments.layers), "--width", str(arguments.width)]
    start = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "loss" in line}, seconds


def compare(
    strategy: str,
    processes: int,
    case: str,
    log: dict[int, tuple[float, float]],
    reference: dict[int, tuple[float, float]],
    seconds: float,
) -> Row:
    if log.keys() != reference.keys():
        raise SystemExit(f"{strategy} on {processes}, {case}: {len(log)} steps logged, and {len(reference)} by single")
    loss = max(abs(log[step][0] - reference[step][0]) for step in log)
    norm = max(abs(log[step][1] / reference[step][1] - 1) for step in log)
    return Row(strategy, processes, case, len(log), loss, norm, log[max(log)][0], round(seconds, 1))


def show(row: Row, *, first: bool) -> None:
    if first:
        print(
            f"{'strategy':<12}{'processes':>10}  {'case':<11}{'steps':>6}{'loss diff':>11}{'norm diff':>11}{'last loss':>11}{'seconds':>9}"
        )
    print(
        f"{row.strategy:<12}{row.processes:>10}  {row.case:<11}{row.steps:>6}{row.loss_difference:>11.1e}"
        f"{row.norm_difference:>11.1e}{row.last_loss:>11.4f}{row.seconds:>9.1f}",
        flush=True,
    )


def train(case: str, layers: int, width: int) -> None:
    """What each process does: the gpt recipe's loop, and a loss over some of the tokens in the case `weights`."""
    sys.path.insert(0, str(ROOT / "recipes" / "gpt"))
    import torch
    from torch.utils.data import DataLoader

    import distkit

    from data import Blocks, read_text
    from model import GPT, GPTConfig

    with distkit.Trainer() as trainer:
        model = GPT(GPTConfig(n_layer=layers, n_embd=width))
        optimizer = torch.optim.AdamW(model.decay_groups(0.1), lr=2e-3, betas=(0.9, 0.95))
        blocks = Blocks(read_text(200_000)[0], 64)
        loader = DataLoader(blocks, batch_size=BATCH, shuffle=True)
        model, optimizer, loader = trainer.prepare(model, optimizer, loader)
        for _ in trainer.epochs(100):
            for tokens, targets in loader:
                losses = torch.nn.functional.cross_entropy(model(tokens).transpose(1, 2), targets, reduction="none")
                if case == "weights":
                    # A block counts up to a length that its first byte says: 1 to 64 tokens.
                    counted = torch.arange(64) <= tokens[:, :1] % 64
                    trainer.step((losses * counted).sum() / counted.sum(), weight=counted.sum())
                else:
                    trainer.step(losses.mean())


if __name__ == "__main__":
    sys.exit(main())
