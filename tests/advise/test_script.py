"""Plans for a user's own script or function: what is seen of it, and how near the plan is to what it really needs."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from distkit.advise.activations import layer_activations
from distkit.advise.building import model_built_by
from distkit.advise.checking import Compared, check_script
from distkit.advise.here import this_machine
from distkit.advise.script import Script, SeenScript, look_at
from distkit.cli import app
from distkit.errors import DistkitError, LaunchError, PlanError, UsageError

ROOT = Path(__file__).resolve().parents[2]
GPT, LLAMA = str(ROOT / "recipes/gpt/train.py"), str(ROOT / "scripts/benchmarks/llama_steps.py")

SCRIPT = """
    import torch
    import distkit

    with distkit.Trainer() as trainer:
        net = torch.nn.Sequential(torch.nn.Linear({width}, {width}), torch.nn.ReLU(), torch.nn.Linear({width}, 1))
        data = torch.utils.data.TensorDataset(torch.randn(64, {width}), torch.randn(64, 1))
        loader = torch.utils.data.DataLoader(data, batch_size=8)
        net, opt, loader = trainer.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), loader)
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(net(x), y)
            {between}
            trainer.step(loss)
"""

BLOCKS = f"*(torch.nn.Linear({20_000}, {20_000}) for _ in range(100))"


def write(folder: Path, text: str, name: str = "train.py") -> Path:
    import textwrap

    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


# -- what is seen --------------------------------------------------------------------------------------------------


def test_a_script_is_seen_as_it_is() -> None:
    seen = look_at(Script(GPT, ("--layers", "4", "--width", "64", "--batch", "8")))
    model = seen.model
    assert (seen.batch, seen.tokens, seen.optimizer, seen.note) == (8, 64, "adamw", "")
    assert (model.layers, model.hidden, model.heads, model.vocabulary) == (4, 64, 4, 256)
    sys.path.insert(0, str(ROOT / "recipes/gpt"))
    try:
        from model import GPT as Net
        from model import GPTConfig
    finally:
        sys.path.pop(0)
    net = Net(GPTConfig(256, 64, 4, 4, 64, 0.0, True))
    assert model.parameters == model.trained_parameters == sum(p.numel() for p in net.parameters())
    assert model.layer_parameters == sum(p.numel() for p in net.transformer.h[0].parameters())
    step = model.seen.step if model.seen else None
    assert step is not None
    tokens = 8 * torch.arange(64).repeat(1, 1)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counted:
        net(tokens % 256).sum().backward()
    assert step.flops == pytest.approx(counted.get_total_flops(), rel=1e-6)
    formula = 2 * layer_activations(64, 1, 64, 4, scores=False)  # fp32: twice what the formula for 16 bits says
    assert step.in_blocks / 4 == pytest.approx(formula, rel=0.15)


def test_a_model_too_large_for_this_machine(tmp_path: Path) -> None:
    """Its weights alone are 160 GB: they are never there."""
    path = write(tmp_path, SCRIPT.format(width=20_000, between="").replace("torch.nn.ReLU()", BLOCKS))
    seen = look_at(Script(str(path)))
    assert seen.model.parameters == 101 * (20_000**2 + 20_000) + 20_000 + 1 and seen.model.layers == 1
    assert seen.optimizer == "sgd" and seen.model.seen is not None and seen.model.seen.step is not None


def test_a_step_that_wants_values(tmp_path: Path) -> None:
    script = SCRIPT.format(width=8, between="print(loss.detach().numpy())")
    seen = look_at(Script(str(write(tmp_path, script))))
    assert seen.model.parameters == 8 * 8 + 8 + 8 + 1
    assert seen.model.seen is not None and seen.model.seen.step is None and "without values" in seen.note


def test_a_step_that_reads_its_loss(tmp_path: Path) -> None:
    reads = "assert loss.item() == float(loss) and not bool(loss > 0)"
    seen = look_at(Script(str(write(tmp_path, SCRIPT.format(width=8, between=reads)))))
    assert seen.note == "" and seen.model.seen is not None and seen.model.seen.step is not None


def test_what_a_script_gives_to_its_trainer(tmp_path: Path) -> None:
    given = 'distkit.Trainer(precision="bf16", batch={"size": 2, "accumulate": 4})'
    path = write(tmp_path, SCRIPT.format(width=8, between="").replace("distkit.Trainer()", given))
    found = json.loads(plan("--hardware", "1x4xA100-80G", "--json", str(path)))
    assert (found["assumptions"]["precision"], found["assumptions"]["batch"]) == ("bf16", 2 * 4 * 4)
    assert {candidate["accumulate"] for candidate in found["candidates"]} == {4}
    assert look_at(Script(str(path), overrides=("precision=fp32",))).config.precision == "fp32"


def test_a_script_without_a_model(tmp_path: Path) -> None:
    path = write(tmp_path, "raise RuntimeError('no data here')")
    with pytest.raises(UsageError, match="without preparing a model: RuntimeError: no data here"):
        look_at(Script(str(path)))


FUNCTION = """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def llama():
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, use_cache=False))

    def table():
        return {"no": "model"}

    def frozen():
        return torch.nn.Linear(2, 2).requires_grad_(False)

    def counting():
        return torch.nn.Linear(2, int(torch.ones(3).sum().item()))
