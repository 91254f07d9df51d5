"""Checkpoints behind fsspec: in the memory file system, and over `file://` by several processes."""

from __future__ import annotations

import json
import logging
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distkit.checkpoint import CheckpointReader, list_checkpoints
from distkit.checkpoint import save as saving
from distkit.checkpoint.object_store import ObjectStore
from distkit.checkpoint.paths import is_local, to_path
from distkit.checkpoint.remotefile import RangedFile
from distkit.checkpoint.store import LocalStore, open_store, this_host, this_process
from distkit.checkpoint.tensorfile import write_tensors
from distkit.errors import CheckpointError
from distkit.state import Region
from tests.checkpoint.states import manager, same, whole_state
from tests.checkpoint.states import save as save_small
from tests.checkpoint.test_manager import dead_pid
from tests.pool import Pool


@pytest.fixture
def bucket() -> Iterator[Path]:
    """A folder of the memory file system."""
    path = to_path(f"memory://{uuid.uuid4().hex}/run")
    yield path
    path.fs.store.clear()  # type: ignore[attr-defined]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_paths_and_urls() -> None:
    assert to_path("runs/first") == Path("runs/first")
    assert to_path(Path("runs")) == Path("runs")
    assert is_local(to_path("/tmp/x:y"))
    url = to_path("memory://bucket/run")
    assert not is_local(url)
    assert str(url / "step-00000001") == "memory://bucket/run/step-00000001"
    assert to_path(url) is url
    assert isinstance(open_store(url), ObjectStore)
    assert isinstance(open_store(Path("x")), LocalStore)


def test_urls_without_a_driver_say_what_to_install() -> None:
    with pytest.raises(CheckpointError) as caught:
        to_path("nosuch://bucket/run")
    assert "nosuch://" in str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        to_path("s3://me:sesame@bucket/run")  # s3fs is not among the tests' requirements
    assert "pip install 'distkit[s3]'" in str(caught.value)
    assert "sesame" not in str(caught.value)


def test_every_box_comes_back(bucket: Path) -> None:
    """The same bits as from a local folder, for whole tensors, rows, columns and inner boxes."""
    state = whole_state()
    reader = CheckpointReader(save_small(manager(bucket), 7, state=state))
    for (group, name, kind), tensor in state.items():
        assert same(reader.read(group, name, kind, Region.whole(tensor.shape)), tensor), name
    whole = state["model", "wte.weight", "parameter"]
    for region in (Region((2, 0), (3, 6)), Region((0, 1), (11, 2)), Region((4, 2), (1, 1)), Region((3, 1), (0, 2))):
        assert same(reader.read("model", "wte.weight", "parameter", region), whole[region.slices])
    assert reader.trainer_state() == {"step": 7}


def test_only_the_bytes_of_a_box_are_read(bucket: Path) -> None:
    path = bucket / "a.safetensors"
    tensor = torch.arange(100 * 50, dtype=torch.float32).reshape(100, 50)
    bucket.mkdir(parents=True)
    write_tensors(path, {"w": tensor, "other": torch.zeros(9)})
    file = RangedFile(path)
    asked: list[int] = []
    whole_bytes = file._bytes

    def counting(begin: int, end: int) -> bytes:
        asked.append(end - begin)
        return whole_bytes(begin, end)

    file._bytes = counting  # type: ignore[method-assign]
    assert torch.equal(file.get_slice("w")[10:12, :], tensor[10:12])
    assert torch.equal(file.get_slice("w")[20:22, 5:7], tensor[20:22, 5:7])
    assert asked == [2 * 50 * 4, (50 + 2) * 4]


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4 << 40]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "pickle", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]},
        {"shape": [4]},
        None,
    ],
)
def test_a_garbled_header_is_refused(bucket: Path, entry: Any) -> None:
    text = json.dumps({"w": entry}).encode()
    path = bucket / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(ValueError, match="header says of 'w'"):
        RangedFile(path)
    path.write_bytes((1 << 50).to_bytes(8, "little") + text)
    with pytest.raises(ValueError, match="longer than the file"):
        RangedFile(path)


def test_the_newest_retention_and_no_leftovers(bucket: Path) -> None:
    checkpoints = manager(bucket, keep=2)
    for step in (100, 200, 300, 150):
        save_small(checkpoints, step)
    assert names(bucket) == ["step-00000150", "step-00000300"]
    assert checkpoints.latest() == bucket / "step-00000150"
    assert not any(name.startswith("unfinished") for name in names(bucket / "step-00000150"))


