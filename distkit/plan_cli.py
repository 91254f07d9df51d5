"""`distkit plan`: what a run would be like, before it is started."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distkit.errors import UsageError

if TYPE_CHECKING:
    from distkit.advise.advisor import Advice, Task
    from distkit.advise.exact.report import Comparison
    from distkit.advise.hardware import Hardware
    from distkit.advise.script import Script

__all__ = ["plan"]


def plan(
    script: Annotated[
        str | None,
        typer.Argument(metavar="SCRIPT", help="A training script, whose model is taken.", show_default=False),
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="The script's own.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Train a few steps here; show what was predicted beside what was counted.")
    ] = False,
    layout: Annotated[
        bool, typer.Option("--layout", help="Show how tensor parallelism would split each layer of the model, and why.")
    ] = False,
    params: Annotated[
        str | None, typer.Option("--params", metavar="13B", help="Number of parameters; a typical shape is assumed.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME|FILE|MODULE:FUNCTION",
            help="A built-in model, a transformers config.json, or a function that builds one.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", metavar="N", help="Sequences in an optimizer step, in all; else the script's, or 256."),
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option("--accumulate", metavar="N", help="Micro batches in it; else the fewest that fit.")
    ] = None,
    sequence: Annotated[
        int | None, typer.Option("--seq", metavar="N", help="Tokens in a sequence; else the script's, or 2048.")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option("--optimizer", metavar="NAME", help="adamw, sgd, lion, ...; else the script's, or adamw."),
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", metavar="NAME", help="As the setting; else the script's, or bf16.")
    ] = None,
    recompute: Annotated[
        str, typer.Option("--recompute", metavar="auto|none|selective|full", help="Activation checkpointing.")
    ] = "auto",
    keeps_scores: Annotated[
        bool, typer.Option("--eager-attention", help="Attention keeps its scores: no fused kernel is used.")
    ] = False,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", metavar="4x8xA100-80G", help="Nodes x devices in each x device; or a YAML."),
    ] = None,
    here: Annotated[bool, typer.Option("--here", help="Instead of --hardware: this machine, as it is.")] = False,
    nproc: Annotated[
        str, typer.Option("--nproc", metavar="N|auto", help="Processes on this machine, for --here and --check.")
    ] = "auto",
    intra: Annotated[
        str | None,
        typer.Option("--intra", metavar="LINK", help="Inside of a node: nvlink, pcie4, or 300GB/s each way."),
    ] = None,
    inter: Annotated[
        str | None, typer.Option("--inter", metavar="SPEED", help="Of a node, to others: 200Gbps, 25GB/s.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option("--storage", metavar="SPEED", help="Of all ranks to where checkpoints go: 2GB/s."),
    ] = None,
    compress: Annotated[
        str, typer.Option("--compress", metavar="NAME", help="compress.method of strategies that have it: fp16, bf16.")
    ] = "none",
    calibrate: Annotated[
        Path | None, typer.Option("--calibrate", metavar="FILE", help="JSON with what was measured there.")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Only memory: the largest micro batch here, and the fewest nodes.")
    ] = False,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Also run what is recommended on tensors without data, and show what it really allocates."
        ),
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with pictures, too.")
    ] = None,
    framework: Annotated[
        str,
        typer.Option("--framework", metavar="NAME", help="What the code is written for: torch, horovod, tensorflow."),
    ] = "torch",
    file: Annotated[str | None, typer.Option("-c", "--config", metavar="FILE", help="YAML file with settings.")] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "-s", "--strategy", metavar="NAME", help="Way of training, for --check and --layout; a plan tries all."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting; can be given often.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show which strategy fits a model on some hardware, and what each would cost; or how a model would be split.

    The model is that of a script, of which one step is looked at without any values; or --model; or --params alone. Every
    strategy is worked out: memory by kind, traffic by link, time, and which to take.

    Options stand before the script; what follows it is the script's own.

    With --check the script takes three steps here, under the strategy that is set, and ends: what was predicted for them
    stands beside what was counted.

    With --layout the script runs in one process up to trainer.prepare(), shows how its model would be split, and ends
    there: no other process is started and nothing is trained.

    \b
    Examples:
      distkit plan --params 13B --batch 256 --accumulate 4 --hardware 4x8xA100-80G --intra nvlink --inter 200Gbps
      distkit plan --model llama3-8b --hardware 8xH100-80G --json
      distkit plan --model llama3-70b --hardware 1x8xH100-80G --seq 8192 --fit
      distkit plan --model resnet101 --batch 2048 --precision fp16 --hardware 4x8xV100-32G --inter 25Gbps
      distkit plan --hardware 2x8xA100-80G train.py --size large
      distkit plan --here train.py
      distkit plan --hardware 1x8xA100-80G --exact train.py
      distkit plan --check -s zero3 --nproc 2 train.py
      distkit plan --model llama-13b --hardware 4x8xA100-80G --accumulate 4 --exact
      distkit plan --layout --set parallel.tensor=4 train.py
    """
    chosen = [*(overrides or []), *([] if strategy is None else [f"strategy={json.dumps(strategy)}"])]
    if script is not None and (params is not None or model is not None):
        raise UsageError("--params and --model plan without a script", hint="leave the script out, or them")
    if params is not None and model is not None:
        raise UsageError("--params and --model were set, and each says how large the model is", hint="leave one out")
    if exact and (fit or check or layout):
        raise UsageError(
            "--exact runs what a plan recommends, and nothing else", hint="leave --fit, --check and --layout out"
        )
    if exact and script is not None and (optimizer is not None or sequence is not None):
        raise UsageError(
            f"--{'optimizer' if optimizer is not None else 'seq'} was set, and --exact runs the script, which has its own",
            hint="leave one of them out",
        )
    if (check or layout) and script is None:
        raise UsageError(
            f"--{'check' if check else 'layout'} wants a script",
            hint=f"distkit plan --{'check' if check else 'layout'} train.py",
        )
    if script is None and not (params or model):
        raise UsageError(
            "what to plan for was not said",
            hint="distkit plan --params 7B --hardware 8xA100-80G   or distkit plan --here train.py",
        )
    if script is None and (file or chosen):
        raise UsageError(
            "-c, -s and --set are settings of a script, and there is none",
            hint="distkit plan --params 7B --precision bf16 ...",
        )
    if strategy is not None and not (check or layout):
        raise UsageError(
            f"-s {strategy} was set, and a plan tries every strategy",
            hint=f"distkit plan --check -s {strategy} ...   measures one, or leave -s out",
        )
    code = None if script is None else _script(script, arguments or [], file, chosen)
    _refuse_behind(script, arguments or [], here or hardware is not None or check or layout)
    if code is not None and (check or layout):
        raise typer.Exit(_check(code, nproc, as_json) if check else _layout(code, as_json))
    where = _Where(hardware, here, nproc, {"intra": intra, "inter": inter, "storage": storage})
    wishes = {
        "batch": batch, "accumulate": accumulate, "sequence": sequence, "optimizer": optimizer, "precision": precision,
        "recompute": recompute, "fused_attention": not keeps_scores, "framework": framework, "compress": compress,
    }  # fmt: skip
    task, hard = _task(code, params, model, wishes, where)
    built = model if model is not None and ":" in model else None
    _advise(task, hard, calibrate, html, fit, as_json, exact, code or built)


