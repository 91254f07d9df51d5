"""Plans that are run: on tensors without data the real engines allocate and send what they do with data."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distkit.advise.advisor import Task, advise
from distkit.advise.exact.children import rehearsed
from distkit.advise.exact.measure import Exact, check_exact, exact_of_advice, extend, measure, of_step
from distkit.advise.exact.observing import Called, Seen
from distkit.advise.exact.run import Run
from distkit.advise.exact.sizes import Sizes, sizes_of
from distkit.advise.hardware import parse_hardware
from distkit.advise.layout import Layout, layouts
from distkit.advise.memory import KINDS, memory_of
from distkit.advise.models import FAMILIES, ModelShape, model_of_size
from distkit.advise.traffic import collectives_of
from distkit.cli import app
from distkit.errors import DistkitError, PlanError
from distkit.strategies import without_data
from tests.pool import Pool

GPT = str(Path(__file__).resolve().parents[2] / "recipes/gpt/train.py")


def shape(layers: int, *, gated: bool = True, vocabulary: int = 255, hidden: int = 256) -> ModelShape:
    """A small model; of an odd vocabulary, unless told otherwise, which no tensor group splits."""
    bare = ModelShape("small", 0, layers, hidden, 4, 4, 3 * hidden, gated=gated, vocabulary=vocabulary, tied=not gated)
    return replace(bare, parameters=Sizes(bare, 0, layers).parameters)


def run_of(model: ModelShape, strategy: str, ranks: int, **more: Any) -> Run:
    values: dict[str, Any] = {
        "layers": model.layers,
        "tensor": 1,
        "nodes": 1,
        "each": ranks,
        "micro": 2,
        "accumulate": 1,
        "sequence": 128,
        "optimizer": "adamw",
        "precision": "bf16",
        "recompute": "none",
        "offload": "none",
        "fused_attention": True,
    }
    return Run(model=model, strategy=strategy, **{**values, **more})


def top(seen: Mapping[str, Any]) -> dict[str, int]:
    """By kind, at the peak of the step."""
    peaks: dict[str, dict[str, int]] = seen["peaks"]
    return max(peaks.values(), key=lambda kinds: sum(kinds.values()))


@pytest.mark.parametrize(("strategy", "precision"), [("fsdp", "bf16"), ("fsdp", "bf16-pure"), ("zero2", "bf16")])
def test_two_real_processes_allocate_the_same(pool: Pool, strategy: str, precision: str) -> None:
    """In every stretch of a step; but gloo copies what it reduces and scatters, behind the last gradient of a layer, and frees it
    in a thread of its own, which may be in the next layer's first stretch."""
    model = shape(3, vocabulary=2047, hidden=128)
    run = asdict(run_of(model, strategy, 2, precision=precision, micro=3, sequence=64))
    (pretended,) = pool.run("tests.advise.exact_cases:faked", 1, runs=[run])[0]
    pure = precision == "bf16-pure"
    real = pool.run("tests.advise.exact_cases:real", 2, run=run, record=pure)[0]
    found = real["seen"]
    assert found["parameters"] == pretended["parameters"]
    assert found["peaks"].keys() == pretended["peaks"].keys()
    copies = ("norm1 gradient", "embedding gradient", "down gradient") if strategy == "fsdp" else ()
    for where, kinds in found["peaks"].items():
        total = sum(kinds.values())
        if not where.endswith(copies):
            assert pretended["peaks"][where] == pytest.approx(kinds, rel=0.01, abs=0.001 * total), where
    assert top(pretended) == pytest.approx(top(found), rel=0.01)
    assert found["last"] == pretended["last"]  # collectives, their groups and bytes
    if pure:  # mixed, the CPU's operators need room inside that a GPU's don't
        held = real["states"]["parameters"] + real["states"]["optimizer"] + real["allocated"]
        assert sum(top(pretended).values()) == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize(("strategy", "more"), [("fsdp", {"recompute": "full"}), ("zero1", {}), ("ddp", {"tensor": 2})])
def test_few_layers_tell_of_all(pool: Pool, strategy: str, more: dict[str, Any]) -> None:
    run = run_of(shape(8), strategy, 8, **more)
    counts = (4, 5, 6, 8)
    found = pool.run("tests.advise.exact_cases:faked", 1, runs=[asdict(replace(run, layers=n)) for n in counts])[0]
    *few, whole = (_seen(one) for one in found)
    extended = extend(few, 4)
    assert extended is not None
    assert extended.parameters == whole.parameters == shape(8).parameters
    for where, kinds in extended.peaks.items():
        assert kinds == pytest.approx(whole.peaks[where], rel=0.002, abs=4096), where
    assert top(asdict(extended)) == top(asdict(whole))
    for part in ("first", "last"):
        sent = {(one.what, one.ranks): one.message for one in getattr(whole, part)}
        assert {(one.what, one.ranks): one.message for one in getattr(extended, part)} == sent


