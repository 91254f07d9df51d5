"""Published speeds, traffic and checkpoints against what the advisor computes. Each test names its source and its band."""

from __future__ import annotations

import time

import pytest

from distkit.advise.advisor import Advice, Candidate, Task, advise
from distkit.advise.checkpointing import checkpoint_cost
from distkit.advise.compression import compression_of, low_rank_values, matrices_of, sparse_bytes
from distkit.advise.hardware import Hardware, parse_hardware
from distkit.advise.layout import Layout
from distkit.advise.models import FAMILIES, model_of_size
from distkit.advise.timing import Calibration, StepSeconds, collective_seconds, step_seconds
from distkit.advise.traffic import Collective

GUIDE_13B = parse_hardware("4x8xA100-80G", intra="nvlink", inter="200Gbps")


def find(advice: Advice, strategy: str, tensor: int = 1, offload: str = "none", recompute: str = "") -> Candidate:
    return next(
        c for c in advice.candidates
        if (c.layout.strategy, c.layout.tensor, c.layout.offload) == (strategy, tensor, offload)
        and recompute in ("", c.layout.recompute)
    )  # fmt: skip


# -- the guide's 13B case -----------------------------------------------------------------------------------------------
# It gives a batch of 256 in 4 micro batches, 12 s and 1200 tokens/s, but no length. 1200 tokens/s of each of the 32
# devices (of all together it would be 56 tokens a sequence) are 1800 tokens a sequence.

_TOKENS = 1200 * 12 * 32 // 256


@pytest.fixture(scope="module")
def at_best() -> Advice:
    """Links at their full speed, everything hidden that has something to hide under, devices at the range's upper end."""
    best = Calibration(Calibration.assumed("high").compute_share, 1.0, 1.0, measured=True)
    task = Task(model_of_size(13_000_000_000), batch=256, accumulate=4, sequence=_TOKENS, published=True)
    return advise(task, GUIDE_13B, best)


def test_13b_steps(at_best: Advice) -> None:
    """Guide 1, section 4.3: ZeRO-3 with offload 12 s, 40 % of it network; tensor groups of 4 inside, 6.5 s.

    Steps within a quarter, shares within 10 points. Out of reach are exactly 6.5 s: computing alone takes 6.3 s at 60 %
    of the devices' speed. And the guide's "ZeRO-3 across nodes": in 4 micro batches its weights are gathered four
    times, 10.8 s; with ZeRO-1 they stay.
    """
    alone, hybrid = find(at_best, "zero3", offload="optimizer"), find(at_best, "zero1", tensor=4)
    assert alone.fits and hybrid.fits
    assert alone.step.total == pytest.approx(12, rel=0.25)
    assert hybrid.step.total == pytest.approx(6.5, rel=0.25)
    assert alone.step.communication / alone.step.total == pytest.approx(0.4, abs=0.1)
    assert hybrid.step.compute / hybrid.step.total == pytest.approx(0.88, abs=0.1)  # utilisation
    assert 1 - alone.step.communication / alone.step.total == pytest.approx(0.65, abs=0.15)


def test_13b_throughput(at_best: Advice) -> None:
    """The same: 1200 to 2100 tokens/s and device, 75 % more; within a fifth, the ratio within 0.15."""
    alone, hybrid = find(at_best, "zero3", offload="optimizer"), find(at_best, "zero1", tensor=4)
    assert alone.tokens_per_s / 32 == pytest.approx(1200, rel=0.2)
    assert hybrid.tokens_per_s / 32 == pytest.approx(2100, rel=0.2)
    assert hybrid.tokens_per_s / alone.tokens_per_s == pytest.approx(1.75, abs=0.15)


def test_13b_with_what_is_assumed() -> None:
    """Without those favours, as `distkit plan` says it: the ratio within 0.35."""
    task = Task(model_of_size(13_000_000_000), batch=256, accumulate=4, sequence=_TOKENS, published=True)
    found = advise(task, GUIDE_13B)
    ratio = find(found, "zero3", offload="optimizer").step.total / find(found, "zero1", tensor=4).step.total
    assert ratio == pytest.approx(1.75, abs=0.35)