def _refuse_behind(script: str | None, arguments: Sequence[str], where_is_said: bool) -> None:
    """Options of ours that stand behind the script were given to it."""
    behind = [word for word in arguments if word.partition("=")[0] in ("--hardware", "--here")]
    if behind and not where_is_said:
        raise UsageError(
            f"{behind[0]} stands behind {script}, so it is one of the script's own arguments",
            hint=f"distkit plan {behind[0]} ... {script}   options of distkit plan stand before the script",
        )


@dataclass(frozen=True)
class _Where:
    """The options that say for which hardware."""

    hardware: str | None
    here: bool
    nproc: str
    links: Mapping[str, str | None]

    def found(self) -> Hardware:
        from distkit.advise.hardware import parse_hardware
        from distkit.advise.here import this_machine

        if self.here and self.hardware is not None:
            raise UsageError("--here and --hardware were set, and each says where", hint="leave one out")
        if self.here:
            return this_machine(each=None if self.nproc == "auto" else _number("--nproc", self.nproc))
        if self.hardware is None:
            raise UsageError(
                "where it is to run was not said", hint="--hardware 4x8xA100-80G --inter 200Gbps, or --here"
            )
        return parse_hardware(self.hardware, **self.links)


def _number(flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{flag} was set to {text!r}; valid: auto, or a number from 1 on", hint=f"{flag} 2")
    return int(text)


def _script(path: str, arguments: list[str], file: str | None, overrides: list[str]) -> Script:
    """What is mistyped is said before the script runs."""
    from distkit.advise.script import Script
    from distkit.config import load_config

    if not Path(path).is_file():
        raise UsageError(f"{path} is no file", hint="distkit plan --hardware 8xA100-80G train.py")
    load_config(file=file, overrides=overrides)
    return Script(path, arguments, file, overrides)


def _task(
    script: Script | None, params: str | None, model: str | None, wishes: dict[str, Any], where: _Where
) -> tuple[Task, Hardware]:
    """What was typed; what wasn't is the script's, or a default."""
    from distkit.advise.advisor import Task
    from distkit.advise.models import model_named, model_of_size, parse_parameters
    from distkit.advise.script import task_of

    if script is not None:
        hardware = where.found()
        task, note = task_of(script, hardware, wishes)
        if note:
            _note(note)
        return task, hardware
    defaults = {"batch": 256, "sequence": 2048, "optimizer": "adamw", "precision": "bf16"}
    asked = wishes["sequence"]
    wishes = {name: defaults.get(name) if value is None else value for name, value in wishes.items()}
    if params is not None:
        shape = model_of_size(parse_parameters(params))
    elif model is not None and ":" in model:
        from distkit.advise.building import model_built_by

        built = model_built_by(model, sequence=wishes["sequence"], precision=wishes["precision"])
        if built.note:
            _note(built.note)
        if built.tokens is not None and asked not in (None, built.tokens):
            raise UsageError(
                f"--seq was set to {asked}, and the batch of {model} has {built.tokens} tokens in a sample",
                hint=f"--model {model}   without --seq",
            )
        shape, wishes["sequence"] = built.model, built.tokens or wishes["sequence"]
    else:
        shape = model_named(str(model))
    if shape.convolution is not None and asked is not None:
        raise UsageError(f"--seq was set, but {shape.name} takes images", hint=f"--model {shape.name}   without --seq")
    return Task(shape, **wishes), where.found()


def _note(line: str) -> None:
    """What a user should know, beside what is printed."""
    sys.stderr.write(f"distkit: {line}\n")


def _advise(
    task: Task,
    hardware: Hardware,
    calibrate: Path | None,
    html: Path | None,
    fit: bool,
    as_json: bool,
    exact: bool,
    subject: Script | str | None,
) -> None:
    """Every strategy for a model on some hardware."""
    from distkit.advise.advisor import advise
    from distkit.advise.report import show_advice
    from distkit.advise.timing import Calibration

    shares = None if calibrate is None else Calibration.read(calibrate)
    if fit:
        _fit(task, hardware, as_json)
        return
    found = advise(task, hardware, shares)
    compared = _exact(found, subject) if exact else []
    if html is not None:
        from distkit.advise.page import page_of

        try:
            html.write_text(page_of(found, compared), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--html {html} can't be written: {error.strerror}", hint="--html plan.html") from error
    if as_json:
        answer = found.as_dict()
        for one in compared:
            answer["candidates"][found.candidates.index(one.candidate)]["exact"] = one.as_dict()
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
        return
    from rich.console import Console

    show_advice(found, Console())
    if compared:
        from distkit.advise.exact.report import show_exact

        show_exact(compared, Console())


def _exact(found: Advice, subject: Script | str | None) -> list[Comparison]:
    from rich.console import Console

    from distkit.advise.exact.measure import exact_of_advice
    from distkit.advise.exact.report import compare

    with Console(stderr=True).status("") as status:
        return compare(found.task, exact_of_advice(found, status.update, subject, warn=_note))


def _fit(task: Task, hardware: Hardware, as_json: bool) -> None:
    from rich.console import Console

    from distkit.advise.fitting import fits_of
    from distkit.advise.report import show_fits

    found = fits_of(task, hardware)
    if as_json:
        sys.stdout.write(json.dumps({"fit": [one.as_dict() for one in found]}, indent=2) + "\n")
    else:
        show_fits(task, hardware, found, Console())


def _check(script: Script, nproc: str, as_json: bool) -> int:
    """A few real steps."""
    from rich.console import Console

    from distkit.advise.checking import check_script
    from distkit.advise.report import show_check
    from distkit.advise.script import look_at

    console = Console(stderr=True)
    with console.status("looking at the model and one step of it") as status:
        seen = look_at(script)
        status.update("training a few steps")
        line, found = check_script(script, seen, nproc=nproc)
    if as_json:
        sys.stdout.write(json.dumps({"run": line, "compared": [one.as_dict() for one in found]}, indent=2) + "\n")
    else:
        show_check(line, seen.note, found)
    return 0


def _layout(script: Script, as_json: bool) -> int:
    """The script in a process of its own, whose Trainer ends it when it has seen the model."""
    with tempfile.TemporaryDirectory(prefix="distkit-plan-") as folder:
        done = Path(folder) / "shown"
        status = script.preview("layout", folder, json=as_json, done=str(done)).wait()
        if status == 0 and not done.exists():
            raise UsageError(
                f"{script.path} ended without preparing a model",
                hint="model, optimizer, loader = trainer.prepare(model, optimizer, loader)",
            )
    return status
