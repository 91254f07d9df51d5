"""The run's folder: one rank makes it, all know it, and no secret gets into it."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from distkit.config import load_config
from distkit.errors import ConfigError
from distkit.logs import choose_run_dir, create_run_folder
from distkit.world import World
from tests.pool import Pool

ALONE = World.alone()


def test_a_new_folder_is_named_by_script_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/somewhere/digits/train.py"])
    first, second = (choose_run_dir(load_config(), ALONE) for _ in range(2))
    assert re.fullmatch(r"digits-\d{8}-\d{6}", first.name)
    assert first.parent == tmp_path / "runs"
    assert first != second
    assert first.is_dir()
    assert second.is_dir()
    named = choose_run_dir(load_config(script={"name": "my run"}), ALONE)
    assert named.name.startswith("my-run-")


def test_a_named_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose_run_dir(load_config(script={"run_dir": "here"}), ALONE) == tmp_path / "here"
    assert choose_run_dir(load_config(script={"run_dir": "~/x"}), ALONE) == Path.home() / "x"


def test_all_ranks_get_the_same_new_folder(tmp_path: Path, pool: Pool) -> None:
    results = pool.run("tests.logs.cases:make_folder", 2, run_dir=None, directory=str(tmp_path))
    assert len({result["path"] for result in results}) == 1
    assert all(result["there"] for result in results)
    environment = json.loads((Path(results[0]["path"]) / "environment.json").read_text())
    assert [rank["rank"] for rank in environment["ranks"]] == [0, 1]
    assert environment["world"] == {
        "size": 2,
        "nodes": 1,
        "data": 2,
        "tensor": 1,
        "backend": "gloo",
        "launcher": "torchrun",
    }


def test_all_ranks_are_told_why_it_can_not_be_made(tmp_path: Path, pool: Pool) -> None:
    (tmp_path / "file").write_text("")
    results = pool.run("tests.logs.cases:make_folder", 2, run_dir="file/run", directory=str(tmp_path))
    for result in results:
        assert "can't be written: Not a directory" in result["error"]
        assert "Hint:" in result["error"]


def test_config_yaml_is_resolved_and_says_where_values_come_from(tmp_path: Path) -> None:
    file = tmp_path / "given.yaml"
    file.write_text("name: '1e3'\noptim: {clip_norm: 2}\nengine: {deepspeed: {zero_optimization: {stage: 1}}}\n")
    loaded = load_config(script={"seed": 7}, file=file, overrides=[f"run_dir={tmp_path / 'run'}", "engine.ddp.x=null"])
    create_run_folder(tmp_path / "run", loaded, ALONE)
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert "seed: 7  # script\n" in text
    assert f"  clip_norm: 2.0  # {file}\n" in text
    assert "precision: fp32\n" in text
    again = load_config(file=tmp_path / "run" / "config.yaml").config
    assert again.run_dir is None
    again.run_dir = loaded.config.run_dir
    assert again == loaded.config


def test_no_secret_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = [f"hidden{i}" for i in range(8)]
    monkeypatch.setenv("WANDB_API_KEY", secrets[0])
    monkeypatch.setenv("MY_VARIABLE", secrets[1])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    command = [
        "python",
        "train.py",
        "--hub-token",
        secrets[2],
        f"--password={secrets[3]}",
        f"http://me:{secrets[4]}@host/",
    ]
    monkeypatch.setattr(sys, "orig_argv", command)
    loaded = load_config(
        script={
            "engine.deepspeed": {"monitor": {"api_key": secrets[5], "urls": [f"s3://u:{secrets[6]}@h"]}},
            "engine.horovod": {"secret": [secrets[7]]},
        }
    )
    create_run_folder(tmp_path, loaded, ALONE)
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert [secret for secret in secrets if secret in written] == []
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["variables"]["OMP_NUM_THREADS"] == "3"
    assert environment["command"] == [
        "python",
        "train.py",
        "--hub-token",
        "***",
        "--password=***",
        "http://***:***@host/",
    ]


def test_environment_json_says_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    import torch

    script = tmp_path / "repository" / "train.py"
    script.parent.mkdir()
    script.write_text("")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(script.parent)]
    for line in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *line], check=True)
    monkeypatch.setattr(sys, "argv", [str(script)])
    create_run_folder(tmp_path / "run", load_config(), ALONE)
    found = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert re.fullmatch(r"[0-9a-f]{40}", found["git"]["commit"])
    assert found["git"]["changed"] is False
    assert found["packages"]["torch"] == torch.__version__
    assert found["cpu"]
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["ranks"] == [
        {
            **dict.fromkeys(("rank", "local_rank", "node_rank", "data", "tensor"), 0),
            "host": found["host"],
            "device": "cpu",
        }
    ]


def test_earlier_starts_are_kept(tmp_path: Path) -> None:
    for seed in (1, 1, 2, 3):
        create_run_folder(tmp_path, load_config(script={"seed": seed}), ALONE)
    seeds = [
        load_config(file=tmp_path / name).config.seed for name in ("config.1.yaml", "config.2.yaml", "config.yaml")
    ]
    assert seeds == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.1.yaml",
        "config.2.yaml",
        "config.yaml",
        "environment.json",
    ]


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="can't be written"):
        create_run_folder(tmp_path / "run", load_config(), ALONE)
