"""Saving while training goes on: a true snapshot, one at a time, and no failure that is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from distkit.checkpoint import CheckpointReader, save
from distkit.checkpoint.snapshot import HostCopies
from distkit.errors import CheckpointError
from distkit.state import Region, Shard
from distkit.strategies.registry import strategy_class, strategy_names
from tests.checkpoint.states import layouts, manager, same, whole_state
from tests.pool import ROOT, Pool

CASES = "tests.checkpoint.background_cases:"
WORLDS = [(name, 1 if strategy_class(name).capabilities.processes == "one" else 2) for name in strategy_names()]


@pytest.mark.parametrize(("strategy", "processes"), WORLDS, ids=lambda v: str(v))
def test_checkpoints_are_those_of_blocking_saves(pool: Pool, tmp_path: Path, strategy: str, processes: int) -> None:
    """Files are written after later steps have changed the state, and still hold what it was."""
    runs = {
        background: pool.run(
            CASES + "train",
            processes,
            strategy=strategy,
            run_dir=str(tmp_path / str(background)),
            background=background,
        )[0]
        for background in (True, False)
    }
    assert runs[False]["there"] == [True] * 6
    assert runs[True]["there"] == [False] * 6
    assert len(runs[True]["checkpoints"]) == 6
    assert runs[True]["checkpoints"] == runs[False]["checkpoints"]
    first, second = list(runs[True]["checkpoints"].values())[:2]
    assert first != second


@pytest.mark.parametrize(("strategy", "processes"), [("single", 1), ("ddp", 2), ("horovod", 2), ("zero2", 2)])
def test_a_failure_is_raised_on_all_ranks_at_the_next_step(
    pool: Pool, tmp_path: Path, strategy: str, processes: int
) -> None:
    """K7: training goes on from it, and the run ends with its last checkpoint."""
    results = pool.run(CASES + "lose_the_folder", processes, strategy=strategy, run_dir=str(tmp_path))
    for result in results:
        assert result["raised"] == results[0]["raised"]
        ((step, text),) = result["raised"]
        assert step == 5
        assert "the checkpoint of step 4 was not written" in text
        assert str(tmp_path / "checkpoints") in text
        assert result["last"] == 6
        assert result["steps"] == ["step-00000002", "step-00000006"]


@pytest.mark.parametrize(("strategy", "processes"), [("single", 1), ("fsdp", 2)])
def test_the_last_one_is_tried_again_at_the_end(pool: Pool, tmp_path: Path, strategy: str, processes: int) -> None:
    results = pool.run(CASES + "fail_at_the_end", processes, strategy=strategy, run_dir=str(tmp_path))
    assert results == [["step-00000006"]] * processes


def test_the_state_may_change_as_soon_as_save_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer is held up until everything it was given has changed: tensors, hyper-parameters, generators."""
    gate, write = threading.Event(), save.write_tensors

    def gated(*arguments: Any, **options: Any) -> Any:
        gate.wait(30)
        return write(*arguments, **options)

    monkeypatch.setattr(save, "write_tensors", gated)
    state, expected = whole_state(), whole_state()
    saved_layouts = layouts(state)
    saved_layouts[0].groups[0]["lr"] = torch.tensor(0.5)
    trainer_state = {"step": 3, "table": torch.arange(3)}
    shards = [Shard(g, n, k, tuple(t.shape), Region.whole(t.shape), t) for (g, n, k), t in state.items()]
    checkpoints = manager(tmp_path)
    path = checkpoints.save(3, lambda: shards, saved_layouts, trainer_state, {}, wait=False)
    assert checkpoints.background.running
    assert not path.exists()
    for tensor in state.values():
        tensor.fill_(1)
    saved_layouts[0].groups[0]["lr"].fill_(9.0)
    trainer_state["table"].fill_(9)
    trainer_state["step"] = 4
    gate.set()
    assert checkpoints.background.wait() is None
    reader = CheckpointReader(path)
    for (group, name, kind), tensor in expected.items():
        assert same(reader.read(group, name, kind, Region.whole(tensor.shape)), tensor), (group, name, kind)
    assert reader.layouts()[0].groups[0]["lr"] == torch.tensor(0.5)
    assert reader.trainer_state()["step"] == 3
    assert reader.trainer_state()["table"].tolist() == [0, 1, 2]


def test_host_copies_are_used_again_and_never_stale() -> None:
    copies = HostCopies()

    def shard(tensor: torch.Tensor, name: str = "w") -> Shard:
        return Shard("model", name, "parameter", tuple(tensor.shape), Region.whole(tensor.shape), tensor)

    first = copies.take([shard(torch.ones(3)), shard(torch.ones(2), "v")])[0]
    again = copies.take([shard(torch.zeros(3))])[0]
    assert again[0].tensor.data_ptr() == first[0].tensor.data_ptr()
    assert again[0].tensor.tolist() == [0, 0, 0]
    other = copies.take([shard(torch.ones(3).double()), shard(torch.ones(2), "v")])[0]
    assert other[0].tensor.dtype == torch.float64
    with pytest.raises(CheckpointError, match="meta device"):
        copies.take([shard(torch.ones(3, device="meta"))])


def test_a_process_that_ends_by_an_exception_finishes_its_save(tmp_path: Path) -> None:
    """Without `with`, without close(): the file system had not answered yet when the script failed."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, torch, distkit
            from torch.utils.data import DataLoader
            from tests.checkpoint.background_cases import slow_files
            trainer = distkit.Trainer(run_dir=sys.argv[1], checkpoint={"every_steps": 2})
            net = torch.nn.Linear(3, 1)
            net, opt, loader = trainer.prepare(net, torch.optim.Adam(net.parameters()), DataLoader(torch.rand(8, 3)))
            with slow_files(0.3):
                for x in loader:
                    trainer.step(net(x).mean())
                    if trainer.global_step == 2:
                        raise RuntimeError("on purpose")
            """
        )
    )
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 1
    assert result.stderr.rstrip().endswith("RuntimeError: on purpose")
    assert CheckpointReader(tmp_path / "run" / "checkpoints" / "step-00000002").manifest.step == 2
