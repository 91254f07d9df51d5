"""`distkit checkpoint`, on checkpoints that one process and two ranks of ZeRO wrote."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distkit import cli
from tests.contract.models import TinyGPT
from tests.pool import Pool


@pytest.fixture(scope="module")
def runs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    same: dict[str, Any] = {"epochs": 1, "settings": {"checkpoint.every_steps": 2}}
    for name, strategy, processes in (("one", "single", 1), ("two", "zero2", 2)):
        pool.run("tests.contract.cases:train", processes, strategy=strategy, run_dir=str(folder / name), **same)
    return folder


@pytest.fixture
def distkit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["distkit", "checkpoint", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), *capsys.readouterr()

    return run


@pytest.fixture
def damaged(runs: Path, tmp_path: Path) -> Path:
    """A copy in whose newest checkpoint one bit of a tensor is turned."""
    shutil.copytree(runs / "two", tmp_path / "two")
    file = tmp_path / "two" / "checkpoints" / "step-00000003" / "model-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return tmp_path / "two"


def test_ls(distkit: Any, runs: Path) -> None:
    status, out, _ = distkit("ls", runs / "two")
    lines = [line.split() for line in out.splitlines() if "step-" in line]
    assert status == 0 and [line[0] for line in lines] == ["step-00000002", "step-00000003"]
    assert all(line[2:5] == ["zero2", "x", "2"] and line[-1] == "whole" for line in lines)
    found = json.loads(distkit("ls", runs / "one" / "checkpoints", "--json")[1])
    assert [entry["step"] for entry in found] == [2, 3]


def test_inspect(distkit: Any, runs: Path) -> None:
    status, out, _ = distkit("inspect", runs / "two")
    assert status == 0 and "step-00000003: step 3, epoch 1, written by zero2 on 2 processes" in out
    count = sum(p.numel() for p in TinyGPT().parameters())
    elements = {line.split()[1]: line.split()[4] for line in out.splitlines() if line.strip().startswith("optimizer")}
    assert elements["exp_avg"] == elements["exp_avg_sq"] == f"{count:,}"
    tensors = json.loads(distkit("inspect", runs / "one", "--json")[1])["tensors"]
    assert {"group": "model", "name": "wte.weight", "kind": "parameter", "dtype": "float32", "shape": [32, 16], "pieces": 1} in tensors  # fmt: skip
    assert "wte.weight" in distkit("inspect", runs / "one", "--tensors")[1]


def test_verify(distkit: Any, runs: Path, damaged: Path) -> None:
    assert distkit("verify", runs / "two")[0] == 0
    status, out, _ = distkit("verify", damaged)
    assert status == 1
    assert [line.split()[1] for line in out.splitlines()] == ["whole,", "DAMAGED:"]
    assert "model-00001.safetensors" in out


def test_diff(distkit: Any, runs: Path, damaged: Path) -> None:
    """Written by other strategies on other numbers of processes: the same tensors, and rounding apart."""
    assert distkit("diff", runs / "two", runs / "two")[0] == 0
    # The gradient of a key's bias is 0 but for rounding (softmax doesn't see it), and Adam makes a whole step of that.
    status, out, _ = distkit("diff", runs / "one", runs / "two", "--within", "1e-5", "--json")
    assert status == 1 and {(entry["name"][9:], entry["what"]) for entry in json.loads(out)} == {
        ("c_attn.bias", "values")
    }
    status, out, _ = distkit("diff", runs / "one", runs / "two", "--within", "0.02")
    assert status == 0 and "0 differ" in out
    first = runs / "two" / "checkpoints" / "step-00000002"
    status, out, _ = distkit("diff", first, runs / "two")
    assert status == 1 and "exp_avg" in out and "step" in out
    found = json.loads(distkit("diff", runs / "two", damaged, "--json")[1])
    assert len(found) == 1 and found[0]["what"] == "values" and found[0]["group"] == "model"


def test_export(distkit: Any, runs: Path, tmp_path: Path) -> None:
    """Plain torch loads it."""
    status, out, _ = distkit("export", runs / "two", tmp_path / "model.safetensors")
    assert status == 0 and "step-00000003" in out
    state = load_file(tmp_path / "model.safetensors")
    model = TinyGPT()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["head.weight"] and not unexpected  # tied to the embedding
    assert torch.equal(model.head.weight, state["wte.weight"])


def test_export_to_several_files(distkit: Any, runs: Path, tmp_path: Path) -> None:
    """Each below the size but for single large tensors, and together the same as the one file."""
    distkit("export", runs / "two", tmp_path / "one.safetensors")
    status, out, _ = distkit("export", runs / "two", tmp_path / "many", "--max-file-size", "4KB")
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert status == 0 and f"in {len(files)} files" in out and len(files) > 2
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    whole = load_file(tmp_path / "one.safetensors")
    parts = {file.name: load_file(file) for file in files}
    assert {name: file for file, part in parts.items() for name in part} == index["weight_map"]
    assert {name: t.tolist() for part in parts.values() for name, t in part.items()} == {
        name: t.tolist() for name, t in whole.items()
    }
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    assert all(sum(t.nbytes for t in part.values()) <= 4000 or len(part) == 1 for part in parts.values())
    status, _, err = distkit("export", runs / "two", tmp_path / "many", "--max-file-size", "4KB")
    assert status == 2 and "holds model-00001-of" in err


@pytest.mark.parametrize("folder", ["", "/checkpoints", "/checkpoints/step-00000003"])
def test_urls_are_taken_everywhere(distkit: Any, runs: Path, folder: str) -> None:
    url = f"file://{runs}/two{folder}"
    status, out, _ = distkit("ls", url)
    assert status == 0 and "step-00000003" in out
    assert "whole" in distkit("verify", url)[1]
    assert distkit("diff", url, runs / "two")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("export", "one", "x", "--max-file-size", "large"), "--max-file-size was set to 'large'"),
        (("ls", "nosuch://bucket/run"), "nosuch:// is no kind of URL"),
        (("ls", "nothing"), "'nothing' isn't there"),
        (("ls", "empty"), "there is no checkpoint in it"),
        (("export", "one", "x.safetensors", "--group", "model_1"), "--group was set to 'model_1', but"),
        (("diff", "one", "empty"), "there is no checkpoint in it"),
    ],
)
def test_bad_input(
    distkit: Any, runs: Path, words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs / "empty").mkdir(exist_ok=True)
    monkeypatch.chdir(runs)
    status, _, err = distkit(*words)
    assert status == 2 and message in err and "Hint:" in err
