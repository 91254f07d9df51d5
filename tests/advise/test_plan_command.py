"""`distkit plan` on sizes and hardware: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distkit.advise.advisor import Task, advise
from distkit.advise.fitting import fits_of
from distkit.advise.hardware import catalogue, parse_hardware
from distkit.advise.layout import Layout, layouts
from distkit.advise.memory import memory_of
from distkit.advise.models import FAMILIES, model_named, parse_parameters
from distkit.advise.report import launch_line, settings_of
from distkit.advise.rules import rules
from distkit.advise.timing import Calibration
from distkit.cli import app
from distkit.config import load_config
from distkit.errors import PlanError

GUIDE = [
    "--params",
    "13B",
    "--accumulate",
    "4",
    "--hardware",
    "4x8xA100-80G",
    "--intra",
    "nvlink",
    "--inter",
    "200Gbps",
]


def plan(*words: str) -> str:
    done = CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "160"}, catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_the_table() -> None:
    text = plan(*GUIDE)
    assert "* zero1, tensor 2" in text and "take zero1, tensor 2" in text and "runner-up" in text
    assert "needs 241.7 GB of 76.0 GB, of which 104.0 GB are optimizer" in " ".join(text.split())  # why ddp is out
    assert "distkit-run -s zero1 --nproc 8 --hostfile hosts" in text


def test_json() -> None:
    found = json.loads(plan(*GUIDE, "--json"))
    assert set(found) >= {"recommended", "candidates", "assumptions", "rules"}
    assert set(found["recommended"]) >= {"strategy", "tensor", "offload", "reason"}
    for candidate in found["candidates"]:
        sizes = candidate["bytes_per_rank"]
        assert set(sizes) == {"parameters", "gradients", "optimizer", "activations", "buffers", "total"}
        assert sizes["total"] == pytest.approx(sum(value for name, value in sizes.items() if name != "total"), abs=5)
        assert set(candidate["traffic_bytes"]) == {"intra", "inter", "host"}
        assert set(candidate["step_s"]) == {"compute", "communication", "total"}
        low, high = candidate["step_s_range"]
        assert low <= candidate["step_s"]["total"] <= high
    assert found["assumptions"]["model"]["shape_is_typical"] is True


def test_how_far_the_memory_reaches() -> None:
    hardware = parse_hardware("1x8xA100-80G")
    task = Task(FAMILIES["llama-13b"], batch=1)
    found = {one.layout.describe(): one for one in fits_of(task, hardware)}
    for name, fit in found.items():
        if fit.micro:
            assert _gigabytes(task, fit.layout, fit.micro) <= 76 < _gigabytes(task, fit.layout, fit.micro + 1), name
            assert fit.nodes == 1
    assert found["ddp"].micro == 0 and found["ddp"].nodes is None  # more nodes don't make it smaller
    assert found["zero3"].micro < found["zero3, recomputation"].micro
    large = {one.layout.describe(): one for one in fits_of(Task(FAMILIES["llama-70b"], batch=1), hardware)}
    nodes = large["zero3"].nodes
    assert nodes is not None and nodes > 1
    for count, fits in ((nodes, True), (nodes - 1, False)):
        there = parse_hardware(f"{count}x8xA100-80G")
        (layout,) = [one for one in layouts(FAMILIES["llama-70b"], there) if one.describe() == "zero3"]
        assert (_gigabytes(Task(FAMILIES["llama-70b"], batch=1), layout, 1) <= 76) == fits
    assert "fewest nodes" in plan("--model", "llama-70b", "--hardware", "8xA100-80G", "--fit")


def _gigabytes(task: Task, layout: Layout, micro: int) -> float:
    same = {"sequence": task.sequence, "optimizer": task.optimizer, "precision": task.precision}
    return memory_of(task.model, layout, micro=micro, fused_attention=True, **same).total / 1e9  # type: ignore[arg-type]


def test_the_page(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    plan(*GUIDE, "--html", str(file))
    text = file.read_text()
    assert text.count("<svg") == 4 and "Take zero1, tensor 2" in text and "A100-80G: 80 GB" in text
    assert "http" not in text and "<script" not in text  # nothing is loaded from elsewhere
    assert "distkit-run -s zero1" in text and "parallel: {tensor: 2}" in text
    with pytest.raises(Exception, match="can't be written"):
        plan(*GUIDE, "--html", "/nowhere/plan.html")


def test_hardware_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text("nodes: 4\ndevices: 8\ndevice: A100-80G\nintra: nvlink\ninter: 200Gbps\n")
    assert parse_hardware(str(file)) == parse_hardware("4x8xA100-80G", intra="nvlink", inter="200Gbps")
    own = "{name: Own, memory: 64e9, bandwidth: 1e12, flops: {fp32: 1e13, bf16: 1e14}, scale_up: 400e9}"
    file.write_text(f"devices: 2\ndevice: {own}\n")
    made = parse_hardware(str(file))
    assert (made.nodes, made.device.name, made.device.memory, made.intra.each_way) == (1, "Own", 64e9, 200e9)
    for text, message in (
        ("devices: 2\n", "doesn't describe hardware"),
        ("devices: 2\ndevice: A100-80G\nnics: 8\n", "has nics"),
        ("devices: 0\ndevice: A100-80G\n", "of 0 devices are none"),
        ("devices: [\n", "doesn't describe hardware"),
    ):
        file.write_text(text)
        with pytest.raises(PlanError, match=message):
            parse_hardware(str(file))
    with pytest.raises(PlanError, match="can't be read"):
        parse_hardware(str(tmp_path / "none.yaml"))


def test_published_sizes() -> None:
    """Counted from the shapes, as the models' own files have them."""
    assert FAMILIES["gpt2"].parameters == 124_439_808
    assert FAMILIES["llama-7b"].parameters == 6_738_415_616
    assert FAMILIES["llama3-8b"].parameters == 8_030_261_248