def test_the_same_step_again_replaces_it_when_it_is_whole(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a checkpoint of the step at every moment, and the old one goes at the end."""
    checkpoints = manager(bucket)
    save_small(checkpoints, 1, state=whole_state(0))
    seen: list[list[int]] = []
    write = saving.write_bytes

    def looking(*arguments: Any) -> Any:
        seen.append([info.step for info in list_checkpoints(bucket) if info.problem is None])
        return write(*arguments)

    monkeypatch.setattr(saving, "write_bytes", looking)
    path = save_small(checkpoints, 1, state=whole_state(1))
    assert seen == [[1], [1]]
    assert names(bucket) == [path.name] == ["step-00000001.1"]
    expected = whole_state(1)["model", "wte.weight", "parameter"]
    assert same(CheckpointReader(path).read("model", "wte.weight", "parameter", Region.whole((11, 6))), expected)
    assert save_small(checkpoints, 1).name == "step-00000001"
    assert [info.step for info in list_checkpoints(bucket)] == [1]


def test_a_half_written_one_is_none_and_is_removed_when_its_writer_is_dead(bucket: Path) -> None:
    """K6 without rename: killed before the manifest, and between manifest and the end."""
    checkpoints = manager(bucket)
    whole = save_small(checkpoints, 1)
    for step, writer in ((2, f"{this_host()}-{dead_pid()}"), (3, this_process()), (4, "elsewhere-1")):
        half = bucket / f"step-{step:08d}"
        (half / f"unfinished-{writer}").write_bytes(b"")
        (half / "model-00000.safetensors").write_bytes(b"half")
    published = save_small(checkpoints, 5)
    (published / f"unfinished-{this_host()}-{dead_pid()}").write_bytes(b"")
    assert [info.step for info in list_checkpoints(bucket)] == [1, 5]
    assert checkpoints.latest() == published
    checkpoints.clean_up()
    assert names(bucket) == [whole.name, "step-00000003", "step-00000004", published.name]
    assert not any(name.startswith("unfinished") for name in names(published))


def test_only_unfinished_ones_start_afresh(bucket: Path) -> None:
    (bucket / "step-00000002" / "unfinished-elsewhere-1").write_bytes(b"")
    assert manager(bucket).latest() is None


def test_damage_is_found(bucket: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = manager(bucket)
    save_small(checkpoints, 1)
    for step, damage in ((2, lambda data: data[:-3]), (3, lambda data: data[:-1] + bytes([data[-1] ^ 1]))):
        file = save_small(checkpoints, step) / "optimizer-00000.safetensors"
        file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert checkpoints.latest() == bucket / "step-00000001"
    for text in ("step-00000002 is passed over", "is cut off", "checksum differs"):
        assert text in caplog.text


def test_a_failure_leaves_nothing(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = manager(bucket)
    save_small(checkpoints, 1)

    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_tensors", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save_small(checkpoints, 2)
    assert names(bucket) == ["step-00000001"]


def test_in_the_background(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = threading.Event(), saving.write_tensors

    def gated(*arguments: Any, **options: Any) -> Any:
        gate.wait(30)
        return write(*arguments, **options)

    monkeypatch.setattr(saving, "write_tensors", gated)
    checkpoints = manager(bucket)
    path = save_small(checkpoints, 1, wait=False)
    assert list_checkpoints(bucket) == []
    gate.set()
    assert checkpoints.background.wait() is None
    assert checkpoints.latest() == path


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_ranks_share_one_and_a_run_goes_on_from_it(pool: Pool, tmp_path: Path, strategy: str) -> None:
    """`file://` stands for any URL that several processes see."""
    url = f"file://{tmp_path}/store/run"
    same_run = {"strategy": strategy, "epochs": 3, "data": 29}
    settings = {"checkpoint.every_steps": 2, "checkpoint.dir": url, "checkpoint.keep": 2}
    case = "tests.contract.cases:train"
    whole = pool.run(case, 2, run_dir=str(tmp_path / "a"), settings={"checkpoint.every_steps": 2}, **same_run)
    part = pool.run(case, 2, run_dir=str(tmp_path / "b"), settings={**settings, "max_steps": 5}, **same_run)
    assert len(part[0]["log"]) == 5
    assert names(to_path(url)) == ["step-00000004", "step-00000005"]
    assert sorted(os.listdir(tmp_path / "store" / "run")) == ["step-00000004", "step-00000005"]
    assert not (tmp_path / "b" / "checkpoints").exists()
    rest = pool.run(case, 2, run_dir=str(tmp_path / "c"), settings=settings, **same_run)
    assert rest[0]["model"] == whole[0]["model"]
    moved = pool.run(
        "tests.contract.cases:resume_only",
        1,
        strategy="single",
        run_dir=str(tmp_path / "d"),
        source=f"{url}/step-00000009",
    )
    assert moved[0] == whole[0]["shards"]


def test_ranks_that_do_not_share_the_store_are_told(pool: Pool, tmp_path: Path) -> None:
    from tests.pool import WorkerError

    with pytest.raises(WorkerError, match=r"ranks don't see the same folder(.|\n)*checkpoint\.dir"):
        pool.run(
            "tests.contract.cases:train",
            2,
            strategy="ddp",
            run_dir=str(tmp_path),
            settings={"checkpoint.dir": "memory://bucket/run", "max_steps": 2},
        )