def test_what_is_no_line_is_not_extended() -> None:
    def seen(activations: int, where: str = "backward: norm") -> Seen:
        kinds = dict.fromkeys(KINDS, 10)
        return Seen(100, {"forward: norm": kinds, where: {**kinds, "activations": activations}})

    straight = extend([seen(1000), seen(2000), seen(3000)], 10)
    assert straight is not None and straight.peaks["backward: norm"]["activations"] == 11000
    assert extend([seen(1000), seen(2000), seen(4000)], 10) is None
    assert extend([seen(1000, "backward: middle norm"), seen(2000, "backward: middle norm"), seen(3000)], 10) is None


def _seen(found: dict[str, Any]) -> Seen:
    calls = {part: [Called(**one) for one in found[part]] for part in ("first", "last")}
    return Seen(found["parameters"], found["peaks"], **calls)


@pytest.mark.parametrize(
    ("strategy", "tensor", "precision"),
    [("fsdp", 1, "bf16"), ("ddp", 1, "bf16"), ("ddp", 2, "fp32"), ("fsdp", 2, "bf16-pure")],
)
def test_collectives_are_those_of_the_formulas(pool: Pool, strategy: str, tensor: int, precision: str) -> None:
    model = shape(6, hidden=512, vocabulary=256)
    run = run_of(model, strategy, 8, tensor=tensor, precision=precision, accumulate=2)
    (found,) = pool.run("tests.advise.exact_cases:faked", 1, runs=[asdict(run)])[0]
    called = {(one.what, one.ranks): one.message for one in of_step(_seen(found), 2) if one.message > 1000}
    hardware = parse_hardware("1x8xA100-80G")
    expected = collectives_of(
        model, layout_of(strategy, tensor, "1x8xA100-80G"), hardware, micro=2, accumulate=2, sequence=128, optimizer="adamw",
        precision=precision,
    )  # fmt: skip
    sent = {(one.what, one.ranks): one.message * one.count for one in expected}
    assert called.keys() == sent.keys()
    for key, message in sent.items():
        assert called[key] == pytest.approx(message, rel=0.02), key


def layout_of(strategy: str, tensor: int = 1, hardware: str = "1x4xA100-80G") -> Layout:
    model = FAMILIES["llama-13b"]
    words = strategy if tensor == 1 else f"{strategy}, tensor {tensor}"
    return next(one for one in layouts(model, parse_hardware(hardware)) if one.describe() == words)


MEASURE = """
import json, resource
from distkit.advise.advisor import Task
from distkit.advise.exact.measure import measure
from distkit.advise.hardware import parse_hardware
from distkit.advise.layout import layouts
from distkit.advise.models import FAMILIES
model, hardware = FAMILIES["llama-13b"], parse_hardware("4x8xA100-80G")
layout = next(one for one in layouts(model, hardware) if one.describe() == "fsdp")
found = measure(Task(model, batch=64, accumulate=1), hardware, layout, micro=2, accumulate=1)
held = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps({**found.as_dict(), "parameters": found.parameters, "held": held * 1024}))
"""


def test_13b_on_32_ranks() -> None:
    """No memory for the weights (52 GB in fp32), and less than two minutes."""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=300, check=True)
    assert time.monotonic() - started < 120
    found = json.loads(done.stdout)
    assert found["held"] < 1.5e9
    model = FAMILIES["llama-13b"]
    assert found["parameters"] == model.parameters
    layout = layout_of("fsdp", hardware="4x8xA100-80G")
    closed = memory_of(
        model, layout, micro=2, sequence=2048, optimizer="adamw", precision="bf16", fused_attention=True
    ).as_dict()  # fmt: skip
    held = found["bytes_per_rank"]
    for kind in ("parameters", "optimizer"):
        assert held[kind] == pytest.approx(closed[kind], rel=0.02), kind
    assert held["gradients"] <= closed["gradients"] * 1.02  # the peak is before all of them are there
    assert held["activations"] == pytest.approx(closed["activations"], rel=0.1)


def test_published_sizes_are_built() -> None:
    for model in (*FAMILIES.values(), *(model_of_size(n) for n in (350_000_000, 7_000_000_000, 70_000_000_000))):
        assert sizes_of(model).parameters == pytest.approx(model.parameters, rel=0.01), model.name
    for name in ("gpt2", "llama-13b", "llama3-8b"):
        assert sizes_of(FAMILIES[name]).parameters == FAMILIES[name].parameters


