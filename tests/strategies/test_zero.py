"""What is particular to DeepSpeed's ZeRO; what every strategy must do is in tests/contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool, WorkerError

CASES = "tests.strategies.zero_cases:"
STAGES = ["zero1", "zero2", "zero3"]

every_stage = pytest.mark.parametrize("strategy", STAGES)


def column(result: dict[str, Any], name: str) -> list[float]:
    return [line[name] for line in result["log"]]


@pytest.fixture(scope="module")
def single(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return pool.run(CASES + "trained", 1, run_dir=str(tmp_path_factory.mktemp("single")), strategy="single")[0]


@pytest.mark.parametrize(
    ("strategy", "offload"),
    [("zero1", "optimizer"), ("zero2", "optimizer"), ("zero3", "optimizer"), ("zero3", "params")],
)
def test_offload_changes_no_number(
    pool: Pool, tmp_path: Path, single: dict[str, Any], strategy: str, offload: str
) -> None:
    settings = {"memory.offload": offload, "batch.accumulate": 2}
    found = pool.run(CASES + "trained", 2, run_dir=str(tmp_path), strategy=strategy, settings=settings)[0]
    assert found["optimizer"] == "AdamW"
    assert found["same_optimizer"]
    assert column(found, "loss") == pytest.approx(column(single, "loss"), abs=1e-5)
    assert column(found, "grad_norm") == pytest.approx(column(single, "grad_norm"), rel=1e-4)


LAYOUTS = {
    "round robin": ("zero2", {"round_robin_gradients": True}),
    "aligned": ("zero1", {"parameter_alignment": True}),
    "small buckets": ("zero2", {"reduce_bucket_size": 300, "allgather_bucket_size": 300}),
    "not contiguous": ("zero2", {"contiguous_gradients": False, "overlap_comm": False}),
    "sub-groups": ("zero3", {"sub_group_size": 500, "stage3_param_persistence_threshold": 0}),
    "all-reduce": ("zero3", {"reduce_scatter": False, "stage3_param_persistence_threshold": 100}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_way_of_laying_partitions_out(pool: Pool, tmp_path: Path, single: dict[str, Any], layout: str) -> None:
    """Pieces are found where DeepSpeed puts them: the same losses, and the same weights in the model's names."""
    strategy, zero = LAYOUTS[layout]
    settings = {"engine.deepspeed": {"zero_optimization": zero}, "batch.accumulate": 3}
    found = pool.run(CASES + "trained", 4, run_dir=str(tmp_path), strategy=strategy, settings=settings)[0]
    assert column(found, "loss") == pytest.approx(column(single, "loss"), abs=1e-5)
    assert sorted(found["model"]) == sorted(single["model"])


@every_stage
def test_two_backwards_in_a_window(pool: Pool, tmp_path: Path, strategy: str) -> None:
    """Two forwards, then two backwards: both count."""
    expected = pool.run(CASES + "two_backwards", 1, run_dir=str(tmp_path / "s"), strategy="single")[0]
    found = pool.run(CASES + "two_backwards", 2, run_dir=str(tmp_path / "z"), strategy=strategy)[0]
    assert found == pytest.approx(expected, rel=1e-4)


@every_stage
@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameters_that_take_part_sometimes(pool: Pool, tmp_path: Path, strategy: str, accumulate: int) -> None:
    """P3: no weight decay, no stale gradient and no step is counted where there was no gradient."""
    arguments = {"accumulate": accumulate}
    expected = pool.run(CASES + "sometimes_used", 1, run_dir=str(tmp_path / "s"), strategy="single", **arguments)[0]
    found = pool.run(CASES + "sometimes_used", 2, run_dir=str(tmp_path / "z"), strategy=strategy, **arguments)[0]
    assert expected["steps"]["sometimes.weight"] == 2.0
    assert found["steps"] == expected["steps"]
    for name, values in expected["state"].items():
        assert found["state"][name] == pytest.approx(values, abs=2e-5)
    source = str(tmp_path / "z" / "checkpoints" / "step-00000005")
    one = pool.run(CASES + "reloaded", 1, run_dir=str(tmp_path / "r1"), strategy="single", source=source)[0]
    two = pool.run(CASES + "reloaded", 2, run_dir=str(tmp_path / "r2"), strategy=strategy, source=source)[0]
    assert one == two


