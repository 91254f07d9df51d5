#!/usr/bin/env python3
"""What does tensor parallelism split of models as they are, and what does it cost in traffic?

Each model is trained beside a whole one. Shown are the share of parameters that is split, the bytes of parameters on a rank
against the ideal (a rank's part of all), and the all-reduces of activations in a step against the fewest that Megatron's scheme
has: one for each attention and each MLP forward and as many backward, one for each lookup in a split embedding forward, one
for the head backward. Beside these travel numbers of the size of a few floats a token (the loss over parts of the classes), and
gradients of parameters inside of heads.

Examples:
  scripts/benchmarks/tensor_parallel.py
  scripts/benchmarks/tensor_parallel.py --models llama,t5 --processes 4 --json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from venv_of_checkout import ROOT, use_venv

sys.path.insert(0, str(ROOT))


def main() -> int:
    use_venv()
    arguments = parse_arguments()
    from tests.pool import Pool

    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(output=Path(folder) / "output.log")
        try:
            rows = [measure(pool, model, arguments) for model in arguments.models]
        finally:
            pool.close()
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows)
    return 0


def parse_arguments() -> argparse.Namespace:
    from tests.strategies.tensor_parallel.models import BLOCKS

    known = list(BLOCKS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=known, help="; ".join(known))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.models if name not in known]
    if unknown:
        parser.error(f"there is no model {unknown[0]!r}; there are: {', '.join(known)}")
    return arguments


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
