"""Users' own scripts and models, run as one rank of many on tensors without data: they show what real processes need."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distkit.advise.checking import _measured
from distkit.advise.exact.children import rehearsed, rehearsed_script
from distkit.advise.exact.measure import of_step
from distkit.advise.exact.observing import Seen
from distkit.advise.exact.run import Run
from distkit.advise.models import FAMILIES
from distkit.advise.script import Script
from distkit.cli import app
from distkit.config import load_config
from distkit.errors import PlanError, UsageError
from distkit.strategies.zero_config import reduce_bucket_size

ROOT = Path(__file__).resolve().parents[2]
GPT = str(ROOT / "recipes/gpt/train.py")


def run_of(strategy: str, ranks: int, **more: Any) -> Run:
    """The candidate; its model is the script's or the function's."""
    values: dict[str, Any] = {
        "tensor": 1, "nodes": 1, "each": ranks, "micro": 8, "accumulate": 1, "sequence": 64, "optimizer": "adamw",
        "precision": "fp32", "recompute": "none", "offload": "none", "fused_attention": True,
    }  # fmt: skip
    return Run(model=FAMILIES["gpt2"], layers=12, strategy=strategy, **{**values, **more})


def top(seen: Seen) -> int:
    return max(sum(kinds.values()) for kinds in seen.peaks.values())


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        (("strategy=fsdp",), 2),
        (("strategy=ddp", "batch.accumulate=2"), 2),
        (("strategy=horovod", "batch.accumulate=2"), 2),
        (("strategy=zero2", "batch.accumulate=2"), 2),
        (("strategy=zero3", "parallel.tensor=2"), 4),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_script_allocates_and_sends_what_its_processes_do(settings: tuple[str, ...], processes: int) -> None:
    """`distkit plan --check` measures the same script on real processes."""
    script = Script(GPT, ("--layers", "3", "--width", "192", "--batch", "8"), None, settings)
    config = load_config(overrides=list(settings)).config
    (real, *_) = _measured(script, config, str(processes))
    accumulate = config.batch.accumulate or 1
    run = run_of(config.strategy, processes, accumulate=accumulate, tensor=config.parallel.tensor)
    seen = rehearsed_script(script, run)
    called: dict[tuple[str, int], list[int]] = {}
    for one in real["collectives"]:
        found = called.setdefault((one["what"], one["ranks"]), [0, 0])
        found[0] += one["count"]
        found[1] += one["count"] * one["message"]
    pretended = {(one.what, one.ranks): [one.count, one.message] for one in of_step(seen, accumulate)}
    for key, (count, message) in pretended.items():
        own = called[key]
        # Real ranks also agree, once a step, on whether to stop: one gather of a few numbers.
        assert own[0] - count <= 1 and own[1] - message == pytest.approx(0, abs=200), key
    assert sum(size for _, size in called.values()) == pytest.approx(sum(m for _, m in pretended.values()), abs=8192)
    if config.strategy != "zero3":  # of which buffers from before the measured step aren't in what is measured
        measured = real["rest"] + real["above_rest"]
        # On a busy machine gloo's thread may hold a bucket for a while that DeepSpeed has given up.
        held = 4 * reduce_bucket_size(seen.parameters) if config.strategy == "zero2" else 0
        assert any(top(seen) + more == pytest.approx(measured, rel=0.01) for more in (0, held))


FORMS = {
    "two-optimizers": """
        import distkit, torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset
        trainer = distkit.Trainer()
        maker, judge = nn.Linear(16, 512), nn.Linear(512, 1)
        making, judging = torch.optim.Adam(maker.parameters()), torch.optim.SGD(judge.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.randn(64, 512)), batch_size=8, shuffle=True)
        maker, judge, making, judging, loader = trainer.prepare(maker, judge, making, judging, loader)
        for _ in trainer.epochs(3):
            for (x,) in loader:
                made = maker(torch.randn(len(x), 16))
                loss = judge(made.detach()).mean() - judge(x).mean()
                trainer.backward(loss, optimizer=judging)
                trainer.optimizer_step(judging)
                trainer.backward(-judge(made).mean(), optimizer=making)
                trainer.optimizer_step(making)
    """,
    "reads-and-evaluates": """
        import distkit, torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset
        trainer = distkit.Trainer(checkpoint={"every_steps": 1}, log={"every_steps": 1}, max_steps=2)
        net = nn.Sequential(nn.Linear(16, 512), nn.BatchNorm1d(512), nn.Dropout(0.1), nn.Linear(512, 16))
        data = TensorDataset(torch.randn(64, 16), torch.randn(64, 16))
        optimizer = torch.optim.AdamW(net.parameters())
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
        net, optimizer, scheduler, loader = trainer.prepare(net, optimizer, scheduler, DataLoader(data, batch_size=4))
        for _ in trainer.epochs(3):
            for x, y in loader:
                output = net(x)
                loss = nn.functional.mse_loss(output, y)
                if not loss.isfinite():
                    raise SystemExit("not finite")
                trainer.step(loss)
                print(trainer.global_step, f"{loss.item():.3f}", (output > 0).float().mean().item())
                with torch.no_grad():
                    net.eval()
                    net(x).mean().item()
                    net.train()
    """,
    "fit": """
        import distkit, torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset
        net = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 4))
        data = TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
        loader = DataLoader(data, batch_size=8, num_workers=1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        distkit.Trainer(optim={"clip_norm": 1.0}).fit(
            net, optimizer, loader, loss_fn=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), epochs=2,
            eval_loader=DataLoader(data, batch_size=8),
        )
    """,
}
PARAMETERS = {
    "two-optimizers": 16 * 512 + 512 + 512 + 1,
    "reads-and-evaluates": 16 * 512 + 512 + 2 * 512 + 512 * 16 + 16,
    "fit": 16 * 512 + 512 + 512 * 4 + 4,
}


@pytest.mark.parametrize(
    ("form", "strategy"), [("two-optimizers", "ddp"), ("reads-and-evaluates", "fsdp"), ("fit", "zero1")]
)
def test_scripts_of_any_form(tmp_path: Path, form: str, strategy: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(FORMS[form]))
    seen = rehearsed_script(Script(str(path)), run_of(strategy, 16, accumulate=4))
    assert seen.parameters == PARAMETERS[form]
    size = 4 * seen.parameters
    moved = {(one.what, one.ranks): one.message for one in of_step(seen, 4)}
    if strategy == "ddp":
        again = 4 * (512 + 1)  # the maker's loss goes through the judge, whose gradients travel too
        assert moved == {("all_reduce", 16): size + again}
    else:
        reduced = moved[("reduce_scatter" if strategy == "fsdp" else "all_reduce", 16)]
        assert reduced == pytest.approx(size, rel=0.01)  # once in a window
    kinds = max(seen.peaks.values(), key=lambda kinds: sum(kinds.values()))
    assert kinds["parameters"] == pytest.approx(size / (16 if strategy == "fsdp" else 1), rel=0.02)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]  # nothing was written


def test_each_of_two_models_over_a_tensor_group_is_split_in_its_own_way(tmp_path: Path) -> None:
    wide = "nn.Sequential(nn.Linear({0}, 64), nn.ReLU(), nn.Linear(64, {1}))"
    form = FORMS["two-optimizers"].replace(
        "nn.Linear(16, 512), nn.Linear(512, 1)", f"{wide.format(16, 512)}, {wide.format(512, 1)}"
    )
    form = form.replace(
        "        maker, judge, making",
        """
        maker.example_input_array, judge.example_input_array = torch.randn(2, 16), torch.randn(2, 512)
        maker, judge, making""".strip("\n"),
    )
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(form))
    seen = rehearsed_script(Script(str(path)), run_of("ddp", 4, tensor=2))
    matrices = 64 * (16 + 512) + 64 * (512 + 1)
    held = max(kinds["parameters"] for kinds in seen.peaks.values())
    assert held == 4 * (matrices // 2 + 64 // 2 + 512 + 64 // 2 + 1)


def test_a_script_that_wants_values_is_told(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(FORMS["fit"]).replace("m(b[0])", "torch.tensor(m(b[0]).numpy())"))
    with pytest.raises(PlanError, match="(?s)before its second step: .*numpy"):
        rehearsed_script(Script(str(path)), run_of("ddp", 2))


def test_data_for_one_step_only(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(FORMS["fit"]).replace("epochs=2", "epochs=1"))
    with pytest.raises(
        PlanError, match="before its second optimizer step, which --exact looks at; it takes 128 samples"
    ):
        rehearsed_script(Script(str(path)), run_of("ddp", 2, micro=64))


MODELS = """
import torch
from torch import nn

