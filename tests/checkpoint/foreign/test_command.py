"""`distkit checkpoint import`: what it prints, what it refuses, and a real run that goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distkit import cli
from distkit.checkpoint import CheckpointReader
from distkit.state import Region
from tests.checkpoint.foreign.conftest import Origins
from tests.contract.models import TinyGPT, groups
from tests.pool import ROOT

HERE = "tests.checkpoint.foreign.origins"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["distkit", "checkpoint", "import", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), *capsys.readouterr()

    return call


def saved(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **more: Any) -> Path:
    data = {"model": model.state_dict(), **more}
    if optimizer is not None:
        data["optimizer"] = optimizer.state_dict()
    torch.save(data, path)
    return path


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return optimizer


def test_what_is_printed(run: Any, origins: Origins, tmp_path: Path) -> None:
    status, out, _ = run(origins["torch"].source, tmp_path / "run")
    assert status == 0
    lines = out.splitlines()
    assert lines[0].endswith("last.ckpt: torch.save, step 3, 1 process")
    assert lines[1] == "taken:  29 parameters, 0 buffers, head.weight tied to wte.weight"
    assert lines[2].strip() == "optimizer 0: state of 28 parameters (step, exp_avg, exp_avg_sq), 2 parameter groups"
    assert lines[3].strip() == "1 learning rate scheduler"
    assert lines[4] == "left:   'best', position in the data"
    assert lines[-1].endswith("begins epoch 1 at its first sample")
    status, out, _ = run(origins["torch"].source, tmp_path / "again", "--epoch", "7", "--json")
    record = json.loads(out)
    assert record["epoch"] == 7 and record["ties"] == {"head.weight": "wte.weight"}


def test_a_lightning_module_keeps_its_attribute(run: Any, origins: Origins, tmp_path: Path) -> None:
    status, out, _ = run(origins["lightning"].source, tmp_path / "run")
    assert status == 0 and "--strip-prefix net." in out and "net.head.weight tied to net.wte.weight" in out


def test_names_from_the_users_model(run: Any, origins: Origins, tmp_path: Path) -> None:
    """A safetensors file has lost the order: without --model nothing is guessed."""
    source = origins["accelerate"].source
    status, _, err = run(source, tmp_path / "run")
    assert status == 2 and "alphabetical order" in err and "Hint: " in err and "--model MODULE:FUNCTION" in err
    assert not (tmp_path / "run").exists()
    for function in ("build", "build_with_optimizer"):
        assert run(source, tmp_path / function, "--model", f"{HERE}:{function}")[0] == 0
    status, _, err = run(source, tmp_path / "run", "--model", f"{HERE}:build_other")
    assert status == 2 and "of another shape (28): wte.weight [32, 16] instead of [32, 32]" in err


def test_frozen_ones_need_the_users_model(run: Any, tmp_path: Path) -> None:
    model = TinyGPT(frozen=True)
    optimizer = stepped(model, torch.optim.AdamW(groups(model)))
    source = saved(tmp_path / "x.pt", model, optimizer)
    status, _, err = run(source, tmp_path / "run")
    assert status == 2 and "more than one way to name them" in err
    assert run(source, tmp_path / "run", "--model", f"{HERE}:build_frozen")[0] == 0
    reader = CheckpointReader(tmp_path / "run" / "checkpoints" / "step-00000001")
    for parameter, name in [(p, n) for n, p in model.named_parameters() if p.requires_grad]:
        expected = optimizer.state[parameter]["exp_avg"]
        assert torch.equal(reader.read("optimizer", name, "exp_avg", Region.whole(expected.shape)), expected)


def test_other_optimizers(run: Any, tmp_path: Path) -> None:
    """SGD with and without momentum, Adafactor's factored state, a parameter that never had a gradient."""
    kinds = {
        "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), {}),
        "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"momentum_buffer": 28}),
        "adafactor": (lambda p: torch.optim.Adafactor(p), {"step": 28, "row_var": 10, "col_var": 10, "variance": 18}),
    }
    for kind, (make, fields) in kinds.items():
        model = TinyGPT()
        source = saved(tmp_path / f"{kind}.pt", model, stepped(model, make(model.parameters())), epoch=2, step=5)
        status, out, err = run(source, tmp_path / kind, "--model", f"{HERE}:build", "--json")
        assert status == 0, err
        assert json.loads(out)["optimizers"][0]["fields"] == fields
        assert json.loads(out)["step"] == 5


