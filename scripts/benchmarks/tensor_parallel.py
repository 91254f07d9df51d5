#!/usr/bin/env python3
"""What does tensor parallelism split of models as they are, and what does it cost in traffic?

Each model is trained beside a whole one. Shown are the share of parameters that is split, the bytes of parameters on a rank
against the ideal (a rank's part of all), and the all-reduces of activations in a step against the fewest that Megatron's scheme
has: one for each attention and each MLP forward and as many backward, one for each lookup in a split embedding forward, one
for the head backward. Beside these travel numbers of the size of a few floats a token (the loss over parts of the classes), and
gradients of parameters inside of heads.

With --strategies the models are trained through the Trainer on 4 processes as 2 x 2 instead: 20 losses and the gradient of
every parameter, put together from all ranks, against one process.

Examples:
  scripts/benchmarks/tensor_parallel.py
  scripts/benchmarks/tensor_parallel.py --strategies fsdp,zero1,zero2,zero3
  scripts/benchmarks/tensor_parallel.py --models llama,t5 --processes 4 --json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from venv_of_checkout import ROOT, use_venv

sys.path.insert(0, str(ROOT))

WITHIN = 1e-5
"""Of losses, relative where they are above 1, and of gradients, relative to the largest value of each."""


def main() -> int:
    use_venv()
    arguments = parse_arguments()
    from tests.pool import Pool

    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(output=Path(folder) / "output.log")
        try:
            if arguments.strategies:
                rows = list(under_engines(pool, Path(folder), arguments))
            else:
                rows = [measure(pool, model, arguments) for model in arguments.models]
        finally:
            pool.close()
    if arguments.json:
        print(json.dumps(rows, indent=1))
    elif not arguments.strategies:
        show(rows)
    return int(
        any(row.get("loss_difference", 0) > WITHIN or row.get("gradient_difference", 0) > WITHIN for row in rows)
    )


def parse_arguments() -> argparse.Namespace:
    from tests.strategies.tensor_parallel.models import BLOCKS

    known = list(BLOCKS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=known, help="; ".join(known))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--strategies",
        type=lambda text: text.split(","),
        help="train under these on 2 x 2 processes, such as fsdp,zero3",
    )
    parser.add_argument("--sequence", action="store_true", help="with --strategies: parallel.sequence=true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.models if name not in known]
    if unknown:
        parser.error(f"there is no model {unknown[0]!r}; there are: {', '.join(known)}")
    return arguments


def under_engines(pool: Any, folder: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every model under every strategy."""
    from tests.strategies.tensor_parallel.engines import compare

    if not arguments.json:
        print(f"{'model':<24}{'strategy':<16}{'loss':>10}{'gradient':>10}  of")
    for model in arguments.models:
        for strategy in arguments.strategies:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                found = compare(pool, model, strategy, Path(own), steps=arguments.steps, sequence=arguments.sequence)
            if not arguments.json:
                line = f"{model:<24}{strategy:<16}{found.losses:>10.1e}{found.gradients:>10.1e}  {found.worst}"
                print(line, flush=True)
            yield {
                "model": model,
                "strategy": strategy,
                "loss_difference": found.losses,
                "gradient_difference": found.gradients,
                "parameter": found.worst,
                "parameters": found.parameters,
            }


def measure(pool: Any, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One model on all ranks: the worst rank's figures."""
    from tests.strategies.tensor_parallel.models import BLOCKS, SECOND_INPUTS

    case = "tests.strategies.tensor_parallel.cases:against_whole"
    ranks = pool.run(case, arguments.processes, model=model, steps=arguments.steps)
    first = ranks[0]
    return {
        "model": model,
        "processes": arguments.processes,
        "split": round(first["share"], 4),
        "bytes": max(rank["bytes"] for rank in ranks),
        "ideal_bytes": first["whole_bytes"] // arguments.processes,
        "forward": first["forward"]["all_reduce"],
        "fewest_forward": BLOCKS[model] + first["lookups"],
        "backward": first["backward"]["all_reduce"],
        "fewest_backward": BLOCKS[model] + first["heads"] + SECOND_INPUTS.get(model, 0),
        "loss_difference": max(rank["loss"] for rank in ranks),
        "gradient_difference": max(max(rank["gradients"].values()) for rank in ranks),
    }


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'model':<24}{'split':>7}{'bytes a rank':>14}{'of ideal':>10}{'forward':>9}{'fewest':>8}"
        f"{'backward':>10}{'fewest':>8}{'loss':>10}{'gradient':>10}"
    )
    for row in rows:
        print(
            f"{row['model']:<24}{row['split']:>7.1%}{row['bytes']:>14,}{row['bytes'] / row['ideal_bytes']:>10.2f}"
            f"{row['forward']:>9}{row['fewest_forward']:>8}{row['backward']:>10}{row['fewest_backward']:>8}"
            f"{row['loss_difference']:>10.1e}{row['gradient_difference']:>10.1e}"
        )


if __name__ == "__main__":
    sys.exit(main())