def network():
    layers = [nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*layers), torch.zeros(2, 3, 32, 32)

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(64, 100)

    def forward(self, tokens):
        return {"logits": self.head(self.layers(self.embedding(tokens)))}

def encoder():
    return Encoder()

def alone():
    return nn.Linear(4, 4)

def wrong():
    return nn.Linear(4, 4), torch.zeros(2, 5)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_a_function_of_images(models: Path) -> None:
    words = ["plan", "--model", "mine:network", "--hardware", "1x4xA100-80G", "--batch", "32", "--exact", "--json"]
    done = CliRunner().invoke(app, [*words, "--precision", "fp32"], catch_exceptions=False)
    candidate = json.loads(done.stdout)["candidates"][0]
    exact = candidate["exact"]
    count = 3 * 64 * 9 + 64 + 2 * 64 + 64 * 10 + 10
    assert exact["bytes_per_rank"]["parameters"] == pytest.approx(4 * count, rel=0.01)
    assert "the model of mine:network" in exact["method"]
    image = 64 * 30 * 30 * 4
    kept, gradients = 2, 2  # by the norm and by ReLU; of ReLU's output and of its input
    assert exact["bytes_per_rank"]["activations"] == pytest.approx(8 * (kept + gradients) * image, rel=0.03)
    assert candidate["tokens_per_s"] == pytest.approx(candidate["samples_per_s"], rel=0.001)  # an image is one
    assert candidate["bytes_per_rank"]["activations"] == pytest.approx(8 * kept * image, rel=0.03)