def test_use_that_differs_between_ranks_is_named(pool: Pool, tmp_path: Path) -> None:
    """DeepSpeed alone would add gradients of different parameters up."""
    with pytest.raises(WorkerError, match=r"some ranks only.*sometimes\.weight"):
        pool.run(CASES + "used_on_one_rank", 2, run_dir=str(tmp_path), strategy="zero1")


@every_stage
def test_one_optimizer_over_two_models(pool: Pool, tmp_path: Path, strategy: str) -> None:
    expected = pool.run(CASES + "one_optimizer_two_models", 1, run_dir=str(tmp_path / "s"), strategy="single")[0]
    found = pool.run(CASES + "one_optimizer_two_models", 2, run_dir=str(tmp_path / "z"), strategy=strategy)[0]
    assert column(found, "loss") == pytest.approx(column(expected, "loss"), abs=1e-6)
    for mine, theirs in zip(found["states"], expected["states"], strict=True):
        assert sorted(mine) == sorted(theirs)
        for name, values in theirs.items():
            assert mine[name] == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("two optimizers", r"two optimizers step parameters of one TinyGPT.*\n.*two parameter groups"),
        ("apart", r"belong to no model of the same prepare\(\) call.*\n.*prepare\(model, optimizer\)"),
        ("whole tensors", r"Adafactor needs each parameter whole.*\n.*--strategy ddp"),
        ("empty", r"1 have no elements: none\n.*--strategy fsdp"),
        ("nothing to train", r"has no parameter that wants a gradient"),
    ],
)
def test_refusals(pool: Pool, tmp_path: Path, what: str, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        pool.run(CASES + "refused", 1, run_dir=str(tmp_path), strategy="zero2", what=what)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_state_that_the_optimizer_had_before_is_kept(pool: Pool, tmp_path: Path, strategy: str) -> None:
    expected = pool.run(CASES + "state_from_before", 1, run_dir=str(tmp_path / "s"), strategy="single")[0]
    found = pool.run(CASES + "state_from_before", 2, run_dir=str(tmp_path / "z"), strategy=strategy)[0]
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "in_pieces"),
    [("zero1", "Adagrad", False), ("zero3", "Adagrad", False), ("zero3", "AdamW", True)],
)
def test_a_parameter_without_dimensions(
    pool: Pool, tmp_path: Path, strategy: str, optimizer: str, in_pieces: bool
) -> None:
    same = {"optimizer": optimizer, "in_pieces": in_pieces}
    expected = pool.run(CASES + "without_dimensions", 1, run_dir=str(tmp_path / "s"), strategy="single", **same)[0]
    found = pool.run(CASES + "without_dimensions", 2, run_dir=str(tmp_path / "z"), strategy=strategy, **same)[0]
    assert column(found, "loss") == pytest.approx(column(expected, "loss"), abs=1e-5)
    assert found["shards"] == expected["shards"]


def test_state_of_parameters_in_pieces_is_refused(pool: Pool, tmp_path: Path) -> None:
    """Adagrad makes its state when it is made, of the pieces' shapes."""
    same = {"optimizer": "Adagrad", "in_pieces": True}
    with pytest.raises(WorkerError, match=r"Adagrad made its state when.*\n.*init_model"):
        pool.run(CASES + "without_dimensions", 2, run_dir=str(tmp_path), strategy="zero3", **same)


@pytest.mark.parametrize("optimizer", ["Adagrad", "RMSprop", "NAdam"])
def test_other_elementwise_optimizers(pool: Pool, tmp_path: Path, optimizer: str) -> None:
    same = {"optimizer": optimizer}
    expected = pool.run(CASES + "trained", 1, run_dir=str(tmp_path / "s"), strategy="single", **same)[0]
    found = pool.run(CASES + "trained", 2, run_dir=str(tmp_path / "z"), strategy="zero3", **same)[0]
    assert column(found, "loss") == pytest.approx(column(expected, "loss"), abs=1e-5)


