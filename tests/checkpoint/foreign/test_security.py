"""A stranger's checkpoint: a pickle that would run code, planted in every file of each kind of folder in turn."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from distkit.checkpoint.foreign import import_checkpoint
from distkit.errors import CheckpointError
from tests.checkpoint.foreign.conftest import Origins

BUILD = "tests.checkpoint.foreign.origins:build"
SOURCES = ("zero0", "zero2", "zero3", "dcp", "dcp-flat", "accelerate", "accelerate-bin", "accelerate-fsdp", "accelerate-fsdp-full", "torch", "lightning")  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Payload:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def bare_pickle(path: Path, mark: Path) -> bytes:
    return pickle.dumps({"module": Payload(mark), "state_dict": Payload(mark)})


def old_pickle(path: Path, mark: Path) -> bytes:
    return pickle.dumps(Payload(mark), protocol=0)


def torch_file(path: Path, mark: Path) -> bytes:
    """A zip of torch.save with a payload beside a good tensor."""
    data = io.BytesIO()
    torch.save({"module": {"a": torch.ones(2)}, "model": {"a": torch.ones(2)}, "x": Payload(mark)}, data)
    return data.getvalue()


def legacy_torch_file(path: Path, mark: Path) -> bytes:
    data = io.BytesIO()
    torch.save({"model": {"a": torch.ones(2)}, "x": Payload(mark)}, data, _use_new_zipfile_serialization=False)
    return data.getvalue()


def inside(path: Path, mark: Path) -> bytes:
    """The file as it was, with the payload among its values, if torch or pickle wrote it."""
    if path.name == ".metadata":
        found = pickle.loads(path.read_bytes())
        found.planner_data["more"] = Payload(mark)
        return pickle.dumps(found)
    if zipfile.is_zipfile(path) and not path.name.endswith(".distcp"):
        found = torch.load(path, weights_only=False, mmap=False)
        target = found if isinstance(found, dict) else {"it": found}
        target["more"] = Payload(mark)
        data = io.BytesIO()
        torch.save(target, data)
        return data.getvalue()
    return torch_file(path, mark)


def files(folder: Path) -> Iterator[Path]:
    """What belongs to the checkpoint; DeepSpeed's scripts are never run, and are among them."""
    yield from sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "truth.pt")


def attempt(source: Path, run: Path) -> str:
    try:
        import_checkpoint(source, run, model=BUILD)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("plant", [bare_pickle, old_pickle, torch_file, legacy_torch_file, inside])
@pytest.mark.parametrize("kind", SOURCES)
def test_no_payload_runs(kind: str, plant: Callable[[Path, Path], bytes], origins: Origins, tmp_path: Path) -> None:
    made, mark = origins[kind], tmp_path / "pwned"
    for number, original in enumerate(files(made.folder)):
        copy = tmp_path / str(number)
        shutil.copytree(made.folder, copy)
        planted = copy / original.relative_to(made.folder)
        planted.write_bytes(plant(original, mark))
        source = copy / "last.ckpt" if (copy / "last.ckpt").exists() else copy
        said = attempt(source, tmp_path / f"run-{number}")
        assert not mark.exists(), f"{original.name} ran code"
        # Of stage 3 only rank 0's model file is opened where nothing is frozen.
        others = original.name.endswith("model_states.pt") and original.name.startswith("zero_pp_rank_1")
        unneeded = original.suffix == ".py" or original.name.startswith("random_states") or others
        assert bool(said) != unneeded, f"{original.name}: {said!r}"
        if said:
            assert not (tmp_path / f"run-{number}" / "checkpoints").exists()
            assert planted.name in said or original.name == "latest"
        if said and plant in (torch_file, inside) and original.suffix not in (".safetensors", ".distcp", ""):
            assert "posix.mkdir" in said and "Hint:" in said
        shutil.rmtree(copy)


def test_the_payload_works(tmp_path: Path) -> None:
    """Else the tests above would be worth nothing."""
    for number, plant in enumerate((bare_pickle, old_pickle, torch_file, legacy_torch_file)):
        (tmp_path / "file").write_bytes(plant(tmp_path / "file", tmp_path / f"mark-{number}"))
        with suppress(Exception):  # what comes behind the payload is no checkpoint
            torch.load(tmp_path / "file", weights_only=False)
        assert (tmp_path / f"mark-{number}").exists()


@pytest.mark.parametrize("kind", ["dcp", "dcp-flat", "accelerate-fsdp"])
def test_no_payload_in_an_item_runs(kind: str, origins: Origins, tmp_path: Path) -> None:
    """Tensors and values in a .distcp are archives of their own: one of each sort is replaced, and the index follows."""
    mark = tmp_path / "pwned"
    folder = "optimizer_0" if kind == "accelerate-fsdp" else "."
    for number, end in enumerate(("exp_avg", "step", "lr", "betas")):
        copy = tmp_path / str(number)
        shutil.copytree(origins[kind].folder, copy)
        index = pickle.loads((copy / folder / ".metadata").read_bytes())
        place = next(place for key, place in index.storage_data.items() if key.fqn.endswith("." + end))
        data = copy / folder / place.relative_path
        planted = torch_file(data, mark)
        place.offset, place.length = data.stat().st_size, len(planted)
        with data.open("ab") as file:
            file.write(planted)
        (copy / folder / ".metadata").write_bytes(pickle.dumps(index))
        said = attempt(copy, tmp_path / "run")
        assert not mark.exists()
        assert "posix.mkdir" in said and data.name in said and "Hint:" in said


def test_classes_allowed_by_the_process_stay_out(tmp_path: Path) -> None:
    """What a script allowed for its own torch.load isn't allowed here, and is as before afterwards."""
    mark = tmp_path / "mark"
    torch.save({"model": {"a": torch.ones(2)}, "x": Payload(mark)}, tmp_path / "file.pt")
    with torch.serialization.safe_globals([os.mkdir]):
        said = attempt(tmp_path / "file.pt", tmp_path / "run")
        assert os.mkdir in torch.serialization.get_safe_globals()
    assert not mark.exists() and "posix.mkdir" in said
    assert os.mkdir not in torch.serialization.get_safe_globals()


@pytest.mark.parametrize("place", ["../secret", "/etc/passwd", "sub/file", ".metadata", ""])
def test_an_index_that_points_outside(place: str, origins: Origins, tmp_path: Path) -> None:
    shutil.copytree(origins["dcp"].folder, tmp_path / "old")
    index = pickle.loads((tmp_path / "old" / ".metadata").read_bytes())
    key = next(key for key in index.storage_data if key.fqn == "model.wte.weight")
    index.storage_data[key].relative_path = place
    (tmp_path / "old" / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="missing or outside of the folder"):
        import_checkpoint(tmp_path / "old", tmp_path / "run")


def test_a_tag_that_points_outside(origins: Origins, tmp_path: Path) -> None:
    shutil.copytree(origins["zero2"].folder, tmp_path / "old")
    for tag in ("../old/global_step3", str(tmp_path / "old" / "global_step3"), "none", ""):
        (tmp_path / "old" / "latest").write_text(tag)
        with pytest.raises(CheckpointError, match="no such folder beside it"):
            import_checkpoint(tmp_path / "old", tmp_path / "run")
