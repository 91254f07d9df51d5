"""`distkit plan` on sizes and hardware: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distkit.advise.advisor import Task, advise
from distkit.advise.fitting import fits_of
from distkit.advise.hardware import catalogue, parse_hardware
from distkit.advise.layout import Layout, layouts
from distkit.advise.memory import memory_of
from distkit.advise.models import FAMILIES, model_named, parse_parameters
from distkit.advise.page import page_of
from distkit.advise.report import launch_line, settings_of
from distkit.advise.rules import rules
from distkit.advise.timing import Calibration, compute_share_of
from distkit.cli import app
from distkit.config import load_config
from distkit.errors import PlanError, UsageError

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
    why = r"needs [23]\d\d\.\d GB of 76\.0 GB, of which 104\.0 GB are optimizer"
    assert re.search(why, " ".join(text.split()))  # why ddp is out
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
    nodes = large["zero3, recomputation"].nodes
    assert nodes is not None and nodes > 1
    for count, fits in ((nodes, True), (nodes - 1, False)):
        there = parse_hardware(f"{count}x8xA100-80G")
        (layout,) = [one for one in layouts(FAMILIES["llama-70b"], there) if one.describe() == "zero3, recomputation"]
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
    file.write_text("devices: 8\ndevice: A100-80G\nstorage: 5GB/s\n")
    assert parse_hardware(str(file)).storage == 5e9 and parse_hardware(str(file), storage="1GB/s").storage == 1e9
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
        (["--params", "7B", "--hardware", "8xA100-80G", "--compress", "bf61"], "Hint: --compress bf16"),
        (["--params", "7B", "--hardware", "8xA100-80G", "--compress", "topk"], "no strategy has"),
        (["--params", "7B", "--hardware", "8xA100-80G", "--storage", "fast"], "Hint: --storage"),
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


def test_networks_for_images() -> None:
    """Samples instead of tokens, in the table, in JSON and on the page."""
    words = ["--model", "resnet101", "--batch", "32768", "--hardware", "128x4xP100", "--inter", "25Gbps"]
    text = plan(*words, "--optimizer", "momentum", "--precision", "fp32")
    assert "samples/s" in text and "tokens" not in text and "images of 224 x 224" in text
    found = json.loads(plan(*words, "--json"))
    assert all(c["tokens_per_s"] == pytest.approx(c["samples_per_s"], rel=1e-5) for c in found["candidates"])
    assert {c["tensor"] for c in found["candidates"]} == {1} and found["assumptions"]["sequence"] == 1
    with pytest.raises(UsageError, match="takes images"):
        plan(*words, "--seq", "128")
    task, hardware = Task(FAMILIES["vgg16"], batch=64, precision="fp16"), parse_hardware("1x1xA100-80G")
    assert compute_share_of(task.model, hardware, "fp16", Calibration.assumed()) == pytest.approx(0.2)
    page = page_of(advise(task, hardware))
    assert "64 samples" in page and "Samples a second" in page


def test_data_parallelism_in_one_process() -> None:
    """A candidate on one machine only, slower than ddp; its first device holds all outputs; one process starts it."""
    task = Task(FAMILIES["gpt2"], batch=64, sequence=1024)
    found = advise(task, parse_hardware("8xA100-80G"))
    dp, ddp = (next(c for c in found.candidates if c.layout.strategy == name) for name in ("dp", "ddp"))
    assert dp.step.total > ddp.step.total and dp.memory.activations > ddp.memory.activations
    assert "--nproc 1 " in launch_line(found, dp) and "--nproc 8 " in launch_line(found, ddp)
    assert "dp" not in {c.layout.strategy for c in advise(task, parse_hardware("2x8xA100-80G")).candidates}
    assert next(one for one in fits_of(task, parse_hardware("8xA100-80G")) if one.layout.strategy == "dp").nodes == 1


def test_horovod_where_it_is_in_use() -> None:
    hardware = parse_hardware("2x8xV100-32G")
    found = advise(Task(FAMILIES["gpt2"], batch=256, framework="horovod", precision="fp16"), hardware)
    assert found.recommended is not None and found.recommended.layout.strategy == "horovod"
    found = advise(Task(FAMILIES["gpt2"], batch=256, precision="fp16"), hardware)
    assert "horovod" not in {c.layout.strategy for c in found.candidates}


def test_split_layers_of_megatron() -> None:
    """Named where it costs the same, instead of being listed once more."""
    assert "megatron-zero1 costs the same" in plan(*GUIDE)
    found = json.loads(plan(*GUIDE, "--json"))["candidates"]
    zero = {(c["strategy"], c["tensor"]): c["also"] for c in found}
    assert (zero["zero3", 1], zero["zero3", 4], zero["fsdp", 4]) == (None, "megatron-zero3", None)


def test_compression_and_checkpoints() -> None:
    text = " ".join(plan(*GUIDE, "--compress", "bf16", "--storage", "10GB/s").split())
    assert "a checkpoint of 156 GB" in text and "is written 15.6 s later" in text
    assert "compress.method=bf16" in text
    found = json.loads(plan(*GUIDE, "--json"))
    assert found["checkpoint"]["bytes"] == 12 * 13_000_000_000
    by_method = {row["method"]: row for row in found["compression"]["exchange_of_fp32_gradients"]}
    assert set(by_method) == {"none", "fp16", "bf16", "topk", "powersgd"}
    assert "ddp" in by_method["fp16"]["strategies"]


def test_a_slow_network_is_said() -> None:
    def held(inter: str, compress: str) -> set[str]:
        task = Task(FAMILIES["gpt2-large"], batch=64, sequence=1024, precision="fp16", compress=compress)
        return {rule.id for rule in advise(task, parse_hardware("2x8xV100-32G", inter=inter)).rules}

    assert "network-bound" in held("10Gbps", "none")
    assert "network-bound" not in held("10Gbps", "fp16") | held("400Gbps", "none")