def test_a_transformers_configuration(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1000,
    )
    config.save_pretrained(tmp_path)
    shape = model_named(str(tmp_path))
    assert shape.parameters == transformers.LlamaForCausalLM(config).num_parameters()
    assert (shape.heads, shape.kv_heads, shape.gated) == (8, 4, True)


def test_the_ready_settings_are_valid() -> None:
    hardware = parse_hardware("4x8xA100-80G")
    found = advise(Task(FAMILIES["llama-13b"], batch=256), hardware)
    for candidate in found.candidates:
        settings = settings_of(found, candidate)
        load_config(overrides=[f"{key}={value}" for key, value in settings.items()])
    assert found.recommended is not None and "train.py" in launch_line(found, found.recommended)


def test_offload_and_recomputation_come_last() -> None:
    """What fits without either is taken; recomputation before offload."""
    small = advise(Task(FAMILIES["gpt2"], batch=64, sequence=1024), parse_hardware("8xA100-80G"))
    assert small.recommended is not None and small.recommended.layout.describe() == "ddp"
    tight = advise(Task(FAMILIES["llama-13b"], batch=8, accumulate=1, sequence=4096), parse_hardware("8xA100-40G"))
    assert tight.recommended is not None
    assert tight.recommended.layout.recompute == "full" and tight.recommended.layout.offload == "none"


def test_tensor_groups_stay_inside_of_a_node() -> None:
    found = advise(Task(FAMILIES["llama-70b"], batch=256), parse_hardware("8x4xA100-80G"))
    assert {c.layout.tensor for c in found.candidates} <= {1, 2, 4}
    for candidate in found.candidates:
        for one in candidate.collectives:
            assert not (one.purpose.startswith("activations") and one.crosses)


def test_other_code_bases() -> None:
    found = advise(Task(FAMILIES["gpt2"], batch=64, framework="tensorflow"), parse_hardware("2x8xV100-32G"))
    assert any("MultiWorkerMirroredStrategy" in rule.says for rule in found.rules)


def test_measured_shares(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    file.write_text('{"compute_share": 0.25}')
    task, hardware = Task(FAMILIES["gpt2"], batch=64), parse_hardware("1x1xA100-80G")
    slow = advise(task, hardware, Calibration.read(file)).candidates[0].step
    assert slow.compute == pytest.approx(2 * advise(task, hardware).candidates[0].step.compute)
    file.write_text('{"compute_share": 2}')
    with pytest.raises(PlanError, match="compute_share"):
        Calibration.read(file)


def test_every_figure_has_a_source() -> None:
    for kind in ("accelerators", "links", "assumed"):
        assert all(entry["source"] for entry in catalogue()[kind].values())
    assert all(rule.source and rule.says for rule in rules())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--params", "13B", "--hardware", "0x8xA100-80G"], "0 nodes"),
        (["--params", "13B", "--hardware", "4x8xA100"], "Hint: --hardware 1x8xA100-80G"),
        (["--params", "13B", "--hardware", "many"], "is no NODESxDEVICESxNAME"),
        (["--params", "x", "--hardware", "8xA100-80G"], "no number of parameters"),
        (["--params", "7B", "--hardware", "8xA100-80G", "--inter", "-3Gbps"], "no speed above 0"),
        (["--params", "7B", "--hardware", "8xA100-80G", "--intra", "nvlnk"], "Hint: --intra nvlink"),
        (["--params", "7B", "--hardware", "8xT4-16G", "--intra", "nvlink"], "has none"),
        (["--model", "lama-7b", "--hardware", "8xA100-80G"], "Hint: --model llama-7b"),
        (["--params", "7B", "--batch", "0", "--hardware", "8xA100-80G"], "--batch was set to 0"),
        (["--params", "7B", "--optimizer", "adm", "--hardware", "8xA100-80G"], "Hint: --optimizer adam"),
        (["--params", "7B"], "--hardware 4x8xA100-80G"),
        (["--params", "7B", "--model", "gpt2", "--hardware", "8xA100-80G"], "leave one out"),
        ([], "distkit plan --params 7B"),
    ],
)
def test_nonsense(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from distkit.errors import DistkitError

    with pytest.raises(DistkitError) as error:
        CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    assert message in str(error.value)


def test_sizes() -> None:
    assert [parse_parameters(text) for text in ("13B", "350M", "1.5k", "2e3")] == [
        13_000_000_000,
        350_000_000,
        1500,
        2000,
    ]
