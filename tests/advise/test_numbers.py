"""Published figures come out of model, hardware and strategy. Each test names its source."""

from __future__ import annotations

from typing import Any

import pytest

from distkit.advise.activations import layer_activations
from distkit.advise.advisor import Advice, Candidate, Task, advise
from distkit.advise.engines import ENGINES
from distkit.advise.hardware import parse_hardware, parse_speed
from distkit.advise.layout import Layout, layouts
from distkit.advise.memory import memory_of, state_sizes
from distkit.advise.models import FAMILIES, model_of_size
from distkit.advise.traffic import collectives_of

GUIDE_13B = parse_hardware("4x8xA100-80G", intra="nvlink", inter="200Gbps")


def layout(strategy: str, data: int, tensor: int = 1, **more: Any) -> Layout:
    hardware = parse_hardware(f"{data}x{tensor}xA100-80G")
    found = next(
        one
        for one in layouts(model_of_size(13_000_000_000), hardware)
        if one.strategy == strategy and one.tensor == tensor
    )
    return Layout(found.strategy, tensor, data, data, found.shards, **more)


def states_gb(parameters: float, one: Layout) -> float:
    model = model_of_size(round(parameters))
    memory = memory_of(model, one, micro=1, sequence=8, optimizer="adam", precision="bf16", fused_attention=True)
    return memory.states / 1e9


@pytest.mark.parametrize(("parameters", "gigabytes"), [(7e9, 112), (13e9, 208)])
@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 8)])
def test_sixteen_bytes_a_parameter(parameters: float, gigabytes: int, strategy: str, ranks: int) -> None:
    """Guide 1, sections 4.2 and 4.3: Adam, mixed precision."""
    torch, paper = ENGINES["torch"], ENGINES["published"]
    assert state_sizes("bf16", "adam", torch).total == state_sizes("fp16", "adam", paper).total == 16
    assert states_gb(parameters, layout(strategy, ranks)) == pytest.approx(gigabytes)


@pytest.mark.parametrize(
    ("strategy", "printed"), [("ddp", "120.0"), ("zero1", "31.4"), ("zero2", "16.6"), ("zero3", "1.9")]
)
def test_zero_figure_1(strategy: str, printed: str) -> None:
    """arXiv 1910.02054, figure 1: 7.5B parameters on 64 ranks, to the printed digit."""
    assert f"{states_gb(7.5e9, layout(strategy, 64, published=True)):.1f}" == printed


@pytest.mark.parametrize(("strategy", "ratio"), [("zero1", 1.0), ("zero2", 1.0), ("zero3", 1.5)])
def test_volume_against_data_parallelism(strategy: str, ratio: float) -> None:
    """arXiv 1910.02054, section 7, with gradients of as many bytes (fp32)."""
    model, hardware = model_of_size(7_500_000_000), parse_hardware("8x8xA100-80G")

    def volume(name: str) -> float:
        same: dict[str, Any] = {"micro": 1, "accumulate": 1, "sequence": 8, "optimizer": "adam", "precision": "fp32"}
        return sum(c.sent for c in collectives_of(model, layout(name, 64, published=True), hardware, **same))

    assert volume("ddp") == pytest.approx(2 * 63 / 64 * 4 * 7.5e9)  # a ring: Patarasu and Yuan 2009
    assert volume(strategy) / volume("ddp") == pytest.approx(ratio)


def test_an_exchange_of_fp32_gradients() -> None:
    """Guide 1, section 4.2: 28 GB over 25 Gbit/s take about 9 s."""
    gradients = 7e9 * state_sizes("fp32", "adam", ENGINES["torch"]).gradient
    assert gradients == 28e9
    assert parse_speed("--inter", "25Gbps") == pytest.approx(3.1e9, rel=0.01)
    assert gradients / parse_speed("--inter", "25Gbps") == pytest.approx(9, rel=0.02)


@pytest.mark.parametrize(
    ("tensor", "split", "formula"), [(1, False, 34 + 80), (8, False, 10 + 24 / 8 + 80 / 8), (8, True, 114 / 8)]
)
def test_activations_of_a_layer(tensor: int, split: bool, formula: float) -> None:
    """arXiv 2205.05198, table 2, with s = 2048, b = 4, h = 12288, a = 96: 5 a s / h = 80."""
    found = layer_activations(2048, 4, 12288, 96, tensor=tensor, split_tokens=split)
    assert found == pytest.approx(2048 * 4 * 12288 * formula)


def test_inside_and_outside_of_a_node() -> None:
    """Guide 1, section 4.4: NVLink's 600 GB/s against 25 GB/s, 24 times; a data sheet counts both directions."""
    assert 2 * GUIDE_13B.intra.each_way / GUIDE_13B.inter.each_way == pytest.approx(24)


@pytest.fixture(scope="module")
def guide() -> Advice:
    """Guide 1, section 4.3: 13B on 4 nodes of 8 A100."""
    return advise(Task(model_of_size(13_000_000_000), batch=256, accumulate=4), GUIDE_13B)


def find(advice: Advice, strategy: str, tensor: int = 1, offload: str = "none") -> Candidate:
    return next(
        c for c in advice.candidates
        if (c.layout.strategy, c.layout.tensor, c.layout.offload) == (strategy, tensor, offload)
    )  # fmt: skip


def test_13b_data_parallelism_is_out(guide: Advice) -> None:
    ddp = find(guide, "ddp")
    assert not ddp.fits and ddp.memory.states == pytest.approx(208e9)
    assert "optimizer" in ddp.reason


def test_13b_zero3_with_offload(guide: Advice) -> None:
    """About 45 GB a rank, within a fifth; the network takes 40 % of a step, here within 25 points."""
    found = find(guide, "zero3", offload="optimizer")
    assert found.fits and found.memory.total == pytest.approx(45e9, rel=0.2)
    assert found.step.communication / found.step.total == pytest.approx(0.4, abs=0.25)


def test_13b_tensor_groups_inside_are_recommended(guide: Advice) -> None:
    """The guide: 12 s to 6.5 s. At least 1.5 times as fast as ZeRO-3 alone."""
    chosen = guide.recommended
    assert chosen is not None and chosen.layout.tensor > 1 and chosen.layout.shards and chosen.layout.offload == "none"
    assert find(guide, "zero3").step.total / chosen.step.total >= 1.5
    assert "tensor-inside-sharding-across" in [rule.id for rule in guide.rules]


def test_scaling_of_fsdp() -> None:
    """torchtitan's benchmarks: Llama 3.1 8B on 8 to 128 H100, 97.3 % of the speed for each; within 5 points."""

    def each(nodes: int) -> float:
        hardware = parse_hardware(f"{nodes}x8xH100-80G", inter="3200Gbps")
        task = Task(FAMILIES["llama3-8b"], batch=2 * 8 * nodes, accumulate=1, sequence=8192, recompute="full")
        return find(advise(task, hardware), "fsdp").tokens_per_s / hardware.devices

    assert each(16) / each(1) == pytest.approx(0.973, abs=0.05)
