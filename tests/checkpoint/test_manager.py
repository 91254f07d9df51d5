"""Which checkpoint is the newest, which are kept, what is cleaned up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distkit.checkpoint import list_checkpoints
from distkit.checkpoint.store import this_host, this_process
from distkit.errors import CheckpointError
from tests.checkpoint.states import manager, names_of, save, snapshot_of, whole_state


def steps(folder: Path) -> list[int]:
    return sorted(info.step for info in list_checkpoints(folder))


def test_no_folder_no_checkpoint(tmp_path: Path) -> None:
    assert manager(tmp_path / "none").latest() is None
    assert manager(tmp_path).latest() is None
    manager(tmp_path / "none").clean_up()
    with pytest.raises(CheckpointError, match="is not a folder"):
        manager(tmp_path).open(tmp_path / "nowhere")


def test_the_newest_is_the_last_written_and_not_the_highest_step(tmp_path: Path) -> None:
    """One who goes back to step 100 and trains another way wants to go on from there."""
    checkpoints = manager(tmp_path)
    for step in (100, 200, 300, 150):
        save(checkpoints, step)
    assert checkpoints.latest() == tmp_path / "step-00000150"
    assert [info.step for info in checkpoints.infos()] == [100, 200, 300, 150]
    manager(tmp_path, keep=2)._retain()
    assert steps(tmp_path) == [150, 300]


def test_a_folder_of_checkpoints_or_a_run_can_be_opened(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path / "run" / "checkpoints")
    path = save(checkpoints, 7)
    for given in (path, path.parent, path.parent.parent, str(path)):
        reader = checkpoints.open(given)
        assert (reader.path, reader.manifest.step) == (path, 7)
        assert reader.trainer_state() == {"step": 7}


def test_keep_and_keep_best(tmp_path: Path) -> None:
    losses = {1: 0.5, 2: float("nan"), 3: 0.2, 4: 0.9, 5: 0.3, 6: 0.8}
    for step, loss in losses.items():
        save(manager(tmp_path, keep=2, keep_best=2), step, metrics={"loss": loss, "accuracy": loss})
    assert steps(tmp_path) == [3, 5, 6]
    manager(tmp_path, keep=1, keep_best=1, best_metric="accuracy", best_mode="max")._retain()
    assert steps(tmp_path) == [6]
    save(manager(tmp_path, keep=1, keep_best=1, best_metric="absent"), 7)
    assert steps(tmp_path) == [7]
    assert names_of(list(tmp_path.iterdir())) == ["step-00000007"]


def test_keep_null_keeps_all(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(manager(tmp_path, keep=None), step)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_a_damaged_newest_is_passed_over_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = manager(tmp_path)
    save(checkpoints, 1)
    damaged = [save(checkpoints, step) for step in (2, 3, 4)]
    os.truncate(damaged[0] / "model-00000.safetensors", 10)
    (damaged[1] / "manifest.json").write_text("{")
    data = bytearray((damaged[2] / "optimizer-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (damaged[2] / "optimizer-00000.safetensors").write_bytes(data)
    assert checkpoints.latest() == tmp_path / "step-00000001"
    assert "step-00000004 is passed over" in caplog.text
    assert "checksum differs" in caplog.text
    assert manager(tmp_path, verify="fast").latest() == damaged[2]  # sizes are right


@pytest.mark.parametrize("text", ["{", None])
def test_a_manifest_that_can_not_be_read_keeps_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    """It says nothing of its place itself; it must not count as the oldest, of which nobody would hear."""
    checkpoints = manager(tmp_path)
    for step in (1, 2, 3):
        save(checkpoints, step)
    manifest = tmp_path / "step-00000003" / "manifest.json"
    manifest.write_text(text) if text is not None else manifest.unlink()
    assert [info.step for info in checkpoints.infos()] == [1, 2, 3]
    assert checkpoints.latest() == tmp_path / "step-00000002"
    assert "step-00000003 is passed over" in caplog.text


def test_if_all_are_damaged_nothing_starts_afresh_by_itself(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    (save(checkpoints, 1) / "trainer.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        checkpoints.latest()
    assert "trainer.json is missing" in str(caught.value)
    assert "--set checkpoint.resume=none" in str(caught.value)


def test_damaged_ones_do_not_count_and_are_not_removed(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep=2)
    for step in (1, 2):
        save(checkpoints, step)
    (tmp_path / "step-00000002" / "trainer.json").unlink()
    save(checkpoints, 3)
    assert steps(tmp_path) == [1, 2, 3]
    save(checkpoints, 4)
    assert steps(tmp_path) == [2, 3, 4]


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    save(checkpoints, 1, state=whole_state(0))
    before = snapshot_of(tmp_path)
    save(checkpoints, 1, state=whole_state(1))
    assert names_of(list(tmp_path.iterdir())) == ["step-00000001"]
    assert snapshot_of(tmp_path) != before
    assert checkpoints.latest() == tmp_path / "step-00000001"


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_only_what_is_surely_dead_is_cleaned_up(tmp_path: Path) -> None:
    save(manager(tmp_path), 1)
    now = time.time_ns()

    def unfinished(host: str, pid: int, hours: float = 0.0) -> Path:
        path = tmp_path / f".tmp-step-00000002-{host}-{pid}-{now + pid}"
        path.mkdir()
        (path / "model-00000.safetensors").write_bytes(b"x")
        old = time.time() - hours * 3600
        for each in (path / "model-00000.safetensors", path):
            os.utime(each, (old, old))
        return path

    gone = dead_pid()
    dead = [unfinished(this_host(), gone), unfinished("other-node.4", gone + 1, hours=25)]
    alive = [unfinished(this_host(), os.getpid()), unfinished("other-node.4", gone + 2, hours=1)]
    deleted = tmp_path / ".del-step-00000000-5"
    deleted.mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    manager(tmp_path).clean_up()
    assert not any(path.exists() for path in (*dead, deleted))
    assert all(path.exists() for path in alive)
    assert (tmp_path / "notes.txt").exists()
    assert steps(tmp_path) == [1]
    assert this_process() == f"{this_host()}-{os.getpid()}"


def test_a_checkpoint_that_was_being_replaced_is_put_back(tmp_path: Path) -> None:
    save(manager(tmp_path), 1)
    aside = tmp_path / ".old-step-00000001-77"
    (tmp_path / "step-00000001").rename(aside)  # killed here
    manager(tmp_path).clean_up()
    assert names_of(list(tmp_path.iterdir())) == ["step-00000001"]
    save(manager(tmp_path), 2)
    (tmp_path / ".old-step-00000002-78").mkdir()  # killed while it was deleted
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".old-step-00000001-79")  # killed just before
    manager(tmp_path).clean_up()
    assert names_of(list(tmp_path.iterdir())) == ["step-00000001", "step-00000002"]
