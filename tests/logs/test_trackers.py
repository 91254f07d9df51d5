"""Trackers: on rank 0 alone, and without a trace in the process groups of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from distkit.config import load_config
from distkit.errors import ConfigError
from distkit.logs import RunLog, trackers
from distkit.logs.trackers import Tracker, hyper_parameters
from tests.pool import Pool


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {tag: [(e.step, round(e.value, 4)) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


@pytest.mark.parametrize("strategy", ["ddp", "single"])
def test_no_process_group_is_made_or_disturbed(tmp_path: Path, pool: Pool, strategy: str) -> None:
    """`single` stands for engines without a torch process group in a process that has torchrun's variables."""
    results = pool.run("tests.logs.cases:track", 2, run_dir=str(tmp_path), strategy=strategy, timeout=60)
    distributed = strategy == "ddp"
    for result in results:
        assert result == {
            "state": {},
            "group": distributed,
            "sum": 2.0 if distributed else 1.0,
            "env": {},
            "closed": None,
        }
    assert scalars(tmp_path / "tensorboard") == {"loss": [(2, 0.0)], "lrs/0": [(2, 0.1)], "lrs/1": [(2, 0.2)]}


def test_a_state_that_the_script_made_is_left_alone(tmp_path: Path) -> None:
    from accelerate.state import PartialState

    state = PartialState(cpu=True)
    try:
        before = dict(PartialState._shared_state)
        Tracker("tensorboard", tmp_path, project="p", parameters={}, step=0).close()
        assert dict(PartialState._shared_state) == before
        assert state.num_processes == 1
    finally:
        PartialState._reset_state()


def test_tensorboard_forgets_the_lost_part_of_a_killed_run(tmp_path: Path) -> None:
    first = Tracker("tensorboard", tmp_path, project="p", parameters={"optim.clip_norm": "null"}, step=0)
    for step in (1, 2, 3):
        first.log(step, {"loss": 1.0, "note": "no number"})
    first.close()
    second = Tracker("tensorboard", tmp_path, project="p", parameters={}, step=1)
    second.log(2, {"loss": 5.0})
    second.close()
    assert scalars(tmp_path / "tensorboard") == {"loss": [(1, 1.0), (2, 5.0)]}


def test_settings_become_numbers_or_texts() -> None:
    assert hyper_parameters({"a": None, "b": [1], "c": 1.5, "d": "x", "e": True, "f": {"g": 1}}) == {
        "a": "null",
        "b": "[1]",
        "c": 1.5,
        "d": "x",
        "e": True,
        "f": '{"g": 1}',
    }


@pytest.mark.parametrize("is_main", [True, False])
def test_a_missing_package_is_named_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_main: bool
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    config = load_config(overrides=["log.to=[console, wandb]"]).config
    with pytest.raises(ConfigError, match=r"package wandb is not installed\nHint: pip install wandb"):
        RunLog(config, tmp_path, is_main=is_main)


def test_a_tracker_that_can_not_start_is_an_error_of_distkit(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(ConfigError, match=r"log\.to has 'tensorboard', but it can't be started"):
        Tracker("tensorboard", tmp_path, project="p", parameters={}, step=0)


def test_wandb_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for step in (0, 1):
        tracker = Tracker("wandb", tmp_path, project="p", parameters={"seed": 1}, step=step)
        tracker.log(step + 1, {"loss": 1.0})
        tracker.close()
    names = {path.name.rsplit("-", 1)[1] for path in (tmp_path / "wandb").glob("offline-run-*")}
    assert names == {trackers._read_ids(tmp_path)["wandb"]}


def test_mlflow_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    for step in (0, 1):
        tracker = Tracker("mlflow", tmp_path, project="p", parameters={"seed": step, f"new{step}": 1}, step=step)
        tracker.log(step + 1, {"loss": 1.0, "eval/loss": 2.0})
        tracker.close()
    run = trackers._read_ids(tmp_path)["mlflow"]
    history = mlflow.MlflowClient().get_metric_history(run, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 1.0), (2, 1.0)]
    assert mlflow.get_run(run).data.params == {"seed": "0", "new0": "1", "new1": "1"}
