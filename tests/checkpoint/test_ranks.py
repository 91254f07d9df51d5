"""Several real ranks write and read one checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.checkpoint.states import manager, names_of, save, snapshot_of
from tests.pool import Pool

CASES = "tests.checkpoint.cases"


@pytest.mark.parametrize(("how", "other"), [("rows", "flat"), ("flat", "rows"), ("whole", "columns")])
def test_written_by_two_read_by_one_two_and_three(pool: Pool, tmp_path: Path, how: str, other: str) -> None:
    """K8, with no gathering: each rank writes its own files and reads only its own boxes."""
    paths = pool.run(f"{CASES}:write", 2, folder=str(tmp_path), how=how)
    assert paths == [str(tmp_path / "step-00000100")] * 2
    assert {"model-00000.safetensors", "model-00001.safetensors", "rng-00001.safetensors"} <= {
        p.name for p in Path(paths[0]).iterdir()
    }
    for ranks in (1, 2, 3):
        results = pool.run(f"{CASES}:read_back", ranks, folder=str(tmp_path), how=other)
        assert all(result["equal"] and result["written_by"] == 2 for result in results)
        assert sum(result["read"] for result in results) >= 10
        assert [result["rng"] for result in results][:2] == [{"torch": [rank] * 4} for rank in range(min(ranks, 2))]
        assert ranks < 3 or results[2]["rng"] == {}


def test_one_decision_on_what_is_kept(pool: Pool, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        pool.run(f"{CASES}:write", 2, folder=str(tmp_path), how="rows", step=step, keep=1, keep_best=1)
    assert names_of(list(tmp_path.iterdir())) == ["step-00000003"]


@pytest.mark.parametrize(
    ("how", "rank", "what"),
    [
        ("raises", 1, "rank 1: RuntimeError: lost the device"),
        ("sparse", 1, "rank 1: the tensor 'odd' (float32) is of the layout torch.sparse_coo"),
        ("twice", 1, "overlap"),
        ("state", 0, "rank 0: the Trainer's state['odd'] is a builtins.object"),
    ],
)
def test_a_failure_on_one_rank_is_the_same_error_on_all(
    pool: Pool, tmp_path: Path, how: str, rank: int, what: str
) -> None:
    save(manager(tmp_path), 100)
    before = snapshot_of(tmp_path)
    messages = pool.run(f"{CASES}:fail_on_one", 2, folder=str(tmp_path), rank=rank, how=how)
    assert messages[0] == messages[1]
    assert what in messages[0]
    assert snapshot_of(tmp_path) == before
    assert names_of(list(tmp_path.iterdir())) == ["step-00000100"]


def test_a_disk_that_is_full_on_one_rank(pool: Pool, small_disk: Path) -> None:
    save(manager(small_disk), 100)
    before = snapshot_of(small_disk)
    messages = pool.run(f"{CASES}:fail_on_one", 2, folder=str(small_disk), rank=1, how="big")
    assert messages[0] == messages[1]
    assert re.match(r"rank [01]: can't write .*-0000[01]\.safetensors: No space left on device", messages[0])
    assert snapshot_of(small_disk) == before


@pytest.mark.parametrize("file", ["model-00000.safetensors", "optimizer-00001.safetensors", "trainer.json"])
def test_each_rank_checks_a_share_and_all_see_the_damage(pool: Pool, tmp_path: Path, file: str) -> None:
    (path, _) = pool.run(f"{CASES}:write", 2, folder=str(tmp_path), how="rows")
    messages = pool.run(f"{CASES}:open_damaged", 2, folder=path, file=file)
    assert messages[0] == messages[1]
    assert f"{file} was changed after it was written" in messages[0]