def test_a_function_of_tokens_over_a_tensor_group(models: Path) -> None:
    """Split as it would be: found with values that are drawn anew."""
    whole, split = (
        rehearsed(run_of("ddp", 4, micro=2, sequence=32, target="mine:encoder", tensor=tensor), [1])[0]
        for tensor in (1, 2)
    )
    assert whole.parameters == split.parameters
    held = [max(kinds["parameters"] for kinds in seen.peaks.values()) for seen in (whole, split)]
    assert held[0] == 4 * whole.parameters and held[1] == pytest.approx(held[0] / 2, rel=0.05)
    sums = next(one for one in split.last if (one.what, one.ranks) == ("all_reduce", 2) and one.message > 10_000)
    assert sums.count >= 2 * 2 * 3  # two a layer, each way


def test_a_function_without_a_batch(models: Path) -> None:
    with pytest.raises(
        PlanError, match="the Linear of mine:alone has no embedding for tokens, and no batch came with it"
    ):
        rehearsed(run_of("ddp", 2, target="mine:alone"), [1])


def test_a_plan_without_a_batch_is_a_guess_and_says_so(models: Path) -> None:
    words = ["plan", "--model", "mine:alone", "--hardware", "1x4xA100-80G", "--seq", "64"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert (
        "mine:alone returned no batch beside its model, which takes no tokens, so a typical step of 64 tokens"
        in done.stderr
    )
    with pytest.raises(UsageError, match="--seq was set to 64, and the batch of mine:network has 1 tokens"):
        CliRunner().invoke(app, [*words, "--model", "mine:network"], catch_exceptions=False)


def test_a_batch_that_the_model_does_not_take(models: Path) -> None:
    words = ["plan", "--model", "mine:wrong", "--hardware", "1x4xA100-80G", "--exact"]
    with pytest.raises(PlanError, match="its forward or loss can't be run on the batch beside it: RuntimeError"):
        CliRunner().invoke(app, words, catch_exceptions=False)
