#!/usr/bin/env python3
"""How near are the advisor's predictions to what is counted? Every strategy, two models, 2 and 4 processes.

Each case is `distkit plan --check`: three real steps on this machine. Shown are the errors of the prediction, relative to what
was counted: model states (parameters, gradients, optimizer), the peak of a step, collectives, and what sockets carried.

Examples:
  scripts/benchmarks/predictions.py
  scripts/benchmarks/predictions.py --models llama --processes 4 --strategies zero3,fsdp,zero3+tensor
  scripts/benchmarks/predictions.py --json > predictions.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from venv_of_checkout import ROOT, use_venv

sys.path.insert(0, str(ROOT))

WITHIN = 0.02
"""Of model states and of collectives."""

MODELS = {
    "gpt": ("recipes/gpt/train.py", ("--layers", "6", "--width", "192")),
    "llama": ("scripts/benchmarks/llama_steps.py", ()),
}

CASES: dict[str, tuple[str, ...]] = {
    "single": ("strategy=single",),
    "dp": ("strategy=dp",),
    "ddp": ("strategy=ddp",),
    "horovod": ("strategy=horovod",),
    "fsdp": ("strategy=fsdp",),
    "hsdp": ("strategy=hsdp",),
    "zero1": ("strategy=zero1",),
    "zero2": ("strategy=zero2",),
    "zero3": ("strategy=zero3",),
    "ddp+accumulate": ("strategy=ddp", "batch.accumulate=2"),
    "horovod+accumulate": ("strategy=horovod", "batch.accumulate=2"),
    "fsdp+accumulate": ("strategy=fsdp", "batch.accumulate=2"),
    "zero1+accumulate": ("strategy=zero1", "batch.accumulate=2"),
    "zero2+accumulate": ("strategy=zero2", "batch.accumulate=2"),
    "zero3+accumulate": ("strategy=zero3", "batch.accumulate=2"),
    "fsdp+bf16": ("strategy=fsdp", "precision=bf16"),
    "zero1+bf16": ("strategy=zero1", "precision=bf16"),
    "zero3+bf16": ("strategy=zero3", "precision=bf16"),
    "fsdp+recompute": ("strategy=fsdp", "memory.activation_checkpointing=full"),
    "zero2+offload": ("strategy=zero2", "memory.offload=optimizer"),
    "zero3+offload": ("strategy=zero3", "memory.offload=params"),
    "ddp+tensor": ("strategy=ddp", "parallel.tensor=2"),
    "fsdp+tensor": ("strategy=fsdp", "parallel.tensor=2"),
    "zero1+tensor": ("strategy=zero1", "parallel.tensor=2"),
    "zero2+tensor": ("strategy=zero2", "parallel.tensor=2"),
    "zero3+tensor": ("strategy=zero3", "parallel.tensor=2"),
    "megatron-zero1": ("strategy=megatron-zero1", "parallel.tensor=2"),
    "megatron-zero2": ("strategy=megatron-zero2", "parallel.tensor=2"),
    "megatron-zero3": ("strategy=megatron-zero3", "parallel.tensor=2"),
}


def main() -> int:
    use_venv()
    arguments = parse_arguments()
    rows = []
    for model in arguments.models:
        for name in arguments.strategies:
            for processes in arguments.processes if name not in ("single", "dp") else (1,):
                row = {"model": model, "case": name, "processes": processes, **measure(model, name, processes)}
                rows.append(row)
                if not arguments.json:
                    show(row, first=len(rows) == 1)
    if arguments.json:
        print(json.dumps(rows, indent=1))
    return int(any(abs(row.get(what) or 0.0) > WITHIN for row in rows for what in ("model states", "collectives")))


def measure(model: str, name: str, processes: int) -> dict[str, float | None]:
    """Errors by kind."""
    from distkit.advise.checking import check_script
    from distkit.advise.script import Script, look_at

    path, words = MODELS[model]
    began = time.monotonic()
    script = Script(str(ROOT / path), words, None, CASES[name])
    _, found = check_script(script, look_at(script), nproc=str(processes))
    return {**{one.what: one.error for one in found}, "seconds": round(time.monotonic() - began, 1)}


def show(row: dict[str, object], *, first: bool) -> None:
    kinds = ("model states", "peak of a step", "collectives", "on the wire (gloo)")
    if first:
        print(f"{'model':<7}{'case':<20}{'ranks':>5}" + "".join(f"{kind:>20}" for kind in kinds))
    cells = ["-" if not isinstance(row.get(kind), float) else f"{row[kind]:+.2%}" for kind in kinds]
    print(
        f"{row['model']:<7}{row['case']:<20}{row['processes']:>5}" + "".join(f"{cell:>20}" for cell in cells),
        flush=True,
    )


def cases(text: str) -> list[str]:
    unknown = [name for name in text.split(",") if name not in CASES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    return text.split(",")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS), metavar="gpt,llama")
    parser.add_argument(
        "--processes", type=lambda text: [int(n) for n in text.split(",")], default=[2, 4], metavar="2,4"
    )
    parser.add_argument("--strategies", type=cases, default=list(CASES), metavar="NAMES", help=", ".join(CASES))
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
