"""``distkit checkpoint``: look at checkpoints, verify and compare them, take the weights out, bring others' in."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distkit.commandline import print_json, print_table
from distkit.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from distkit.checkpoint import CheckpointInfo
    from distkit.checkpoint.foreign import Imported

__all__ = ["checkpoint_app"]

checkpoint_app = typer.Typer(
    rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Folder = Annotated[
    str, typer.Argument(metavar="PATH", help="A run's folder, its checkpoints, or one checkpoint; a URL of either.")
]

EXIT_DIFFERENT = 1
"""As diff: the command worked, and the answer is no."""


@checkpoint_app.callback()
def checkpoint() -> None:
    """Checkpoints: list, inspect, verify, compare, take the weights out, and import those of others.

    \b
    Examples:
      distkit checkpoint ls runs/first
      distkit checkpoint verify runs/first
      distkit checkpoint diff runs/first runs/second
      distkit checkpoint import old/global_step1000 runs/first
    """


@checkpoint_app.command("ls", short_help="The checkpoints of a run, the newest last.")
def ls(path: Folder, as_json: AsJson = False) -> None:
    """The checkpoints of a run: who wrote them, how large they are, and whether manifest and file sizes are right.

    \b
    Examples:
      distkit checkpoint ls runs/first
      distkit checkpoint ls runs/first --json
    """
    found = _infos(path)
    if as_json:
        print_json([_info_record(info) for info in found])
        return
    rows = [
        (
            info.path.name,
            str(info.epoch),
            f"{info.strategy} x {info.world_size}" if info.strategy else "",
            _size(info.bytes),
            info.time,
            ", ".join(f"{name} {value:.5g}" for name, value in info.metrics.items()),
            info.problem or "whole",
        )
        for info in found
    ]
    head = ("checkpoint", "epoch", "written by", "size", "time", "evaluated", "state")
    print_table(head, rows, dim=[info.problem is not None for info in found])


@checkpoint_app.command(short_help="What is in a checkpoint.")
def inspect(
    path: Folder,
    tensors: Annotated[bool, typer.Option("--tensors", help="Each tensor with its shape and dtype.")] = False,
    as_json: AsJson = False,
) -> None:
    """What is in a checkpoint (of a folder: the newest): groups, kinds of state, elements; no tensor is read.

    \b
    Examples:
      distkit checkpoint inspect runs/first
      distkit checkpoint inspect runs/first/checkpoints/step-00000100 --tensors
    """
    from distkit.checkpoint import inspect_checkpoint
    from distkit.checkpoint.format import Manifest

    found = _one(path)
    manifest = Manifest.read(found)
    listed: list[dict[str, Any]] = [
        {"group": group, "name": name, "kind": kind, "dtype": t.dtype, "shape": list(t.shape), "pieces": len(t.regions)}
        for group, name, kind, t in manifest.all_tensors()
    ]
    if as_json:
        print_json({**_info_record(inspect_checkpoint(found)), "torch": manifest.torch, "tensors": listed})
        return
    sys.stdout.write(
        f"{found}: step {manifest.step}, epoch {manifest.epoch}, written by {manifest.strategy} on {manifest.world_size} "
        f"processes, torch {manifest.torch}\n"
    )
    if tensors:
        rows = [(e["group"], e["name"], e["kind"], e["dtype"], str(e["shape"]), str(e["pieces"])) for e in listed]
        print_table(("group", "name", "kind", "dtype", "shape", "pieces"), rows)
        return
    sums: dict[tuple[str, str, str], list[int]] = {}
    for group, _, kind, tensor in manifest.all_tensors():
        entry = sums.setdefault((group, kind, tensor.dtype), [0, 0])
        entry[0] += 1
        entry[1] += _elements(tensor.shape)
    totals = [(*key, str(count), f"{elements:,}") for key, (count, elements) in sums.items()]
    print_table(("group", "kind", "dtype", "tensors", "elements"), totals)


@checkpoint_app.command(short_help="Compare every checksum; exit status 1 if one is damaged.")
def verify(path: Folder) -> None:
    """Read every byte and compare it with its checksum. Of a folder: all its checkpoints.

    \b
    Examples:
      distkit checkpoint verify runs/first
      distkit checkpoint verify runs/first/checkpoints/step-00000100
    """
    from distkit.checkpoint import CheckpointReader

    bad = 0
    for info in _infos(path):
        try:
            CheckpointReader(info.path, verify="full").close()
        except CheckpointError as error:
            bad += 1
            sys.stdout.write(f"{info.path.name}: DAMAGED: {error.message}\n")
        else:
            sys.stdout.write(f"{info.path.name}: whole, {_size(info.bytes)}\n")
    raise typer.Exit(EXIT_DIFFERENT if bad else 0)


@checkpoint_app.command(short_help="Two checkpoints, tensor by tensor; exit status 1 if they differ.")
def diff(
    first: Folder,
    second: Annotated[str, typer.Argument(metavar="PATH", help="The other one.")],
    within: Annotated[
        float, typer.Option("--within", metavar="X", min=0.0, help="Largest difference that counts as equal.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Compare parameters, buffers and optimizer states by value, whoever wrote them and on however many processes.

    \b
    Examples:
      distkit checkpoint diff runs/ddp runs/zero3
      distkit checkpoint diff runs/ddp/checkpoints/step-00000100 runs/zero3/checkpoints/step-00000100 --within 1e-6
    """
    from distkit.checkpoint import CheckpointReader
    from distkit.checkpoint.compare import compare_checkpoints

    readers = [CheckpointReader(_one(path), verify="fast") for path in (first, second)]
    found = list(compare_checkpoints(*readers))
    differ = [d for d in found if d.what != "equal" and not (d.what == "values" and d.largest <= within)]
    if as_json:
        print_json([vars(d) for d in differ])
    else:
        rows = [
            (d.group, d.name, d.kind, d.what, f"{d.largest:.3g}" if d.largest or d.what == "values" else "")
            for d in differ
        ]
        if rows:
            print_table(("group", "name", "kind", "differs in", "largest difference"), rows)
        sys.stdout.write(f"{len(found)} tensors compared, {len(differ)} differ\n")
    raise typer.Exit(EXIT_DIFFERENT if differ else 0)


