"""Reading a checkpoint: any box of any tensor, from whatever boxes it was written in."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from distkit.checkpoint.codec import decode, dtype_from_name
from distkit.checkpoint.format import (
    OPTIMIZER_TENSORS,
    TRAINER,
    TRAINER_TENSORS,
    Manifest,
    StoredTensor,
    parse_json,
    read_json_file,
)
from distkit.checkpoint.paths import is_local, to_path
from distkit.checkpoint.tensorfile import TensorFile
from distkit.errors import CheckpointError
from distkit.state import OptimizerLayout, Region, bare_name, clean_name
from distkit.strategies.modules import group_name

__all__ = ["CheckpointReader", "check_files", "check_sums"]

CHUNK = 4 << 20
SHOWN = 10
"""Names listed in a message before it says how many more there are."""


class CheckpointReader:
    """A checkpoint that is open for reading. Tensors and JSON only: no code of it is ever run.

    Args:
        path: Its folder.
        verify: ``fast`` compares file sizes, ``full`` checksums too.

    Raises:
        CheckpointError: It isn't a checkpoint, or is damaged; names file and cause.
    """

    def __init__(self, path: str | Path, verify: str = "full") -> None:
        self.path = to_path(path)
        self.manifest = Manifest.read(self.path)
        check_files(self.path, self.manifest)
        if verify == "full":
            check_sums(self.path, self.manifest, self.manifest.files)
        self._files: dict[str, TensorFile] = {}
        self._names = {group: _by_clean_name(names) for group, names in self.manifest.tensors.items()}
        self._aliases = self._alias_tables(self.manifest.aliases)

    def close(self) -> None:
        """Let go of the files."""
        self._files.clear()

    # -- what is in it ----------------------------------------------------------------------------------------------

    def groups(self) -> list[str]:
        """The groups that hold tensors: ``model``, ``optimizer`` ..."""
        return list(self.manifest.tensors)

    def names(self, group: str) -> list[str]:
        """Names of the tensors of a group, without wrappers' prefixes."""
        return [clean_name(name) for name in self.manifest.tensors.get(group, {})]

    def stored(self, group: str, name: str, kind: str) -> StoredTensor:
        """What the checkpoint knows of a tensor: dtype, shape and regions.

        Args:
            group: Like ``model``.
            name: Its name, an alias of it, or either with wrappers' prefixes.
            kind: Like ``parameter`` or ``exp_avg``.

        Raises:
            CheckpointError: There is none.
        """
        found = self._resolve(group, name)
        kinds = self.manifest.tensors[group][found] if found is not None else {}
        if kind in kinds:
            return kinds[kind]
        if group.startswith("model") and len(kinds) == 1:  # a parameter that became a buffer, or the other way round
            return next(iter(kinds.values()))
        raise CheckpointError(
            f"{self.path} has no {kind} of {name!r} in {group!r}",
            hint="load into the same model and optimizer as the run that wrote it",
        )

    def check_model(
        self, group: str, shapes: Mapping[str, Sequence[int]], aliases: Mapping[str, str] | None = None
    ) -> None:
        """Compare names and shapes with a model, before anything is loaded.

        Args:
            group: ``model``, ``model_1`` ...
            shapes: Whole shapes of its parameters and buffers, by name.
            aliases: Further names of tied parameters and the names in ``shapes``.

        Raises:
            CheckpointError: Lists what is missing, unexpected and of another shape.
        """
        self._adopt_aliases(group, aliases or {})
        used: set[str] = set()
        missing: list[str] = []
        other_shape: list[str] = []
        for name, shape in shapes.items():
            found = self._resolve(group, name)
            if found is None:
                missing.append(name)
                continue
            used.add(found)
            there = next(iter(self.manifest.tensors[group][found].values())).shape
            if there != tuple(shape):
                other_shape.append(f"{name} {list(there)} in the checkpoint, {list(shape)} in the model")
        unexpected = [n for n in self.manifest.tensors.get(group, {}) if n not in used]
        parts = [
            _listed("missing in the checkpoint", missing),
            _listed("unexpected in the checkpoint", unexpected),
            _listed("of another shape", other_shape),
        ]
        if any(parts):
            raise CheckpointError(
                f"{self.path} doesn't fit {group!r}:" + "".join(f"\n  {part}" for part in parts if part),
                hint="build the model as in the run that wrote it, or start afresh: --set checkpoint.resume=none",
            )

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self, group: str, name: str, kind: str, region: Region) -> torch.Tensor:
        """The values of a box, on the CPU, in the dtype in which they were written. Reads only the bytes it needs.

        Args:
            group: Like ``model``.
            name: As in :meth:`stored`.
            kind: Like ``parameter`` or ``exp_avg``.
            region: Which box.

        Returns:
            A tensor of ``region.shape`` that is the caller's own.

        Raises:
            CheckpointError: It isn't there, or a file is damaged.
        """
        stored = self.stored(group, name, kind)
        ends = [o + n for o, n in zip(region.offset, region.shape, strict=False)]
        if len(region.offset) != len(stored.shape) or any(e > n for e, n in zip(ends, stored.shape, strict=True)):
            raise CheckpointError(
                f"{self.path}: {group} {name} {kind} has shape {list(stored.shape)}; asked for {list(region.shape)} "
                f"from {list(region.offset)} on"
            )
        dtype = dtype_from_name(stored.dtype)
        sources = []
        for piece in stored.regions if region.numel else []:
            common = region.intersect(piece.region)
            if common is not None:
                file = self._file(piece.file)
                file.check(piece.key, dtype, piece.region.shape)  # before memory is taken on the manifest's word
                sources.append((file, piece, common))
        out = torch.empty(region.shape, dtype=dtype)
        for file, piece, common in sources:
            file.read_into(
                out[common.within(region)], piece.key, common.within(piece.region), whole=common == piece.region
            )
        return out

    def layouts(self) -> list[OptimizerLayout]:
        """Parameter groups and fields of each optimizer that was saved, in order."""
        decoded = decode(self.manifest.optimizers, self._companion(OPTIMIZER_TENSORS))
        layouts = []
        for index, entry in enumerate(decoded):
            names = self.manifest.tensors.get(group_name("optimizer", index), {})
            fields = {
                clean_name(name): {kind: tensor.shape for kind, tensor in kinds.items()}
                for name, kinds in names.items()
            }
            try:
                groups = [
                    {**group, "params": [clean_name(name) for name in group["params"]]} for group in entry["groups"]
                ]
                values = {clean_name(name): dict(value) for name, value in entry["values"].items()}
            except (TypeError, KeyError, AttributeError, ValueError) as error:
                raise CheckpointError(f"{self.path}: what the manifest says of optimizer {index} is garbled") from error
            layouts.append(OptimizerLayout(groups, fields, values))
        return layouts

    def trainer_state(self) -> dict[str, Any]:
        """What the Trainer remembered."""
        if TRAINER not in self.manifest.files:
            return {}
        path = self.path / TRAINER
        text = read_json_file(path)
        if hashlib.sha256(text).hexdigest() != self.manifest.files[TRAINER].sha256:
            raise CheckpointError(f"{path} is damaged: its checksum differs from the manifest's")
        state = decode(parse_json(text, str(path)), self._companion(TRAINER_TENSORS))
        if not isinstance(state, dict):
            raise CheckpointError(f"{path} is garbled: it holds no object")
        return state

    def metrics(self) -> dict[str, float]:
        """The last evaluation before it was written."""
        return {key: float(value) for key, value in decode(self.manifest.metrics, {}).items()}

    def rng(self, rank: int) -> dict[str, torch.Tensor]:
        """States of the random number generators of a rank; empty if the checkpoint was written by fewer ranks."""
        return self._companion(f"rng-{rank:05d}.safetensors")

    def _companion(self, name: str) -> dict[str, torch.Tensor]:
        if name not in self.manifest.files:
            return {}
        return self._file(name).get_all()

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(self.path / name)
        return self._files[name]

    # -- names ------------------------------------------------------------------------------------------------------

    def _resolve(self, group: str, name: str) -> str | None:
        """The name under which the manifest has it."""
        names = self._names.get(group, {})
        if name in self.manifest.tensors.get(group, {}):
            return name
        aliases = self._aliases.get("optimizer" if group.startswith("optimizer") else group, {})
        for shorter in (clean_name(name), bare_name(name)):
            found = names.get(shorter) or names.get(aliases.get(shorter, ""))
            if found is not None:
                return found
        return None

    def _adopt_aliases(self, group: str, aliases: Mapping[str, str]) -> None:
        """The model may call a tied weight by another of its names than the file does."""
        names = self._names.get(group, {})
        turned = {canonical: alias for alias, canonical in aliases.items() if canonical not in names and alias in names}
        for table_group, table in self._alias_tables({group: turned}).items():
            known = self._aliases.setdefault(table_group, {})
            for name, target in table.items():
                known.setdefault(name, target)

    @staticmethod
    def _alias_tables(aliases: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
        """By model group; under ``optimizer`` those of all models, as optimizers call their parameters."""
        tables: dict[str, dict[str, str]] = {"optimizer": {}}
        for group, table in aliases.items():
            clean = {clean_name(alias): clean_name(canonical) for alias, canonical in table.items()}
            tables[group] = clean
            prefix = "" if group == "model" else f"{group}."
            tables["optimizer"].update({prefix + alias: prefix + canonical for alias, canonical in clean.items()})
        return tables


def check_files(folder: Path, manifest: Manifest) -> None:
    """Each file is there, inside the folder, and of the right size.

    Raises:
        CheckpointError: Names the first that isn't, and why.
    """
    root = folder.resolve() if is_local(folder) else folder
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            found = path.stat()
        except OSError as error:
            why = "is missing" if isinstance(error, FileNotFoundError) else f"can't be read: {error.strerror}"
            raise _damaged(path, why) from error
        inside = not is_local(path) or path.resolve().parent == root  # an object store has no links
        if not inside or not stat.S_ISREG(found.st_mode):
            raise _damaged(path, "is not a plain file inside the folder")
        if found.st_size != entry.bytes:
            what = "is cut off" if found.st_size < entry.bytes else "is too long"
            raise _damaged(path, f"{what}: it has {found.st_size:,} bytes of {entry.bytes:,}")


def check_sums(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare checksums of these files.

    Raises:
        CheckpointError: Names the first that differs.
    """
    for name in names:
        path = folder / name
        digest = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
        except OSError as error:
            raise _damaged(path, f"can't be read: {error.strerror}") from error
        if digest.hexdigest() != manifest.files[name].sha256:
            raise _damaged(path, "was changed after it was written: its checksum differs from the manifest's")


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {why}",
        hint=f"resume from an older checkpoint: --set checkpoint.resume={path.parent.parent}/step-...",
    )


def _by_clean_name(names: Iterable[str]) -> dict[str, str]:
    """Stored names by what they may be asked for as: themselves, without wrappers' prefixes, without ``module.`` too.

    The more exact one wins where two become the same.
    """
    table: dict[str, str] = {}
    names = list(names)
    for shorten in (str, clean_name, bare_name):
        for name in names:
            table.setdefault(shorten(name), name)
    return table


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{what} ({len(names)}): {', '.join(names[:SHOWN])}{more}"