def test_a_model_built_in_pieces(pool: Pool, tmp_path: Path) -> None:
    """deepspeed.zero.Init: rank 0's numbers, tied weights stay tied, no rank holds the whole."""
    results = pool.run(CASES + "built_in_pieces", 2, run_dir=str(tmp_path), strategy="zero3")
    assert [r["held"] for r in results] == [0, 0]
    assert [r["whole"] for r in results] == [True, True]
    assert [r["tied"] for r in results] == [True, True]
    alone = pool.run(CASES + "built_in_pieces", 1, run_dir=str(tmp_path / "one"), strategy="zero3")[0]
    assert results[0]["start"] == alone["start"]
    assert column(results[0], "loss") == pytest.approx(column(alone, "loss"), abs=1e-5)


@every_stage
def test_fp16_scales_and_skips(pool: Pool, tmp_path: Path, strategy: str) -> None:
    """R2: an overflow skips one step, the scheduler too, halves the scale, and is counted; the scale doubles later
    without a step that is half as long."""
    plain = pool.run(CASES + "half", 2, run_dir=str(tmp_path / "a"), strategy=strategy)[0]
    assert plain["scales"] == [16, 16, 16, 32, 32, 32, 64, 64]
    exact = pool.run(CASES + "half", 2, run_dir=str(tmp_path / "c"), strategy=strategy, precision="fp32")[0]
    assert column(plain, "loss") == pytest.approx(column(exact, "loss"), abs=0.02)
    assert column(plain, "grad_norm") == pytest.approx(column(exact, "grad_norm"), rel=0.02)
    skipped = pool.run(CASES + "half", 2, run_dir=str(tmp_path / "b"), strategy=strategy, overflow_at=2)[0]
    assert skipped["scales"][:4] == [16, 16, 8, 8]
    assert column(skipped, "skipped_steps")[:4] == [0, 0, 1, 1]
    assert column(skipped, "lr")[:4] == pytest.approx([0.1, 0.1 / 2, 0.1 / 3, 0.1 / 3])
    assert plain["saved"]["loss_scales"][0]["cur_scale"] == 64.0


def test_fp16_is_refused_where_the_device_has_none(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"can't compute in fp16 on this CPU\n.*precision=bf16"):
        pool.run(CASES + "fp16_is_refused", 1, run_dir=str(tmp_path), strategy="zero2")


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_closed_engines_leave_nothing_behind(pool: Pool, tmp_path: Path, strategy: str) -> None:
    living = pool.run(CASES + "engines_in_a_row", 1, run_dir=str(tmp_path), strategy=strategy, count=4)[0]
    assert living[1] == living[2] == living[3]


def test_linear_is_torchs_own_again(pool: Pool, tmp_path: Path) -> None:
    """A rank that ran stage 3 before would fill the next engine's buckets in another order than one that didn't."""
    assert pool.run(CASES + "linear_after", 1, run_dir=str(tmp_path), strategy="zero3") == [True]


@pytest.mark.parametrize("processes", [2, 4])
@every_stage
def test_bytes_follow_the_formulas(pool: Pool, tmp_path: Path, strategy: str, processes: int) -> None:
    """ZeRO, arXiv 1910.02054, section 3, for fp32: within 3 % on every rank, no copy of the weights as masters.

    Before its window ends stage 2 holds gradients of whole parameters: those that its partition cuts count in full.
    """
    stage = int(strategy[-1])
    for found in pool.run(CASES + "state_bytes", processes, run_dir=str(tmp_path), strategy=strategy):
        whole, part = 4 * found["P"], 4 * found["P"] / processes
        assert found["step"]["parameters"] == pytest.approx(part if stage == 3 else whole, rel=0.03)
        assert found["step"]["optimizer"] == pytest.approx(2 * part, rel=0.03)
        assert found["backward"]["gradients"] == pytest.approx(whole if stage == 1 else part, rel=0.03)
        assert found["window"]["gradients"] == pytest.approx(part, rel=0.03)


