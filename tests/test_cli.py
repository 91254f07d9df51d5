"""The command distkit, as people type it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distkit import __version__, cli
from distkit.config import Config, load_config
from distkit.config.schema import keys
from distkit.strategies.registry import strategy_names


@pytest.fixture
def distkit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command line in this process: exit status, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["distkit", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def help_of(app: Any, *path: str) -> list[tuple[str, ...]]:
    """All commands that there are, as words."""
    import typer

    group = typer.main.get_command(app)
    found: list[tuple[str, ...]] = []

    def walk(command: Any, words: tuple[str, ...]) -> None:
        found.append(words)
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, (*words, name))

    walk(group, ())
    return found


@pytest.mark.parametrize("words", help_of(cli.app), ids=" ".join)
def test_every_command_has_help_with_an_example(distkit: Any, words: tuple[str, ...]) -> None:
    status, out, _ = distkit(*words, "--help")
    assert status == 0
    assert "Examples:" in out
    assert " ".join(("distkit", *words)) in out.partition("Examples:")[2]


def test_version_and_the_console_script(distkit: Any) -> None:
    assert distkit("--version")[:2] == (0, f"distkit {__version__}\n")
    done = subprocess.run([sys.executable, "-m", "distkit.cli", "--version"], capture_output=True, text=True)
    assert done.stdout == f"distkit {__version__}\n"


def test_config_show_as_json(distkit: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("seed: 3\nengine: {deepspeed: {token: abc}}\n")
    status, out, _ = distkit("config", "show", "-c", str(file), "--set", "optim.clip_norm=1", "--json")
    assert status == 0
    shown = json.loads(out)
    assert shown["config"]["optim"]["clip_norm"] == 1.0
    assert shown["config"]["seed"] == 3
    assert shown["config"]["engine"]["deepspeed"] == {"token": "***"}
    assert set(shown["origins"]) == {key.name for key in keys()}
    origins = [shown["origins"][name] for name in ("optim.clip_norm", "seed", "precision")]
    assert origins == ["launch line", str(file), "default"]


def test_config_show_as_a_table(distkit: Any) -> None:
    status, out, _ = distkit("config", "show", "-s", "ddp", "--set", "strategy=dp", "--set", "name=a b")
    assert status == 0
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert rows["strategy"] == ["ddp", "launch", "line"]
    assert rows["name"] == ["a", "b", "launch", "line"]
    assert rows["optim.clip_norm"] == ["null", "default"]
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("config", "show", "--set", "optim.clip_nrom=1"), "Hint: did you mean optim.clip_norm?"),
        (("config", "show", "-s", "dddp"), "Hint: --strategy ddp"),
        (("config", "show", "-c", "nowhere.yaml"), "no such file"),
        (("config", "show", "-s", "single", "--set", "parallel.tensor=2"), "Hint: --set parallel.tensor=1"),
        (("config", "shwo"), "No such command"),
        (("strategies", "--jsn"), "No such option"),
    ],
)
def test_errors_are_told_without_a_traceback(distkit: Any, arguments: tuple[str, ...], message: str) -> None:
    status, out, err = distkit(*arguments)
    assert status == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""


def test_config_schema_is_a_config_file(distkit: Any, tmp_path: Path) -> None:
    status, out, _ = distkit("config", "schema")
    assert status == 0
    file = tmp_path / "all.yaml"
    file.write_text(out)
    loaded = load_config(file=file)
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {str(file)}
    words = " ".join(line.strip().removeprefix("# ") for line in out.splitlines())
    assert [key.name for key in keys() if key.help not in words] == []
    assert max(map(len, out.splitlines())) <= 120


def test_config_schema_as_json(distkit: Any) -> None:
    shown = json.loads(distkit("config", "schema", "--json")[1])
    assert [key["name"] for key in shown] == [key.name for key in keys()]
    precision = next(key for key in shown if key["name"] == "precision")
    assert precision["choices"] == ["fp32", "bf16", "fp16", "bf16-pure"]
    assert (precision["type"], precision["default"]) == ("str", "fp32")


def test_strategies(distkit: Any) -> None:
    records = json.loads(distkit("strategies", "--json")[1])
    assert [record["name"] for record in records] == strategy_names()
    ddp = next(record for record in records if record["name"] == "ddp")
    assert ddp["installed"] is True
    assert ddp["precisions"] == ["fp32", "bf16", "fp16", "bf16-pure"]
    assert all(record["installed"] or record["install"] for record in records)
    status, out, _ = distkit("strategies")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines() if line.split()[:1] and line.split()[0] in strategy_names()]


def test_an_engine_that_is_not_installed_is_shown_with_its_install_line(
    distkit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distkit.strategies import registry
    from distkit.strategies.base import Capabilities
    from distkit.strategies.ddp import DDPStrategy

    class Missing(DDPStrategy):
        name = "missing"
        capabilities = Capabilities(summary="not here", engine="no_such_engine", install="pip install no-such-engine")

    monkeypatch.setitem(registry.BUILT_IN, "missing", f"{__name__}:Missing")
    monkeypatch.setattr(sys.modules[__name__], "Missing", Missing, raising=False)
    assert "missing is not installed: pip install no-such-engine" in distkit("strategies")[1].splitlines()
    status, out, err = distkit("config", "show", "-s", "missing", "--json")
    assert status == 0
    assert json.loads(out)["config"]["strategy"] == "missing"
    assert "Hint: pip install no-such-engine" in err


def test_doctor(distkit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {item["what"]: item for item in json.loads(distkit("doctor", "--json")[1])}
    assert (
        found["torch"]["found"]
        and found["deepspeed"]["found"]
        and found["megatron-core"]["found"]
        and found["mpirun"]["found"].startswith("openmpi")
    )
    monkeypatch.setenv("PATH", "")
    status, out, _ = distkit("doctor")
    assert status == 0 and "mpirun is missing: apt-get install openmpi-bin" in out


def test_doctor_installs_horovod(distkit: Any) -> None:
    """It is there already: the test command builds it."""
    status, _, err = distkit("doctor", "--install", "horovod")
    assert status == 0 and "distkit doctor: horovod 0.28.1" in err and "is installed" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--install", "deepspeed"), "--install was given 'deepspeed'"),
        (("--install", "horovod", "--mpi", "maybe"), "--mpi was set to 'maybe'; valid: auto, yes, no"),
    ],
)
def test_doctor_refuses(distkit: Any, words: tuple[str, ...], message: str) -> None:
    status, _, err = distkit("doctor", *words)
    assert status == 2 and message in err and "Hint:" in err