def test_a_closed_form_is_quick() -> None:
    began = time.process_time()
    advise(Task(model_of_size(13_000_000_000), batch=256), GUIDE_13B)
    assert time.process_time() - began < 1


# -- data parallelism ---------------------------------------------------------------------------------------------------


def test_an_exchange_against_computing() -> None:
    """Guide 1, section 4.2: 7B, fp32 gradients over 25 Gbit/s about 9 s, computing about 2 s (here of 4 x 2048 tokens)."""
    hardware = parse_hardware("2x1xA100-80G", inter="25Gbps")
    ddp = find(advise(Task(model_of_size(7_000_000_000), batch=8, accumulate=1), hardware), "ddp", recompute="none")
    (exchange,) = ddp.collectives
    assert collective_seconds(exchange, hardware, link_share=1.0) == pytest.approx(9, rel=0.05)
    assert ddp.step.compute == pytest.approx(2, rel=0.25)
    assert ddp.step.communication > 3 * ddp.step.compute


@pytest.mark.parametrize("ranks", [2, 8, 512])
def test_a_ring(ranks: int) -> None:
    """Patarasu and Yuan 2009: 2 (N-1)/N of the message for an all-reduce, half of it for its two parts."""
    sent = {
        what: Collective(what, "", 1e9, ranks, ranks, 1, 1.0, True).sent
        for what in ("all_reduce", "all_gather", "reduce_scatter")
    }
    assert sent["all_reduce"] == pytest.approx(2 * (ranks - 1) / ranks * 1e9)
    assert sent["all_gather"] == sent["reduce_scatter"] == pytest.approx(sent["all_reduce"] / 2)


def test_what_hides_under_what() -> None:
    """The exchange of a step goes with the last micro batch and hides under that one's backward; its last bucket never."""
    hardware, cost = parse_hardware("2x8xV100-32G", inter="25Gbps"), Calibration(0.5, 0.8, 1.0, measured=True)
    for accumulate in (1, 4):
        task = Task(FAMILIES["gpt2-large"], 64, accumulate, sequence=1024, precision="fp16", recompute="none")
        step = find(advise(task, hardware, cost), "ddp").step
        assert step.hidden == pytest.approx(step.compute * 2 / 3 / accumulate)
    quick = parse_hardware("2x8xV100-32G", inter="400Gbps")
    ddp = find(advise(Task(FAMILIES["gpt2-large"], 512, 1, sequence=1024, recompute="none"), quick, cost), "ddp")
    last = 1 / ddp.collectives[0].parts
    assert ddp.step.communication == pytest.approx(last * (ddp.step.hidden + ddp.step.communication))


def images_per_s(name: str, nodes: int, each: int) -> float:
    """Of a device, with 64 images on it, in fp32."""
    task = Task(FAMILIES[name], 64 * nodes * each, 1, optimizer="momentum", precision="fp32", framework="horovod")
    found = advise(task, parse_hardware(f"{nodes}x{each}xP100", inter="25Gbps"))
    return find(found, "single" if nodes * each == 1 else "horovod").tokens_per_s / (nodes * each)


@pytest.mark.parametrize(("name", "measured"), [("inception-v3", 142), ("resnet50", 219), ("vgg16", 154)])
def test_one_p100(name: str, measured: float) -> None:
    """tensorflow.org/performance/benchmarks, May 2017: what the plan's utilisation is taken from comes out of it."""
    assert images_per_s(name, 1, 1) == pytest.approx(measured)