@every_stage
def test_bytes_in_bf16(pool: Pool, tmp_path: Path, strategy: str) -> None:
    """Two bytes a parameter, masters and moments in fp32, gradients accumulated in fp32."""
    settings = {"precision": "bf16"}
    for found in pool.run(CASES + "state_bytes", 2, run_dir=str(tmp_path), strategy=strategy, settings=settings):
        part = found["P"] / 2
        assert found["step"]["parameters"] == pytest.approx(2 * part if strategy == "zero3" else 4 * part, rel=0.03)
        assert found["step"]["optimizer"] == pytest.approx(12 * part, rel=0.03)
        assert found["window"]["gradients"] == pytest.approx(4 * part, rel=0.03)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_buffers_are_rank_0s_where_they_are_read(pool: Pool, tmp_path: Path, strategy: str) -> None:
    a, b = pool.run(CASES + "batch_norm", 2, run_dir=str(tmp_path), strategy=strategy)
    assert a["raw"] != b["raw"]
    assert b["after"] == a["after"] == a["raw"]


@pytest.mark.timeout(1900)  # an operator is compiled once
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "Adam"])
def test_deepspeeds_adam_on_the_host(pool: Pool, tmp_path: Path, optimizer: str) -> None:
    """The same losses as torch's, and a checkpoint that doesn't show which one stepped."""
    same = {"optimizer": optimizer}
    plain = pool.run(CASES + "trained", 2, run_dir=str(tmp_path / "a"), strategy="zero2", steps=6, **same)[0]
    first = pool.run(CASES + "host_adam", 2, run_dir=str(tmp_path / "b"), strategy="zero2", timeout=1800, **same)[0]
    assert (first["optimizer"], first["same_optimizer"]) == ("HostAdam", False)
    assert column(first, "loss") == pytest.approx(column(plain, "loss")[:4], abs=1e-5)
    source = str(tmp_path / "b" / "checkpoints" / "step-00000004")
    settings = {"checkpoint.resume": source}
    torchs = pool.run(
        CASES + "trained", 1, run_dir=str(tmp_path / "c"), strategy="single", steps=6, settings=settings, **same
    )[0]
    again = pool.run(CASES + "host_adam", 2, run_dir=str(tmp_path / "d"), strategy="zero3", source=source, **same)[0]
    for result in (torchs, again):
        assert column(result, "loss") == pytest.approx(column(plain, "loss")[4:], abs=1e-5)


@pytest.mark.timeout(1900)  # an operator is compiled once
@pytest.mark.slow
def test_optimizer_states_on_nvme(pool: Pool, tmp_path: Path) -> None:
    """The same numbers as in host memory, and checkpoints that move to one process and back bit for bit."""
    same: dict[str, Any] = {"function": CASES + "on_nvme", "timeout": 1800}
    disk = str(tmp_path / "disk")
    host = pool.run(processes=2, run_dir=str(tmp_path / "a"), strategy="zero3", disk="host", steps=6, **same)[0]
    first = pool.run(processes=2, run_dir=str(tmp_path / "b"), strategy="zero3", disk=disk, steps=4, **same)[0]
    assert first["swapped"] > 0 and host["swapped"] == 0
    for name in ("loss", "grad_norm"):
        assert column(first, name) == column(host, name)[:4]
    same["source"] = str(tmp_path / "b" / "checkpoints" / "step-00000004")
    single = pool.run(processes=1, run_dir=str(tmp_path / "c"), strategy="single", disk="", steps=6, **same)[0]
    assert column(single, "loss") == pytest.approx(column(host, "loss")[4:], rel=1e-5)
    again = pool.run(processes=2, run_dir=str(tmp_path / "d"), strategy="zero3", disk=disk, steps=6, **same)[0]
    assert column(again, "loss") == column(host, "loss")[4:]
    moved = pool.run(processes=2, run_dir=str(tmp_path / "e"), strategy="zero3", disk=disk, steps=4, **same)[0]
    assert moved["model"] == first["model"]


def test_a_lock_of_a_killed_compilation_holds_up_nobody(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(CASES + "stale_batons", 1, folder=str(tmp_path))[0] == [False, True]