@checkpoint_app.command(short_help="A model's weights as safetensors, in one file or several.")
def export(
    path: Folder,
    target: Annotated[
        Path, typer.Argument(metavar="FILE", help="The safetensors file to write; with --max-file-size a folder.")
    ],
    group: Annotated[str, typer.Option("--group", metavar="NAME", help="Which model: model, model_1 ...")] = "model",
    max_file_size: Annotated[
        str | None,
        typer.Option(
            "--max-file-size", metavar="SIZE", help="Several files of at most this size, like 5GB, and an index."
        ),
    ] = None,
) -> None:
    """The weights of a checkpoint (of a folder: the newest) in the model's own names, as plain torch and transformers load them.

    \b
    Examples:
      distkit checkpoint export runs/first model.safetensors
      distkit checkpoint export runs/first weights --max-file-size 5GB
    """
    most = _parse_size(max_file_size) if max_file_size is not None else None
    from distkit.checkpoint import CheckpointReader
    from distkit.checkpoint.export import split_by_size, write_sharded_weights, write_weights
    from distkit.state import Region

    reader = CheckpointReader(_one(path))
    models = [name for name in reader.groups() if name.startswith("model")]
    if group not in models:
        raise CheckpointError(
            f"--group was set to {group!r}, but {reader.path} has: {', '.join(models)}", hint=f"--group {models[0]}"
        )
    kinds = {name: kind for found, name, kind, _ in reader.manifest.all_tensors() if found == group}
    aliases = reader.manifest.aliases.get(group, {})

    def read(name: str) -> torch.Tensor:
        shape = reader.stored(group, name, kinds[name]).shape
        return reader.read(group, name, kinds[name], Region.whole(shape))

    if most is None:
        write_weights(target, {name: read(name) for name in kinds}, aliases)
        sys.stdout.write(f"{target}: {len(kinds)} tensors of {reader.path}\n")
        return
    sizes = [(name, reader.stored(group, name, kind).bytes) for name, kind in kinds.items()]
    files = write_sharded_weights(target, split_by_size(sizes, most), read, aliases)
    sys.stdout.write(f"{target}: {len(kinds)} tensors of {reader.path} in {len(files)} files\n")


