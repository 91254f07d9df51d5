"""Sources, precedence, origins, and errors that say what to type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distkit.config import Config, load_config
from distkit.config.launchline import VARIABLE, LaunchSettings
from distkit.config.schema import keys
from distkit.errors import ConfigError, LaunchError


def test_precedence_and_origins(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("seed: 2\nbatch: {size: 4}\noptim:\n  clip_norm: 2\n")
    loaded = load_config(
        script={"seed": 1, "batch.accumulate": 3, "max_steps": 7},
        file=file,
        overrides=["optim.clip_norm=3", "strategy=ddp"],
    )
    c = loaded.config
    assert (c.seed, c.batch.size, c.batch.accumulate, c.optim.clip_norm, c.max_steps, c.strategy) == (
        2,
        4,
        3,
        3.0,
        7,
        "ddp",
    )
    assert loaded.origins["seed"] == str(file)
    assert loaded.origins["batch.accumulate"] == "script"
    assert loaded.origins["optim.clip_norm"] == "launch line"
    assert loaded.origins["precision"] == "default"


def test_script_may_give_a_file_and_arguments(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("seed: 2\n")
    assert load_config(script=file, arguments={"seed": 1, "max_steps": 3}).config.seed == 2
    assert load_config(script={"seed": 5}, arguments={"max_steps": 3}).config.max_steps == 3


def test_engine_settings_pass_on(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "engine:\n  deepspeed:\n    zero_optimization: {stage: 3, nested: {a: [1, 2]}}\n  ddp: {bucket_cap_mb: 3}\n"
    )
    config = load_config(file=file, overrides=["engine.deepspeed.zero_optimization.stage=2"]).config
    assert config.engine.deepspeed == {"zero_optimization": {"stage": 2, "nested": {"a": [1, 2]}}}
    assert config.engine.ddp == {"bucket_cap_mb": 3}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.clip_nrom=1", "did you mean optim.clip_norm"),
        ("clip_norm=1", "did you mean optim.clip_norm"),
        ("engine.dpp.x=1", "did you mean engine.ddp"),
        ("optim.clip_norm=-1", "above 0"),
        ("optim.clip_norm=nan", "above 0"),
        ("batch.size=0", "least value is 1"),
        ("batch.size=2.5", "takes int"),
        ("batch.per=globl", "--set batch.per=global"),
        ("precision=b16", "--set precision=bf16"),
        ("batch=3", "a section"),
        ("seed", "not KEY=VALUE"),
        ("=3", "not KEY=VALUE"),
        ("seed=[", "can't be read"),
        ("log.to=[tensorbord]", r"log.to=\[tensorboard\]"),
        ("engine.ddp.find_unused_parameters=true", "contradicts"),
    ],
)
def test_wrong_settings_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_config(overrides=[override])
    assert "Hint:" in str(error.value) or "can't be read" in str(error.value)


def test_contradicting_batches_show_both() -> None:
    with pytest.raises(ConfigError, match="batch.size=8 and batch.micro=4"):
        load_config(overrides=["batch.size=8", "batch.micro=4"])


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1", "read as YAML"), ("- 1\n", "list"), ("seed: x\n", "takes int"), ("sede: 1\n", "seed")],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(file=file)
    assert str(file) in str(error.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file.*\n?.*Hint: distkit config schema"):
        load_config(file=tmp_path / "none.yaml")


def test_empty_file_and_null_sections_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("optim:\nengine:\n")
    assert load_config(file=file).config == Config()
    file.write_text("")
    assert load_config(file=file).config == Config()


def test_numbers_as_people_write_them() -> None:
    config = load_config(overrides=["optim.clip_norm=1e-4", "engine.ddp.name=east", "checkpoint.keep=null"]).config
    assert config.optim.clip_norm == 1e-4
    assert config.engine.ddp["name"] == "east"
    assert config.checkpoint.keep is None


def test_every_key_has_help() -> None:
    found = list(keys())
    assert len(found) > 40
    assert all(key.help.endswith(".") for key in found)
    assert all(key.default in key.choices for key in found if key.choices)


def test_launch_settings_travel() -> None:
    settings = LaunchSettings(config="/x.yaml", overrides=["a=1", "b=x y"], launcher="torchrun")
    assert LaunchSettings.from_env({VARIABLE: settings.to_json()}) == settings
    assert LaunchSettings.from_env({}) == LaunchSettings()
    for bad in ("{", "[1]", "3"):
        with pytest.raises(LaunchError, match="unset"):
            LaunchSettings.from_env({VARIABLE: bad})


def test_nested_and_dotted_script_settings_are_the_same() -> None:
    a: dict[str, Any] = {"optim": {"clip_norm": 1.0}, "checkpoint.keep": 2}
    b: dict[str, Any] = {"optim.clip_norm": 1.0, "checkpoint": {"keep": 2}}
    assert load_config(script=a).config == load_config(script=b).config