def test_offloaded_states_are_on_the_host() -> None:
    found = measure(
        Task(shape(3), batch=8, sequence=64), parse_hardware("1x4xA100-80G"),
        replace(layout_of("zero2"), offload="optimizer"), micro=2, accumulate=1,
    )  # fmt: skip
    parameters = shape(3).parameters
    assert found.memory.optimizer == found.memory.gradients == 0
    held = 12 + 2 + 4  # masters and Adam's two states; the partition in 16 bits; gradients in fp32
    assert found.memory.host == pytest.approx(held * parameters / 4, rel=0.01)
    assert found.memory.parameters == pytest.approx(2 * parameters, rel=0.01)


def test_the_command(tmp_path: Path) -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
              "intermediate_size": 128, "hidden_act": "silu", "model_type": "tiny"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", "--model", str(tmp_path), "--hardware", "1x1xA100-80G", "--batch", "4", "--seq", "32", "--exact"]
    html = tmp_path / "plan.html"
    done = CliRunner().invoke(app, [*words, "--json", "--html", str(html)], catch_exceptions=False)
    candidate = json.loads(done.stdout)["candidates"][0]
    exact = candidate["exact"]
    assert set(exact) >= {"bytes_per_rank", "collectives", "method", "seconds", "closed_form", "fits"}
    assert exact["bytes_per_rank"]["parameters"] == candidate["bytes_per_rank"]["parameters"]
    assert exact["collectives"] == [] and "all 2 layers" in exact["method"]
    assert "closed form against exact" in html.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--params", "7B", "--hardware", "8xA100-80G", "--exact", "--optimizer", "lamb"], "which --exact can't run"),
        (["--params", "70B", "--hardware", "1x1xA100-80G", "--exact"], "nothing fits"),
        (["--params", "7B", "--hardware", "8xA100-80G", "--exact", "--fit"], "leave --fit, --check and --layout out"),
        (["--model", "resnet50", "--hardware", "8xA100-80G", "--exact", "--batch", "64"], "only sizes are known"),
        (["--params", "7B", "--hardware", "8xA100-80G", "--exact", "--compress", "bf16"], "leave --compress or"),
        (["--hardware", "8xA100-80G", "--exact", "--optimizer", "sgd", GPT], "--optimizer was set, and --exact runs"),
        (["--hardware", "8xA100-80G", "--exact", "--seq", "64", GPT], "--seq was set, and --exact runs"),
    ],
)
def test_nonsense(words: list[str], message: str) -> None:
    with pytest.raises(DistkitError) as error:
        CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    assert message in str(error.value) and "Hint:" in str(error.value)


def test_what_cannot_be_built_or_run() -> None:
    with pytest.raises(PlanError, match="a transformer of 3 layers of 256"):
        sizes_of(replace(shape(3), parameters=10 * shape(3).parameters))
    with pytest.raises(PlanError, match="fsdp can't be run: parallel.tensor"):
        rehearsed(run_of(shape(2), "fsdp", 4, tensor=3), [2])
    with pytest.raises(PlanError, match=r"lacks torch\.nowhere\.Gone"):
        without_data.private("torch.nowhere", "Gone")
    check_exact(Task(shape(2), batch=1))


def test_time_bounds_what_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recommended one in any case, others while there is time; what can't be run is left out."""
    advice = advise(Task(FAMILIES["llama-7b"], batch=64), parse_hardware("2x8xA100-80G"))
    assert advice.recommended is not None

    def pretend(seconds: float) -> list[str]:
        def measured(task: Task, hardware: Any, layout: Layout, **_: Any) -> Exact:
            return Exact(layout, advice.candidates[0].memory, "", (), "", seconds, 0)

        monkeypatch.setattr("distkit.advise.exact.measure.measure", measured)
        return [candidate.layout.describe() for candidate, _ in exact_of_advice(advice, lambda _: None)]

    def fails(task: Task, hardware: Any, layout: Layout, **_: Any) -> Exact:
        if layout == advice.candidates[0].layout:
            return Exact(layout, advice.candidates[0].memory, "", (), "", 1.0, 0)
        raise PlanError("deepspeed isn't installed", hint="")

    monkeypatch.setattr("distkit.advise.exact.measure.measure", fails)
    left_out: list[str] = []
    assert len(exact_of_advice(advice, lambda _: None, warn=left_out.append)) == 1
    assert len(left_out) == 3 and all("was left out: deepspeed isn't installed" in line for line in left_out)
    assert pretend(1000.0) == [advice.recommended.layout.describe()]
    assert len(pretend(1.0)) == 4