@checkpoint_app.command("import", short_help="Go on from a checkpoint of DeepSpeed, FSDP, Accelerate or Lightning.")
def import_(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Its file or folder.")],
    destination: Annotated[str, typer.Argument(metavar="DESTINATION", help="The folder of the new run, or its URL.")],
    origin: Annotated[
        str,
        typer.Option("--from", metavar="KIND", help="auto, deepspeed, dcp, accelerate, lightning or torch."),
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODULE:FUNCTION",
            help="Your function that builds the model, or (model, optimizer): for names that the files don't tell.",
        ),
    ] = None,
    strip_prefix: Annotated[
        str | None, typer.Option("--strip-prefix", metavar="PREFIX", help="Take this off names, like model.")
    ] = None,
    epoch: Annotated[
        int | None, typer.Option("--epoch", metavar="N", min=0, help="Go on at the beginning of this epoch.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn a checkpoint of DeepSpeed, torch.distributed.checkpoint (FSDP), Accelerate, Lightning or torch.save into the
    first checkpoint of a run, optimizer state included. No code that the files name is run.

    \b
    Examples:
      distkit checkpoint import old/checkpoints runs/first
      distkit checkpoint import last.ckpt runs/first --strip-prefix model.
      distkit checkpoint import old/checkpoint_3 runs/first --model train:build
    """
    from distkit.checkpoint.foreign import import_checkpoint

    done = import_checkpoint(source, destination, origin=origin, model=model, strip_prefix=strip_prefix, epoch=epoch)
    if as_json:
        print_json({**vars(done), "path": str(done.path)})
        return
    sys.stdout.write("\n".join(_import_lines(source, destination, done)) + "\n")


def _import_lines(source: Path, destination: str, done: Imported) -> list[str]:
    """What was found, taken and left, and how to go on."""
    plural = "es" if done.world_size != 1 else ""
    lines = [
        f"found:  {source}: {done.origin}, step {done.step}, {done.world_size} process{plural}",
        f"taken:  {done.parameters} parameters, {done.buffers} buffers"
        + "".join(f", {alias} tied to {name}" for alias, name in done.ties.items()),
    ]
    for number, optimizer in enumerate(done.optimizers):
        kinds = ", ".join(optimizer["fields"]) or "none"
        lines.append(
            f"        optimizer {number}: state of {optimizer['parameters']} parameters ({kinds}), "
            f"{optimizer['groups']} parameter groups"
        )
    if done.schedulers:
        lines.append(f"        {done.schedulers} learning rate scheduler{'s' if done.schedulers != 1 else ''}")
    lines.append(f"left:   {', '.join(done.left)}")
    lines += [f"note:   {note}" for note in done.notes]
    lines.append(f"wrote:  {done.path}")
    lines.append(f"go on:  distkit-run --run-dir {destination} ... begins epoch {done.epoch} at its first sample")
    return lines


def _infos(given: str) -> list[CheckpointInfo]:
    """Of a checkpoint itself, of a folder of them, or of a run's folder.

    Raises:
        CheckpointError: There is none.
    """
    from distkit.checkpoint import inspect_checkpoint, list_checkpoints
    from distkit.checkpoint.format import MANIFEST, STEP_FOLDER
    from distkit.checkpoint.paths import to_path

    path = to_path(given)
    if STEP_FOLDER.fullmatch(path.resolve().name) or (path / MANIFEST).exists():
        return [inspect_checkpoint(path)]
    found = list_checkpoints(path) or list_checkpoints(path / "checkpoints")
    if not found:
        raise CheckpointError(
            f"{given!r} was given, but there is no checkpoint in it" if path.exists() else f"{given!r} isn't there",
            hint="give a run's folder, like runs/first, or a checkpoint in it, like runs/first/checkpoints/step-00000100",
        )
    return found


def _one(path: str) -> Path:
    """The checkpoint itself, or the newest whole one of a folder."""
    found = _infos(path)
    whole = [info for info in found if info.problem is None]
    if not whole:
        raise CheckpointError(
            f"no checkpoint in {path} is whole: {found[-1].problem}", hint=f"distkit checkpoint ls {path}"
        )
    return whole[-1].path


def _info_record(info: CheckpointInfo) -> dict[str, Any]:
    return {**vars(info), "path": str(info.path)}


def _elements(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"


def _parse_size(text: str) -> int:
    """``5GB``, ``500 MB``, ``1GiB`` or plain bytes."""
    units = {"": 1, "B": 1} | {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}
    units |= {f"{p}IB": 1024**n for n, p in enumerate("KMGT", 1)}
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in units or float(match[1]) <= 0:
        raise CheckpointError(f"--max-file-size was set to {text!r}, which is no size", hint="--max-file-size 5GB")
    return int(float(match[1]) * units[match[2].upper()])
