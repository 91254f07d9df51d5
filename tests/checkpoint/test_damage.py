"""Damaged, foreign and hostile folders: an error that names file and cause, and no code of theirs is run."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distkit.checkpoint import CheckpointReader, format, inspect_checkpoint, list_checkpoints
from distkit.checkpoint.format import FileEntry
from distkit.checkpoint.tensorfile import write_tensors
from distkit.errors import CheckpointError
from distkit.state import Region
from tests.checkpoint.states import manager, save, whole_state


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(manager(tmp_path / "checkpoints"), rng={"torch": torch.get_rng_state()})


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def flip(file: Path, at: float = 0.7) -> None:
    data = bytearray(file.read_bytes())
    data[int(len(data) * at)] ^= 1
    file.write_bytes(data)


def empty(file: Path) -> None:
    os.truncate(file, 0)


FILES = [
    "model-00000.safetensors",
    "model_1-00000.safetensors",
    "optimizer-00000.safetensors",
    "rng-00000.safetensors",
    "trainer.json",
]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (truncate, "is cut off"),
        (empty, "is cut off"),
        (append, "is too long"),
        (flip, "checksum differs"),
        (Path.unlink, "is missing"),
    ],
)
def test_each_damage_is_named(path: Path, file: str, damage: Callable[[Path], None], cause: str) -> None:
    damage(path / file)
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(path)
    assert file in str(caught.value)
    assert cause in str(caught.value)
    assert "Hint:" in str(caught.value)


@pytest.mark.parametrize("file", FILES)
def test_fast_looks_at_sizes_only(path: Path, file: str) -> None:
    flip(path / file)
    reader = CheckpointReader(path, verify="fast")
    if file == "trainer.json":
        with pytest.raises(CheckpointError, match="checksum"):
            reader.trainer_state()
    truncate(path / file)
    with pytest.raises(CheckpointError, match="is cut off"):
        CheckpointReader(path, verify="fast")


def test_any_flipped_bit_of_the_manifest_is_noticed(path: Path) -> None:
    """It decides on everything: a learning rate with another digit must not pass."""
    file = path / "manifest.json"
    whole = file.read_bytes()
    for at in range(0, len(whole) - 3, 13):
        data = bytearray(whole)
        data[at] ^= 1
        file.write_bytes(data)
        with pytest.raises(CheckpointError):
            CheckpointReader(path, verify="fast")
    file.write_bytes(whole)
    CheckpointReader(path)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"", "is empty"),
        (b'{"format": "distkit-che', "cut off or garbled"),
        (b"\x80\x04\x95", "cut off or garbled"),
        (b"[" * 100_000, "garbled"),
        (b"[]", "not of a distkit checkpoint"),
        (b'{"weight_map": {}}', "not of a distkit checkpoint"),
        (b'{"format": "distkit-checkpoint", "schema": "1"}', "schema is '1'"),
        (b'{"format": "distkit-checkpoint", "schema": 2}', "reads schemas up to 1\nHint: pip install -U distkit"),
        (b'{"format": "distkit-checkpoint", "schema": 1}', "checksum differs"),
    ],
)
def test_manifests_that_are_none(path: Path, text: bytes, what: str) -> None:
    (path / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(path)
    assert what in str(caught.value)
    assert "manifest.json" in str(caught.value)
    assert inspect_checkpoint(path).problem is not None


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        CheckpointReader(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"it has no manifest\.json"):
        CheckpointReader(tmp_path)


def test_a_manifest_of_unbelievable_size_is_not_read(path: Path) -> None:
    os.truncate(path / "manifest.json", format.MAX_JSON_BYTES + 1)  # sparse: takes no space
    with pytest.raises(CheckpointError, match="are not read as JSON"):
        CheckpointReader(path)


# -- a stranger's checkpoint (K13) ------------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and seal it again, as one who means harm would."""
    file = path / "manifest.json"
    data = json.loads(file.read_bytes())
    change(data)
    del data["checksum"]
    head = json.dumps(data)[:-1].encode()
    file.write_bytes(head + b',\n"checksum": "' + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n')


def weight(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["tensors"]["model"]["wte.weight"]["parameter"]
    return found


def set_in(data: dict[str, Any], key: str, value: Any) -> None:
    data[key] = value


HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "file above": lambda d: d["files"].update({"../secret": {"bytes": 1, "sha256": ""}}),
    "absolute file": lambda d: d["files"].update({"/etc/passwd": {"bytes": 1, "sha256": ""}}),
    "file below": lambda d: d["files"].update({"a/b.safetensors": {"bytes": 1, "sha256": ""}}),
    "dots": lambda d: d["files"].update({"..": {"bytes": 1, "sha256": ""}}),
    "nul": lambda d: d["files"].update({"a\0b": {"bytes": 1, "sha256": ""}}),
    "negative size": lambda d: d["files"]["trainer.json"].update(bytes=-1),
    "size as text": lambda d: d["files"]["trainer.json"].update(bytes="1"),
    "region elsewhere": lambda d: weight(d)["regions"][0].update(file="../x.safetensors"),
    "region in json": lambda d: weight(d)["regions"][0].update(file="trainer.json"),
    "negative shape": lambda d: weight(d).update(shape=[-11, 6]),
    "shape of floats": lambda d: weight(d).update(shape=[11.0, 6]),
    "shape as text": lambda d: weight(d).update(shape="11"),
    "huge shape": lambda d: weight(d).update(shape=[10**15, 6]),
    "no regions": lambda d: weight(d).update(regions=[]),
    "regions twice": lambda d: weight(d)["regions"].extend(weight(d)["regions"]),
    "outside": lambda d: weight(d)["regions"][0].update(offset=[5, 0]),
    "group": lambda d: d["tensors"].update({"../m": {}}),
    "tensors a list": lambda d: set_in(d, "tensors", []),
    "step a list": lambda d: set_in(d, "step", [1]),
    "alias a number": lambda d: d["aliases"].update(model={"a": 1}),
    "no files": lambda d: d.pop("files"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_are_refused(path: Path, name: str) -> None:
    rewrite(path, HOSTILE[name])
    with pytest.raises(CheckpointError):
        CheckpointReader(path, verify="fast")
    assert list_checkpoints(path.parent)[0].problem is not None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda d: weight(d).update(dtype="load"), "dtype 'load'"),
        (lambda d: weight(d).update(dtype="float64"), "by the manifest F64"),
        (lambda d: weight(d)["regions"][0].update(key="absent"), "has no tensor 'absent'"),
        (
            lambda d: weight(d).update(
                shape=[10**12],
                regions=[{"file": "model-00000.safetensors", "key": "wte.weight", "offset": [0], "shape": [10**12]}],
            ),
            "by the manifest F32[1000000000000]",
        ),
    ],
)
def test_what_the_manifest_says_of_a_tensor_is_checked_before_memory_is_taken(
    path: Path, change: Callable[[dict[str, Any]], None], what: str
) -> None:
    rewrite(path, change)
    reader = CheckpointReader(path)
    shape = reader.stored("model", "wte.weight", "parameter").shape
    with pytest.raises(CheckpointError) as caught:
        reader.read("model", "wte.weight", "parameter", Region.whole(shape))
    assert what in str(caught.value)