def test_horovod_on_512_devices() -> None:
    """Horovod's benchmarks: 128 x 4 P100, 25 Gbit/s: Inception V3 and ResNet-101 90 %, VGG-16 68 %; within 10 points.

    The first two come out too high (stragglers and the host's part of 512 processes aren't in the model), VGG-16 too low.
    """
    found = {
        name: images_per_s(name, 128, 4) / images_per_s(name, 1, 1) for name in ("inception-v3", "resnet101", "vgg16")
    }
    assert found["inception-v3"] == pytest.approx(0.9, abs=0.1)
    assert found["resnet101"] == pytest.approx(0.9, abs=0.1)
    assert found["vgg16"] == pytest.approx(0.68, abs=0.1)
    assert min(found["inception-v3"], found["resnet101"]) > found["vgg16"] + 0.15


# -- sharding against tensor groups -------------------------------------------------------------------------------------

_ZERO3 = [  # model, devices, micro batch, TFLOP/s of a device
    ("gpt3-175b", 384, 4, 144),
    ("gpt3-175b", 768, 2, 88),
    ("gpt3-175b", 1536, 1, 44),
    ("mt-nlg-530b", 640, 4, 138),
    ("mt-nlg-530b", 1120, 2, 98),
    ("mt-nlg-530b", 2240, 1, 48),
]
_HYBRID = [  # PTD-P, at a batch of 1536 and 2240
    ("gpt3-175b", 384, 1536, 153),
    ("gpt3-175b", 768, 1536, 149),
    ("gpt3-175b", 1536, 1536, 141),
    ("mt-nlg-530b", 560, 2240, 171),
    ("mt-nlg-530b", 1120, 2240, 167),
    ("mt-nlg-530b", 2240, 2240, 159),
]


def teraflops(name: str, devices: int, batch: int, tensor: int, inter: str) -> float:
    """Of a device, with the recomputation counted, as the paper does; of the faster of ZeRO-3 and FSDP."""
    hardware = parse_hardware(f"{devices // 8}x8xA100-80G", inter=inter)
    accumulate = 1 if tensor == 1 else None
    task = Task(FAMILIES[name], batch, accumulate, precision="fp16", recompute="full", published=True)
    found = advise(task, hardware)
    step = min(find(found, strategy, tensor).step.total for strategy in ("zero3", "fsdp"))
    return 4 / 3 * FAMILIES[name].flops_per_token(2048) * batch * 2048 / step / devices / 1e12


def sharded(name: str, devices: int, micro: int) -> float:
    """All over one ring, which leaves a node by one of its eight adapters of 200 Gbit/s."""
    return teraflops(name, devices, micro * devices, 1, "200Gbps")


def grouped(name: str, devices: int, batch: int) -> float:
    """Tensor groups of 8: eight rings leave a node, each by an adapter of its own."""
    return teraflops(name, devices, batch, 8, "1600Gbps")


@pytest.mark.parametrize(("name", "devices", "micro", "published"), _ZERO3)
def test_zero3_at_a_fixed_batch(name: str, devices: int, micro: int, published: int) -> None:
    """arXiv 2104.04473, table 2, ZeRO-3: within 15 %, at the speed of one of the eight adapters of a node.

    With all eight its network would hide and nothing be lost at 1536 devices, so this is what its version of DeepSpeed
    got out of them.
    """
    assert sharded(name, devices, micro) == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize(("name", "devices", "batch", "published"), _HYBRID)
def test_tensor_groups_at_a_fixed_batch(name: str, devices: int, batch: int, published: int) -> None:
    """The same, PTD-P: within 25 %. distkit has no pipeline, so it is tensor groups of 8 with sharding across here."""
    assert grouped(name, devices, batch) == pytest.approx(published, rel=0.25)