"""


def test_a_function_that_builds_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, FUNCTION, "mine.py")
    monkeypatch.chdir(tmp_path)
    built = model_built_by("mine:llama", sequence=128, precision="bf16")
    model = built.model
    assert (built.tokens, built.note) == (None, "")
    assert model.parameters == 2 * 32000 * 4096 + 2 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096
    assert model.layers == 2 and model.seen is not None and model.seen.step is not None
    assert model.seen.step.tokens == 128
    matrices = model.parameters - 32000 * 4096 - 5 * 4096
    assert model.seen.step.flops == pytest.approx(6 * matrices * 128, rel=0.02)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("mine:table", "it returned a dict, and no nn.Module"),
        ("mine:frozen", "none of its parameters is trained"),
        ("mine:nothing", "has no attribute 'nothing'"),
        ("mine:counting", "(?s)meta tensors.*without tensors, or with device='cpu'"),
        ("yours:llama", "(?s)No module named 'yours'.*yours is yours.py there"),
    ],
)
def test_a_function_that_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, says: str) -> None:
    write(tmp_path, FUNCTION, "mine.py")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match=says):
        model_built_by(target, sequence=8, precision="fp32")


def test_this_machine() -> None:
    found = this_machine(each=2, environ={"CUDA_VISIBLE_DEVICES": ""})
    assert found.cpu and found.each == 2 and found.nodes == 1
    assert 1e8 < found.device.memory < 1e13 and found.device.speed("fp32") > 1e9


# -- predicted against counted -------------------------------------------------------------------------------------


@cache
def seen_under(path: str, overrides: tuple[str, ...]) -> SeenScript:
    """Seeing a script takes its imports; strategies don't change what is seen."""
    return look_at(Script(path, (), None, overrides))


def errors(path: str, processes: int, *overrides: str) -> dict[str, Compared]:
    what_is_seen = tuple(one for one in overrides if one.startswith(("precision", "parallel")))
    _, found = check_script(Script(path, (), None, overrides), seen_under(path, what_is_seen), nproc=str(processes))
    return {one.what: one for one in found}