@pytest.mark.parametrize(
    "optimizers",
    [[1], [{"groups": 3, "values": {}}], [{"groups": [{"params": 5}], "values": {}}], [{}], [{"$": "no such"}], [[]]],
    ids=str,
)
def test_garbled_optimizers_are_an_error(path: Path, optimizers: list[Any]) -> None:
    rewrite(path, lambda d: set_in(d, "optimizers", optimizers))
    with pytest.raises(CheckpointError):
        CheckpointReader(path).layouts()


def test_links_that_lead_outside_and_pipes_are_refused(path: Path, tmp_path: Path) -> None:
    file = path / "model-00000.safetensors"
    outside = tmp_path / "outside"
    file.rename(outside)
    file.symlink_to(outside)
    with pytest.raises(CheckpointError, match="not a plain file inside the folder"):
        CheckpointReader(path)
    file.unlink()
    os.mkfifo(file)  # opening it would wait for ever
    with pytest.raises(CheckpointError, match="not a plain file"):
        CheckpointReader(path)


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Path(os.environ["PAYLOAD_MARK"])),)


@pytest.mark.parametrize("where", [*FILES, "manifest.json", "extra.pkl", "pytorch_model.bin"])
def test_a_planted_pickle_is_never_run(path: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "executed"
    monkeypatch.setenv("PAYLOAD_MARK", str(mark))
    data = pickle.dumps(Payload())
    (path / where).write_bytes(data)
    if where in FILES:  # sealed again, so that it gets as far as it can
        entry = FileEntry(len(data), hashlib.sha256(data).hexdigest())
        rewrite(path, lambda d: d["files"].update({where: {"bytes": entry.bytes, "sha256": entry.sha256}}))
    try:
        reader = CheckpointReader(path)
        reader.trainer_state()
        reader.rng(0)
        for group, name, kind, tensor in reader.manifest.all_tensors():
            reader.read(group, name, kind, Region.whole(tensor.shape))
        reader.layouts()
        assert where not in (*FILES, "manifest.json")
    except CheckpointError:
        assert where in (*FILES, "manifest.json")
    assert not mark.exists()
    pickle.loads(data)
    assert mark.exists()  # the payload would have worked


def test_writer_agrees_with_the_library_on_sizes_and_sums(tmp_path: Path) -> None:
    file = tmp_path / "t.safetensors"
    entry = write_tensors(file, {"/".join(key): tensor for key, tensor in whole_state().items()})
    assert entry == FileEntry(file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest())