@pytest.mark.parametrize(
    ("name", "batch", "few", "published", "band"),
    [("gpt3-175b", 1536, (384, 384), 1.06, 0.1), ("mt-nlg-530b", 2240, (640, 560), 1.24, 0.3)],
)
def test_tensor_groups_against_zero3(
    name: str, batch: int, few: tuple[int, int], published: float, band: float
) -> None:
    """arXiv 2104.04473, section 5.2: 6 % (175B) and 24 % (530B) faster on few devices, 70 % on about twice as many.

    The 70 % come out within 15 points. The 6 % and 24 % don't: where the network hides, both ways compute at half of the
    devices' speed here, while PTD-P's kernels reached 49 and 55 %, ZeRO-3's 46 and 44. So the bands are 10 and 30 points.
    """
    twice = {"gpt3-175b": 768, "mt-nlg-530b": 1120}[name]
    assert grouped(name, twice, batch) / sharded(name, twice, 2) == pytest.approx(1.7, abs=0.15)
    assert grouped(name, few[1], batch) / sharded(name, few[0], 4) == pytest.approx(published, abs=band)


# -- offload ------------------------------------------------------------------------------------------------------------


def test_adam_on_the_host() -> None:
    """ZeRO-Offload, arXiv 2101.06840, table 4: CPU Adam on a DGX-2, 1B 0.22 s, 4B 1.03 s, 10B 2.57 s; within 30 %.

    The table has Adam's 28 bytes a parameter, not the 8 of the pass that scales and clips gradients.
    """
    hardware = parse_hardware("1x16xV100-32G")
    for billions, published in ((1, 0.22), (4, 1.03), (10, 2.57)):
        assert host_step(hardware, billions * 1_000_000_000).host * 28 / 36 == pytest.approx(published, rel=0.3)


def host_step(hardware: Hardware, parameters: int) -> StepSeconds:
    layout = Layout("zero2", 1, hardware.devices, hardware.devices, frozenset({"gradients", "optimizer"}), "optimizer")
    return step_seconds(
        model_of_size(parameters), layout, hardware, (), tokens=1, sequence=1, optimizer="adam", precision="fp16",
        host_bytes=0, calibration=Calibration.assumed(),
    )  # fmt: skip


@pytest.mark.parametrize("micro", [2, 4])
def test_offload_slows_down(micro: int) -> None:
    """Guide 1, section 4.4: 30 to 50 % slower. 7B on 8 A100, ZeRO-3 with recomputation, 2 or 4 x 4096 tokens a device.

    What it costs is the same for any batch, about 3 s: with larger ones it is less, 19 % with 8 x 4096 tokens.
    """

    def slower(micro: int) -> float:
        task = Task(FAMILIES["llama-7b"], 8 * micro, 1, sequence=4096, recompute="full")
        found = advise(task, parse_hardware("8xA100-80G"))
        return 1 - find(found, "zero3").step.total / find(found, "zero3", offload="optimizer").step.total

    assert 0.3 <= slower(micro) <= 0.5
    assert slower(8) < 0.3


def test_offload_with_accumulation() -> None:
    """Gradients that are added up on the device and kept on the host come and go with each micro batch."""

    def host(accumulate: int) -> float:
        task = Task(FAMILIES["llama-7b"], 64, accumulate)
        return find(advise(task, parse_hardware("8xA100-80G")), "zero3", offload="optimizer").traffic.host

    gradients = 4 * FAMILIES["llama-7b"].parameters / 8
    assert host(1) == pytest.approx(4 * gradients)  # down, back, down for the optimizer; weights
    assert host(4) - host(1) == pytest.approx(3 * 2 * gradients)


# -- gradients on the wire ----------------------------------------------------------------------------------------------


def test_sparse_gradients() -> None:
    """Guide 1, section 4.4: TopK takes at least 90 % off, here with 1 % of the values kept, each with its index.

    So it is for a rank's own message at any size, and for all that it sends up to 10 ranks: the messages differ, so
    each goes to all, and at 32 ranks two thirds are saved.
    """
    values = 7e9
    assert sparse_bytes(values, 0.01, 2) <= 0.1 * 4 * values  # one message, to the only other rank
    whole = {ranks: 2 * (ranks - 1) / ranks * 4 * values for ranks in (2, 8, 10, 32)}
    for ranks in (2, 8, 10):
        assert sparse_bytes(values, 0.01, ranks) <= 0.1 * whole[ranks] * (1 + 1e-9)
    assert sparse_bytes(values, 0.01, 32) / whole[32] == pytest.approx(0.32)
    assert sparse_bytes(values, 0.001, 100) <= 0.1 * 2 * 99 / 100 * 4 * values * (1 + 1e-9)  # as arXiv 1712.01887 keeps


