"""A model that a function builds, looked at without values: ``module:function`` as ``distkit plan --model`` takes it.

The user's code runs in a process of its own: ``python -m distkit.advise.building module:function TOKENS``.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit.advise.models import ModelShape, model_of_facts
from distkit.errors import PlanError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["model_built_by"]

_BEGIN = "distkit-facts:"


def model_built_by(target: str, *, sequence: int, precision: str) -> ModelShape:
    """Build it on the meta device, and run it once on fake tokens if it takes any.

    Args:
        target: ``module:function``; the module is looked for in the working directory first.
        sequence: Tokens in a sequence.
        precision: As in the settings.

    Raises:
        PlanError: It can't be imported, or doesn't build a module; says why.
    """
    path = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, "-m", "distkit.advise.building", target, str(sequence), precision],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in ended.stdout.splitlines() if line.startswith(_BEGIN)]
    if ended.returncode or not said:
        last = (ended.stderr.strip() or ended.stdout.strip() or "it said nothing").splitlines()[-1]
        raise PlanError(
            f"--model {target} doesn't build a model: {last}",
            hint="--model package.module:function   a function without arguments that returns an nn.Module",
        )
    return model_of_facts(json.loads(said[-1].removeprefix(_BEGIN)), precision)


def _build(target: str) -> nn.Module:
    import torch
    from torch import nn

    from distkit.strategies.profiling import on_meta

    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    with on_meta(), torch.device("meta"):
        built = function()
    if not isinstance(built, nn.Module):
        raise TypeError(f"it returned a {type(built).__name__}, and no nn.Module")
    return built


def _facts(target: str, sequence: int, precision: str) -> dict[str, Any]:
    from distkit.strategies.profiling import model_facts, step_on_tokens

    model = _build(target)
    facts = model_facts(model)
    if not facts["trained"]:
        raise TypeError("none of its parameters is trained")
    facts["step"] = step_on_tokens(model, sequence, precision)
    return facts


def main() -> None:
    """The child process."""
    target, sequence, precision = sys.argv[1:]
    try:
        facts = _facts(target, int(sequence), precision)
    except Exception as error:  # the user's code may raise anything; the parent says it in one line
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise SystemExit(1) from None
    sys.stdout.write(f"{_BEGIN}{json.dumps(facts)}\n")


if __name__ == "__main__":
    main()
