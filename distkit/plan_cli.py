"""`distkit plan`: what a run would be like, before it is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distkit.errors import UsageError

if TYPE_CHECKING:
    from distkit.advise.advisor import Task
    from distkit.advise.hardware import Hardware

__all__ = ["plan"]


def plan(
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="The training script, for --layout.", show_default=False)
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="The script's own.")] = None,
    layout: Annotated[
        bool, typer.Option("--layout", help="Show how tensor parallelism would split each layer of the model, and why.")
    ] = False,
    params: Annotated[
        str | None, typer.Option("--params", metavar="13B", help="Number of parameters; a typical shape is assumed.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME|FILE", help="A built-in model, or a transformers config.json."),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Sequences in an optimizer step, in all.")] = 256,
    accumulate: Annotated[
        int | None, typer.Option("--accumulate", metavar="N", help="Micro batches in it; else the fewest that fit.")
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option("--seq", metavar="N", help="Tokens in a sequence; 2048 if not set.", show_default=False),
    ] = None,
    optimizer: Annotated[str, typer.Option("--optimizer", metavar="NAME", help="adamw, sgd, lion, ...")] = "adamw",
    precision: Annotated[str, typer.Option("--precision", metavar="NAME", help="As the setting.")] = "bf16",
    recompute: Annotated[
        str, typer.Option("--recompute", metavar="auto|none|full", help="Activation checkpointing.")
    ] = "auto",
    keeps_scores: Annotated[
        bool, typer.Option("--eager-attention", help="Attention keeps its scores: no fused kernel is used.")
    ] = False,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", metavar="4x8xA100-80G", help="Nodes x devices in each x device; or a YAML."),
    ] = None,
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
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with pictures, too.")
    ] = None,
    framework: Annotated[
        str,
        typer.Option("--framework", metavar="NAME", help="What the code is written for: torch, horovod, tensorflow."),
    ] = "torch",
    file: Annotated[str | None, typer.Option("-c", "--config", metavar="FILE", help="YAML file with settings.")] = None,
    strategy: Annotated[
        str | None, typer.Option("-s", "--strategy", metavar="NAME", help="Way of training, as for distkit-run.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting; can be given often.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show which strategy fits a model on some hardware, and what each would cost; or how a model would be split.

    With --params or --model every strategy is worked out: memory by kind, traffic by link, time, and which to take.

    With --layout the script runs in one process up to trainer.prepare(), shows how its model would be split, and ends
    there: no other process is started and nothing is trained.

    \b
    Examples:
      distkit plan --params 13B --batch 256 --accumulate 4 --hardware 4x8xA100-80G --intra nvlink --inter 200Gbps
      distkit plan --model llama3-8b --hardware 8xH100-80G --json
      distkit plan --model llama3-70b --hardware 1x8xH100-80G --seq 8192 --fit
      distkit plan --model resnet101 --batch 2048 --precision fp16 --hardware 4x8xV100-32G --inter 25Gbps
      distkit plan --layout --set parallel.tensor=4 train.py
      distkit plan --layout -c config.yaml --json train.py --size small
    """
    if params is not None or model is not None:
        if layout or script is not None:
            raise UsageError("--params and --model plan without a script", hint="leave the script and --layout out")
        task = {
            "batch": batch,
            "accumulate": accumulate,
            "sequence": sequence,
            "optimizer": optimizer,
            "precision": precision,
            "recompute": recompute,
            "fused_attention": not keeps_scores,
            "framework": framework,
            "compress": compress,
        }
        links = {"intra": intra, "inter": inter, "storage": storage}
        _advise(params, model, task, hardware, links, calibrate, html, fit, as_json)
        return
    if not layout or script is None:
        raise UsageError(
            "what to show was not said",
            hint=f"distkit plan --params 7B --hardware 8xA100-80G   or distkit plan --layout {script or 'train.py'}",
        )
    if not Path(script).is_file():
        raise UsageError(f"{script} is no file", hint="distkit plan --layout --set parallel.tensor=2 train.py")
    from distkit.config import load_config

    chosen = [*(overrides or []), *([] if strategy is None else [f"strategy={json.dumps(strategy)}"])]
    load_config(file=file, overrides=chosen)  # what is mistyped is said before the script runs
    raise typer.Exit(_run_script(script, arguments or [], file, chosen, as_json))


def _advise(
    params: str | None,
    model: str | None,
    task: dict[str, Any],
    hardware: str | None,
    links: dict[str, str | None],
    calibrate: Path | None,
    html: Path | None,
    fit: bool,
    as_json: bool,
) -> None:
    """Every strategy for a model on some hardware."""
    from distkit.advise.advisor import Task, advise
    from distkit.advise.hardware import parse_hardware
    from distkit.advise.models import model_named, model_of_size, parse_parameters
    from distkit.advise.report import show_advice
    from distkit.advise.timing import Calibration

    if params is not None and model is not None:
        raise UsageError("--params and --model were set, and each says how large the model is", hint="leave one out")
    if hardware is None:
        raise UsageError("where it is to run was not said", hint="--hardware 4x8xA100-80G --inter 200Gbps")
    shape = model_named(model) if model is not None else model_of_size(parse_parameters(str(params)))
    if shape.convolution is not None and task["sequence"] is not None:
        raise UsageError(f"--seq was set, but {shape.name} takes images", hint=f"--model {shape.name}   without --seq")
    task["sequence"] = 2048 if task["sequence"] is None else task["sequence"]
    shares = None if calibrate is None else Calibration.read(calibrate)
    where = parse_hardware(hardware, **links)
    if fit:
        _fit(Task(shape, **task), where, as_json)
        return
    found = advise(Task(shape, **task), where, shares)
    if html is not None:
        from distkit.advise.page import page_of

        try:
            html.write_text(page_of(found), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--html {html} can't be written: {error.strerror}", hint="--html plan.html") from error
    if as_json:
        sys.stdout.write(json.dumps(found.as_dict(), indent=2) + "\n")
        return
    from rich.console import Console

    show_advice(found, Console())


def _fit(task: Task, hardware: Hardware, as_json: bool) -> None:
    from rich.console import Console

    from distkit.advise.fitting import fits_of
    from distkit.advise.report import show_fits

    found = fits_of(task, hardware)
    if as_json:
        sys.stdout.write(json.dumps({"fit": [one.as_dict() for one in found]}, indent=2) + "\n")
    else:
        show_fits(task, hardware, found, Console())


def _run_script(script: str, arguments: list[str], file: str | None, overrides: list[str], as_json: bool) -> int:
    """The script in a process of its own, whose Trainer ends it when it has seen the model."""
    from distkit.config.launchline import VARIABLE, LaunchSettings

    with tempfile.TemporaryDirectory(prefix="distkit-plan-") as folder:
        done = Path(folder) / "shown"
        settings = LaunchSettings(
            config=None if file is None else str(Path(file).resolve()),
            overrides=[*overrides, f"run_dir={json.dumps(folder)}", "log.to=[]", "checkpoint.resume=none"],
            preview={"what": "layout", "json": as_json, "done": str(done)},
        )
        environment = {**os.environ, VARIABLE: settings.to_json()}
        ended = subprocess.run([sys.executable, script, *arguments], env=environment, check=False)
        if ended.returncode == 0 and not done.exists():
            raise UsageError(
                f"{script} ended without preparing a model",
                hint="model, optimizer, loader = trainer.prepare(model, optimizer, loader)",
            )
    return ended.returncode