def test_low_rank_gradients() -> None:
    """PowerSGD, arXiv 1905.13727: r (n + m) values of an n x m matrix, and never more than it has."""
    assert low_rank_values(4096, 11008, 4) == 4 * (4096 + 11008)
    assert low_rank_values(3, 3, 4) == 9
    model = FAMILIES["llama-7b"]
    whole = sum(rows * columns * count for rows, columns, count in matrices_of(model))
    assert whole == pytest.approx(model.parameters, rel=1e-3)  # all but the norms
    rows = {one["method"]: one for one in compression_of(model, 8, "none", ("ddp",))["exchange_of_fp32_gradients"]}
    expected = sum(4 * (n + m) * count for n, m, count in matrices_of(model)) + model.parameters - whole
    assert rows["powersgd"]["bytes"] == pytest.approx(2 * 7 / 8 * 4 * expected, rel=1e-6)
    assert rows["bf16"]["bytes"] == rows["none"]["bytes"] / 2
    assert rows["bf16"]["strategies"] == ["ddp"] and rows["topk"]["strategies"] == []


def test_compressed_gradients_in_a_plan() -> None:
    """Strategies that have the method send half of fp32; the others as before."""
    hardware = parse_hardware("2x8xV100-32G", inter="25Gbps")
    task = Task(FAMILIES["gpt2-large"], 64, framework="horovod", precision="fp32", sequence=1024)
    plain, small = advise(task, hardware), advise(Task(**{**vars(task), "compress": "bf16"}), hardware)
    assert find(small, "ddp").traffic.inter == pytest.approx(find(plain, "ddp").traffic.inter / 2)
    assert find(small, "ddp").step.total < find(plain, "ddp").step.total
    assert find(small, "horovod").traffic == find(plain, "horovod").traffic  # it has fp16 only
    assert (find(small, "ddp").compress, find(small, "horovod").compress) == ("bf16", "none")


# -- checkpoints --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_in_the_background() -> None:
    """PyTorch blog, June 2024: 7B, 148.8 s blocking, 6.3 s in the background; 23.6 times less, 10 to 20 in general.

    84 GB (fp32 parameters and two states) in 148.8 s are 0.56 GB/s, the storage that is put in, as the blog has none.
    The copy goes into fresh memory, on the 8 ranks of a node, at the speed that its 13B model had (14 s): within a quarter.
    """
    hardware = parse_hardware("1x8xA100-80G", storage="0.5645GB/s")
    layout = Layout("fsdp", 1, 8, 8, frozenset({"parameters", "gradients", "optimizer"}))
    cost = checkpoint_cost(
        model_of_size(7_000_000_000), layout, hardware, optimizer="adamw", precision="bf16", link_share=0.8
    )
    assert cost.bytes == pytest.approx(84e9)
    assert cost.blocking_s == pytest.approx(148.8, rel=0.01)
    assert cost.first_s == pytest.approx(6.3, rel=0.25)
    assert 10 <= cost.blocking_s / cost.first_s <= 24
    assert cost.background_s < 0.1 * cost.first_s  # memory that is kept and pinned, as distkit does it from then on


def test_a_checkpoint_of_the_recommended() -> None:
    found = advise(Task(FAMILIES["gpt2"], 64, sequence=1024), parse_hardware("8xA100-80G", storage="1GB/s"))
    assert found.checkpoint is not None
    assert found.checkpoint.bytes == 12 * FAMILIES["gpt2"].parameters
    assert found.checkpoint.written_s == pytest.approx(12 * FAMILIES["gpt2"].parameters / 1e9)
    assert set(found.as_dict()["checkpoint"]) >= {"bytes", "blocking_s", "background_s"}
