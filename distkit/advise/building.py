"""A model that a function builds, looked at without values: ``module:function`` as ``distkit plan --model`` takes it.

The user's code runs in a process of its own: ``python -m distkit.advise.building module:function TOKENS``.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit.advise.models import ModelShape, model_of_facts
from distkit.errors import PlanError

if TYPE_CHECKING:
    from torch import nn

    from distkit.advise.inputs import Inputs

__all__ = ["BuiltModel", "build", "model_built_by"]

_BEGIN = "distkit-facts:"


@dataclass(frozen=True)
class BuiltModel:
    """What a function built.

    Args:
        model: Its sizes, and one step of it if that was looked at.
        tokens: In each sample of the batch that the function returned, 1 where there are none; None without a batch.
        note: Why no step was looked at; empty if one was.
    """

    model: ModelShape
    tokens: int | None
    note: str


def model_built_by(target: str, *, sequence: int, precision: str) -> BuiltModel:
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
        raise PlanError(f"--model {target} doesn't build a model: {last}", hint=_hint(target, last))
    facts = json.loads(said[-1].removeprefix(_BEGIN))
    return BuiltModel(model_of_facts(facts, precision), facts["tokens"], facts["note"])


def _hint(target: str, problem: str) -> str:
    module = target.partition(":")[0]
    if "No module named" in problem and module in problem:
        return (
            f"modules are looked for in this folder and in PYTHONPATH: {module} is {module.replace('.', '/')}.py there"
        )
    if "meta tensors" in problem:
        return "the function runs on the meta device: compute such numbers without tensors, or with device='cpu'"
    return "--model package.module:function   a function without arguments that returns an nn.Module, or it and a batch"


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
    facts, step = model_facts(model), None
    note = f"{target} returned no batch beside its model, which takes no tokens"
    if inputs.may_go_into(model):
        try:
            step, note = _step(model, inputs, sequence, precision), ""
        except Exception as error:  # a forward may raise anything when it is given what it doesn't take
            problem = f"{type(error).__name__}: {error}"
            if inputs.given:
                raise TypeError(f"its forward or loss can't be run on the batch beside it: {problem}") from error
            note = f"{target} returned no batch beside its model, which can't be run on tokens ({problem[:200]})"
    note += f", so a typical step of {sequence} tokens is assumed" if note else ""
    tokens = None if step is None or not inputs.given else max(1, step["tokens"] // step["samples"])
    return {**facts, "step": step, "tokens": tokens, "note": note}


def _step(model: nn.Module, inputs: Inputs, sequence: int, precision: str) -> dict[str, Any]:
    """One step without values; of one sample, where the function gave no example of the inputs.

    Returns:
        As :meth:`~distkit.strategies.profiling.StepCounter.finish`.
    """
    import torch

    from distkit.advise.inputs import loss_of_outputs
    from distkit.strategies.profiling import StepCounter, materialize

    materialize(model, [])
    counter = StepCounter(model)
    counter.start()
    dtype = {"bf16": torch.bfloat16, "bf16-pure": torch.bfloat16, "fp16": torch.float16}.get(precision)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        found = inputs.of_size(inputs.samples, sequence).into(model)
    return counter.finish(loss_of_outputs(found))


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
