"""Saves that fail: the error names file and cause, older checkpoints and the training state stay as they were (K7)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distkit.checkpoint import CheckpointReader
from distkit.errors import CheckpointError
from distkit.state import Region, Shard
from tests.checkpoint.states import manager, names_of, save, snapshot_of, whole_state

ROOT = Path(__file__).resolve().parents[2]


def big_state() -> dict[Any, torch.Tensor]:
    return {("model", "w", "parameter"): torch.zeros(800_000)}


def test_a_full_disk(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    state = whole_state()
    save(manager(folder, keep=1), 1, state=state)
    before, values = snapshot_of(folder), {key: tensor.clone() for key, tensor in state.items()}
    with pytest.raises(CheckpointError) as caught:
        save(manager(folder, keep=1), 2, state=big_state(), layouts=[])
    assert "model-00000.safetensors: No space left on device" in str(caught.value)
    assert "Hint: free space" in str(caught.value)
    assert snapshot_of(folder) == before
    assert names_of(list(folder.iterdir())) == ["step-00000001"]
    assert all(torch.equal(tensor, values[key]) for key, tensor in state.items())
    save(manager(folder, keep=1), 3, state=state)  # and goes on once there is space


def test_a_read_only_disk(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    save(manager(folder), 1)
    before = snapshot_of(folder)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match="Read-only file system") as caught:
        save(manager(folder), 2)
    assert str(folder) in str(caught.value)
    assert snapshot_of(folder) == before
    checkpoints = manager(folder, keep=1)
    checkpoints.clean_up()
    assert checkpoints.latest() == folder / "step-00000001"  # reading needs no writing


def test_everything_is_on_the_disk_before_the_folder_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a checkpoint must not have its name without its contents; the manifest is the last file."""
    happened: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recording_fsync(handle: int) -> None:
        happened.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        fsync(handle)

    def recording_rename(path: Path, target: Path) -> Path:
        happened.append(f"rename to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "rename", recording_rename)
    path = save(manager(tmp_path))
    files = {p.name for p in path.iterdir()}
    assert set(happened[: len(files)]) == files
    assert happened[len(files) - 1] == "manifest.json"
    assert happened[len(files)].startswith(".tmp-step-00000100-")
    assert happened[len(files) + 1 :] == ["rename to step-00000100", tmp_path.name]


def test_a_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"can't write .*file/checkpoints.*Not a directory"):
        save(manager(tmp_path / "file" / "checkpoints"))


def test_state_that_can_not_be_stored_is_found_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the Trainer's state\['schedulers'\]\[0\] is a builtins.object"):
        save(manager(tmp_path / "c"), trainer_state={"schedulers": [object()]})
    assert not (tmp_path / "c").exists()


def test_an_exception_of_the_engine_is_passed_on(tmp_path: Path) -> None:
    def shards() -> Iterator[Shard]:
        yield Shard("model", "w", "parameter", (1,), Region((0,), (1,)), torch.ones(1))
        raise RuntimeError("out of memory")

    with pytest.raises(CheckpointError, match="RuntimeError: out of memory") as caught:
        save(manager(tmp_path), shards=shards)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert list(tmp_path.iterdir()) == []


SAVING = """
import sys, torch
from pathlib import Path
from tests.checkpoint.states import manager, save
state = {("model", f"w{i}", "parameter"): torch.full((500_000,), float(i)) for i in range(8)}
checkpoints = manager(Path(sys.argv[1]), keep=2)
print("ready", flush=True)
for step in range(int(sys.argv[2]), 10**6):
    save(checkpoints, step, state=state, layouts=[])
"""


def test_killed_at_any_moment_of_a_save(tmp_path: Path) -> None:
    """K6: the newest complete one is there, and what is left of the other is cleaned up at the next start."""
    left_over = 0
    for round_number in range(3):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        checkpoints = manager(tmp_path)
        checkpoints.clean_up()
        assert [p for p in tmp_path.iterdir() if not p.name.startswith("step-")] == []
        before = checkpoints.latest()
        first = 1 if before is None else int(before.name[5:]) + 1
        process = subprocess.Popen(
            [sys.executable, "-c", SAVING, str(tmp_path), str(first)], stdout=subprocess.PIPE, env=environment
        )
        assert process.stdout is not None
        process.stdout.readline()
        until = time.monotonic() + 60
        while time.monotonic() < until and not (list(tmp_path.glob("step-*")) and list(tmp_path.glob(".tmp-*/model*"))):
            time.sleep(0.001)
        time.sleep(0.01 * round_number)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        left_over += any(p.name.startswith(".") for p in tmp_path.iterdir())
        found = manager(tmp_path).latest()
        assert found is not None
        reader = CheckpointReader(found)
        for i in range(8):
            assert torch.equal(
                reader.read("model", f"w{i}", "parameter", Region((0,), (500_000,))), torch.full((500_000,), float(i))
            )
    assert left_over > 0  # at least one was caught in the middle