@pytest.mark.parametrize(
    ("path", "processes", "overrides"),
    [
        (GPT, 1, ("strategy=single",)),
        (GPT, 2, ("strategy=ddp", "batch.accumulate=2")),
        (GPT, 4, ("strategy=horovod",)),
        (GPT, 2, ("strategy=fsdp", "batch.accumulate=2")),
        (GPT, 4, ("strategy=hsdp",)),
        (GPT, 2, ("strategy=zero1", "precision=bf16")),
        (GPT, 2, ("strategy=zero2", "batch.accumulate=2", "memory.offload=optimizer")),
        (LLAMA, 2, ("strategy=zero3",)),
        (LLAMA, 4, ("strategy=zero3", "parallel.tensor=2")),
        (GPT, 4, ("strategy=megatron-zero2", "parallel.tensor=2")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else Path(value).parent.name if isinstance(value, str) else str(value),
)  # fmt: skip
def test_predicted_is_what_is_counted(path: str, processes: int, overrides: tuple[str, ...]) -> None:
    """Model states and traffic within 2 %. All of it: scripts/benchmarks/predictions.py."""
    found = errors(path, processes, *overrides)
    for what in ("parameters", "gradients", "optimizer", "model states"):
        assert found[what].measured, what
        assert found[what].error == pytest.approx(0, abs=0.02), what
    if processes > 1:
        assert found["collectives"].error == pytest.approx(0, abs=0.02)
        wire = found["on the wire (gloo)"]
        assert wire.measured and wire.error == pytest.approx(0, abs=0.02)
    assert found["peak of a step"].error == pytest.approx(0, abs=0.3)


def test_a_run_that_fails_is_shown(tmp_path: Path) -> None:
    path = write(tmp_path, SCRIPT.format(width=8, between="assert trainer.global_step < 1, 'enough'"))
    script = Script(str(path), overrides=("strategy=ddp",))
    with pytest.raises(LaunchError, match="(?s)fewer than 3 steps, or failed.*enough"):
        check_script(script, look_at(script), nproc="2")


# -- as it is typed ------------------------------------------------------------------------------------------------


def plan(*words: str) -> str:
    done = CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "160"}, catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_plan_for_a_script() -> None:
    found = json.loads(plan("--hardware", "2x8xA100-80G", "--json", GPT, "--batch", "4"))
    assert found["recommended"]["strategy"] == "ddp"
    assert found["assumptions"]["batch"] == 4 * 16 and found["assumptions"]["sequence"] == 64
    assert found["assumptions"]["model"]["name"] == "GPT"
    here = json.loads(plan("--here", "--nproc", "2", "--json", GPT))
    assert "2 x CPU" in here["assumptions"]["hardware"] or "2 x" in here["assumptions"]["hardware"]


def test_check_as_it_is_typed() -> None:
    found = json.loads(plan("--check", "-s", "ddp", "--nproc", "2", "--json", GPT))
    assert "ddp on 2 processes" in found["run"]
    assert {one["what"] for one in found["compared"]} >= {"parameters", "model states", "collectives"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "what to plan for was not said"),
        (("--check",), "--check wants a script"),
        (("--layout",), "--layout wants a script"),
        (("--params", "7B", GPT), "plan without a script"),
        (("missing.py", "--here"), "missing.py is no file"),
        (("--params", "7B", "--here", "--hardware", "8xA100-80G"), "--here and --hardware were set"),
        (("--params", "7B", "--here", "--nproc", "none"), "--nproc was set to 'none'"),
        (("--params", "7B"), "where it is to run was not said"),
        ((GPT, "--hardware", "8xA100-80G"), "--hardware stands behind .*train.py"),
        ((GPT, "--here"), "--here stands behind .*train.py"),
        (("--here", GPT, "--exact"), "(?s)unrecognized arguments: --exact.*stand before the script"),
        (("--here", "-s", "zero3", GPT), "-s zero3 was set, and a plan tries every strategy"),
        (("--params", "7B", "--here", "--set", "precision=bf16"), "settings of a script, and there is none"),
    ],
)
def test_nonsense(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(DistkitError, match=says) as caught:
        CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    assert caught.value.hint


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distkit.launch.command", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)


def test_strategy_auto(tmp_path: Path) -> None:
    """One process leaves no choice; two on a small model are ddp, and the run trains."""
    path = write(tmp_path, SCRIPT.format(width=8, between="print(trainer.strategy.name, flush=True)"))
    done = run(tmp_path, "-s", "auto", "--nproc", "2", "--set", "max_steps=2", str(path))
    assert done.returncode == 0, done.stderr
    assert "strategy auto: ddp for 2 x" in done.stderr and "ddp" in done.stdout.split()
    dry = json.loads(run(tmp_path, "-s", "auto", "--nproc", "1", "--dry-run", "--json", str(path)).stdout)
    assert dry["strategy"] == "single"


def test_strategy_auto_in_processes_that_others_started(tmp_path: Path) -> None:
    path = write(tmp_path, SCRIPT.format(width=8, between="").replace("Trainer()", 'Trainer(strategy="auto")'))
    alone = subprocess.run([sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert alone.returncode == 0, alone.stderr
    done = run(tmp_path, "--nproc", "2", str(path))
    assert done.returncode != 0 and "distkit-run -s auto" in done.stdout + done.stderr
