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

    from distkit.advise.inputs import Inputs

__all__ = ["build", "model_built_by"]

_BEGIN = "distkit-facts:"


def model_built_by(target: str, *, sequence: int, precision: str) -> ModelShape:
    """Build it on the meta device, and run it once: on the inputs that the function returned beside it, or on fake tokens.

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
            hint="--model package.module:function   a function without arguments that returns an nn.Module, or it and a batch",
        )
    return model_of_facts(json.loads(said[-1].removeprefix(_BEGIN)), precision)


def build(target: str) -> tuple[nn.Module, Inputs]:
    """Call the function; the model's parameters are on the meta device.

    Args:
        target: ``module:function``.

    Returns:
        The model, and what goes into its forward.

    Raises:
        TypeError: It returned something else.
    """
    import torch
    from torch import nn

    from distkit.advise.inputs import inputs_of
    from distkit.strategies.profiling import on_meta

    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    with on_meta(), torch.device("meta"):
        built = function()
    built, example = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(built, nn.Module):
        raise TypeError(f"it returned a {type(built).__name__}, and no nn.Module")
    if not any(p.requires_grad for p in built.parameters()):
        raise TypeError("none of its parameters is trained")
    return built, inputs_of(example)


def _facts(target: str, sequence: int, precision: str) -> dict[str, Any]:
    from distkit.strategies.profiling import model_facts

    model, inputs = build(target)
    return {**model_facts(model), "step": _step(model, inputs, sequence, precision)}


def _step(model: nn.Module, inputs: Inputs, sequence: int, precision: str) -> dict[str, Any] | None:
    """One step without values; of one sample, where the function gave no example of the inputs.

    Returns:
        As :meth:`~distkit.strategies.profiling.StepCounter.finish`; None where the model takes something else.
    """
    import torch

    from distkit.advise.inputs import loss_of_outputs
    from distkit.strategies.profiling import StepCounter, materialize

    if not inputs.may_go_into(model):
        return None
    materialize(model, [])
    counter = StepCounter(model)
    counter.start()
    dtype = {"bf16": torch.bfloat16, "bf16-pure": torch.bfloat16, "fp16": torch.float16}.get(precision)
    try:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            found = inputs.of_size(inputs.samples, sequence).into(model)
        return counter.finish(loss_of_outputs(found))
    except Exception as error:  # a forward may raise anything when it is given what it doesn't take
        if inputs.given:
            raise TypeError(f"its forward doesn't take the batch beside it: {type(error).__name__}: {error}") from error
        return None


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