def test_a_bare_state_dict(run: Any, tmp_path: Path) -> None:
    torch.save(TinyGPT().state_dict(), tmp_path / "weights.pt")
    status, out, _ = run(tmp_path / "weights.pt", tmp_path / "run")
    assert status == 0 and "there is no optimizer in it" in out and "doesn't say how many steps" in out
    status, out, _ = run(tmp_path / "weights.pt", tmp_path / "with", "--model", f"{HERE}:build_with_optimizer")
    assert status == 0 and "its state begins afresh" in out
    assert len(CheckpointReader(tmp_path / "with" / "checkpoints" / "step-00000000").layouts()[0].groups) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing", "run"), "'nothing' isn't there"),
        (("empty", "run"), "holds nothing"),
        (("text.pt", "run"), "text.pt can't be read as tensors"),
        (("list.pt", "run"), "holds a list; only dicts"),
        (("keys.pt", "run"), "holds no model's state_dict(): its keys are a"),
        (("good.pt", "run", "--from", "fsdp"), "--from was set to 'fsdp'; there are: auto, deepspeed"),
        (("good.pt", "run", "--from", "deepspeed"), "is a file, but deepspeed writes folders"),
        (("good.pt", "run", "--from", "lightning"), "is no checkpoint of Lightning"),
        (("good.pt", "run", "--model", "nosuch:f"), "No module named 'nosuch'"),
        (("good.pt", "run", "--model", "json"), "is no MODULE:FUNCTION"),
        (("good.pt", "run", "--model", "json:loads"), "failed: TypeError"),
        (("good.pt", "run", "--model", "os:getcwd"), "returned str"),
        (("good.pt", "run", "--strip-prefix", "x."), "no name begins with it"),
        (("good.pt", "taken"), "holds checkpoints already"),
    ],
)
def test_bad_input(run: Any, words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("hello")
    torch.save([1], tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "keys.pt")
    saved(tmp_path / "good.pt", TinyGPT())
    monkeypatch.chdir(tmp_path)
    assert run("good.pt", "taken")[0] == 0
    status, _, err = run(*words)
    assert status == 2 and message in err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_damaged_sources(run: Any, origins: Origins, tmp_path: Path) -> None:
    """A rank's file missing or cut off: an error that names it, and nothing is written."""
    cuts = {
        "zero2": ("global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt", "files of 1 ranks"),
        "zero3": ("global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt", "files of 1 ranks"),
        "dcp": ("__1_0.distcp", "__1_0.distcp"),
        "accelerate-bin": ("pytorch_model.bin", "holds no model"),
    }
    for kind, (name, message) in cuts.items():
        shutil.copytree(origins[kind].folder, tmp_path / kind)
        file = tmp_path / kind / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        status, _, err = run(tmp_path / kind, tmp_path / "run")
        assert status == 2 and file.name in err
        file.unlink()
        status, _, err = run(tmp_path / kind, tmp_path / "run")
        assert status == 2 and message in err
    assert not (tmp_path / "run").exists()


SCRIPT = """
import torch
from torch.utils.data import DataLoader
import distkit
from tests.contract.models import TinyGPT, Tokens, groups, sample_losses

trainer = distkit.Trainer()
net = TinyGPT()
opt = torch.optim.AdamW(groups(net), lr=1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0 / (1 + step))
net, opt, loader, schedule = trainer.prepare(net, opt, DataLoader(Tokens(36), batch_size=12), schedule)
for epoch in trainer.epochs(2):
    for batch in loader:
        trainer.step(sample_losses(net, batch).mean())
trainer.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_launched_run_goes_on(run: Any, origins: Origins, tmp_path: Path) -> None:
    """From ZeRO-3 on two processes to distkit-run with ddp, with the losses that DeepSpeed had."""
    made = origins["zero3"]
    assert run(made.source, tmp_path / "run")[0] == 0
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "distkit.launch.command", "-s", "ddp", "--nproc", "2", "--run-dir", str(tmp_path / "run"), "--set", "batch.per=global", "--set", "log.every_steps=1", str(tmp_path / "train.py")]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resumed from step-00000003: step 3, epoch 1" in done.stdout + done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines if '"loss"' in line]
    assert losses == pytest.approx(made.losses, abs=1e-6)
