"""What every strategy must do: one body of tests over all registered strategies and 1, 2 and 4 processes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from distkit.strategies.registry import strategy_class, strategy_names
from tests.pool import Pool, WorkerError

CASES = "tests.contract.cases:"


def worlds() -> list[tuple[str, int]]:
    """Each strategy with each number of processes that it takes."""
    return [
        (name, n)
        for name in strategy_names()
        for n in ((1,) if strategy_class(name).capabilities.processes == "one" else (1, 2, 4))
    ]


def many() -> list[tuple[str, int]]:
    return [(name, n) for name, n in worlds() if n > 1]


def arrangements() -> list[tuple[str, int]]:
    """For options that don't touch how ranks divide the work: 4 only where it's another arrangement than 2."""
    return [(name, n) for name, n in worlds() if n < 4 or name == "hsdp" or name.startswith("megatron")]


every_world = pytest.mark.parametrize(("strategy", "processes"), worlds(), ids=lambda v: str(v))
every_arrangement = pytest.mark.parametrize(("strategy", "processes"), arrangements(), ids=lambda v: str(v))
every_many = pytest.mark.parametrize(("strategy", "processes"), many(), ids=lambda v: str(v))
every_two = pytest.mark.parametrize("strategy", sorted({name for name, _ in many()}))


@pytest.fixture(scope="session")
def reference(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The one-process run of a case with the same arguments, done once."""

    @cache
    def run(case: str, frozen: str) -> Any:
        folder = str(tmp_path_factory.mktemp("ref"))
        return pool.run(CASES + case, 1, strategy="single", run_dir=folder, **json.loads(frozen))[0]

    def get(case: str = "train", **arguments: Any) -> Any:
        return run(case, json.dumps(arguments, sort_keys=True))

    return get


def readers(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One rank of each tensor group, since all of a group read the same samples."""
    return [result for result in results if result["tensor_rank"] == 0]


def samples_of_steps(results: list[dict[str, Any]], accumulate: int) -> list[list[int]]:
    """What all ranks together read in each optimizer step."""
    batches = [[i for rank in readers(results) for i in rank["order"][n]] for n in range(len(results[0]["order"]))]
    starts = range(0, len(batches), accumulate)
    return [sorted(i for batch in batches[start : start + accumulate] for i in batch) for start in starts]


def column(result: dict[str, Any], name: str) -> list[float]:
    return [line[name] for line in result["log"]]


def assert_same_training(
    result: dict[str, Any], expected: dict[str, Any], loss: float = 1e-5, norm: float = 1e-4
) -> None:
    assert len(result["log"]) == len(expected["log"]) > 0
    assert column(result, "loss") == pytest.approx(column(expected, "loss"), abs=loss)
    assert column(result, "grad_norm") == pytest.approx(column(expected, "grad_norm"), rel=norm)
    assert column(result, "lr") == column(expected, "lr")
    assert column(result, "samples") == column(expected, "samples")


@every_world
@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_equals_one_process(
    pool: Pool, reference: Any, tmp_path: Path, strategy: str, processes: int, accumulate: int
) -> None:
    """L1, L2, L3, R1, P1, P5, K11: losses, norms and rates for accumulation 1 and 3, with clipping and groups.

    D1, C2: each step's samples are those of the one-process run, and two epochs differ.
    """
    same = {"scheduler": True, "settings": {"optim.clip_norm": 0.5}}
    expected = reference(**same)
    settings = {"optim.clip_norm": 0.5, "batch.accumulate": accumulate}
    results = pool.run(
        CASES + "train", processes, strategy=strategy, run_dir=str(tmp_path), scheduler=True, settings=settings
    )
    assert_same_training(results[0], expected)
    assert results[0]["norm"] == pytest.approx(expected["norm"], rel=1e-4)
    order = expected["order"]
    assert samples_of_steps(results, accumulate) == [sorted(batch) for batch in order]
    assert order[: len(order) // 2] != order[len(order) // 2 :]


@every_world
@pytest.mark.parametrize("weighted", [False, True])
def test_uneven_tail_and_weights(
    pool: Pool, reference: Any, tmp_path: Path, strategy: str, processes: int, weighted: bool
) -> None:
    """L1, L4, D2: 29 samples in steps of 12 leave a short window that doesn't divide; with and without weights."""
    expected = reference(data=29, weighted=weighted)
    result = pool.run(
        CASES + "train",
        processes,
        strategy=strategy,
        run_dir=str(tmp_path),
        data=29,
        weighted=weighted,
        settings={"batch.accumulate": 3},
    )
    assert_same_training(result[0], expected)
    seen = [[i for batch in rank["order"] for i in batch] for rank in readers(result)]
    assert sorted(i for rank in seen for i in rank) == sorted([*range(29), *range(29)])


@every_arrangement
@pytest.mark.parametrize("model", [{"tied": False}, {"frozen": True, "tied": False}], ids=["untied", "frozen"])
def test_kinds_of_models(
    pool: Pool, reference: Any, tmp_path: Path, strategy: str, processes: int, model: dict[str, bool]
) -> None:
    """P3, K11: untied weights, and a frozen part that stays as it was."""
    expected = reference(model=model)
    result = pool.run(CASES + "train", processes, strategy=strategy, run_dir=str(tmp_path), model=model)[0]
    assert_same_training(result, expected)
    if model.get("frozen"):
        frozen = [name for name in expected["model"] if name.startswith(("wte", "wpe", "blocks.0"))]
        assert frozen
        assert {n: result["model"][n] for n in frozen} == {n: expected["model"][n] for n in frozen}


@every_arrangement
def test_sgd_with_momentum(pool: Pool, reference: Any, tmp_path: Path, strategy: str, processes: int) -> None:
    """A wrong divisor hides behind Adam, which is blind to the gradient's scale; SGD shows it."""
    expected = reference(optimizer="SGD")
    result = pool.run(CASES + "train", processes, strategy=strategy, run_dir=str(tmp_path), optimizer="SGD")[0]
    assert_same_training(result, expected)


@every_arrangement
def test_unused_parameters_are_named(pool: Pool, tmp_path: Path, strategy: str, processes: int) -> None:
    """P6."""
    arguments = {"strategy": strategy, "run_dir": str(tmp_path / "a"), "model": {"unused": True}, "epochs": 1}
    with pytest.raises(WorkerError, match=r"spare\.weight.*spare\.bias"):
        pool.run(CASES + "train", processes, **arguments)


@every_arrangement
def test_unused_parameters_can_be_allowed(
    pool: Pool, reference: Any, tmp_path: Path, strategy: str, processes: int
) -> None:
    """P6, P3: allowed ones stay as they were, weight decay or not."""
    settings = {"optim.unused_parameters": "allow"}
    expected = reference(model={"unused": True}, settings=settings)
    result = pool.run(
        CASES + "train", processes, strategy=strategy, run_dir=str(tmp_path), model={"unused": True}, settings=settings
    )[0]
    assert_same_training(result, expected)
    assert result["model"]["spare.weight"] == expected["model"]["spare.weight"]


@every_arrangement
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing(
    pool: Pool, reference: Any, tmp_path: Path, strategy: str, processes: int, mode: str
) -> None:
    """P7: recomputing changes no number."""
    expected = reference()
    settings = {"memory.activation_checkpointing": mode}
    result = pool.run(CASES + "train", processes, strategy=strategy, run_dir=str(tmp_path), settings=settings)[0]
    assert_same_training(result, expected)
    assert sorted(result["model"]) == sorted(expected["model"])


@every_arrangement
def test_bf16_keeps_fp32_masters(pool: Pool, reference: Any, tmp_path: Path, strategy: str, processes: int) -> None:
    """P2, L6: 16-bit compute stays in a band of 0.02 around fp32 for twelve steps; states are fp32 on disk."""
    expected = reference(epochs=4)
    result = pool.run(
        CASES + "train", processes, strategy=strategy, run_dir=str(tmp_path), epochs=4, settings={"precision": "bf16"}
    )[0]
    assert column(result, "loss") == pytest.approx(column(expected, "loss"), abs=0.02)
    assert column(result, "loss") != column(expected, "loss")
    from distkit.checkpoint import CheckpointReader

    manifest = CheckpointReader(sorted((tmp_path / "checkpoints").glob("step-*"))[-1], verify="fast").manifest
    kinds = {entry.dtype for names in manifest.tensors.values() for k in names.values() for entry in k.values()}
    assert kinds == {"float32"}


@every_world
def test_resume_in_mid_epoch_is_exact(pool: Pool, tmp_path: Path, strategy: str, processes: int) -> None:
    """C1, C2: killed after step 5, whose last checkpoint is of step 4; what comes after equals the undisturbed run."""
    same: dict[str, Any] = {"data": 29, "epochs": 3, "scheduler": True}
    whole = pool.run(CASES + "train", processes, strategy=strategy, run_dir=str(tmp_path / "a"), **same)
    same["settings"] = {"checkpoint.every_steps": 2}
    part = pool.run(CASES + "train", processes, strategy=strategy, run_dir=str(tmp_path / "b"), stop_after=5, **same)
    rest = pool.run(CASES + "train", processes, strategy=strategy, run_dir=str(tmp_path / "b"), **same)
    assert len(part[0]["log"]) == 5
    keep = ("step", "epoch", "samples", "loss", "lr", "grad_norm")
    lines = [{k: line[k] for k in keep} for line in whole[0]["log"]]
    assert [{k: line[k] for k in keep} for line in rest[0]["log"]] == lines
    assert rest[0]["model"] == whole[0]["model"]
    assert rest[0]["shards"] == whole[0]["shards"]
    for rank in range(processes):
        assert rest[rank]["order"] == whole[rank]["order"][4:]


@every_world
def test_checkpoints_move_to_and_from_one_process(
    pool: Pool, reference: Any, tmp_path: Path, strategy: str, processes: int
) -> None:
    """K8, K9: parameters and optimizer states are the same bits after a move, in both directions.

    C4: four steps on `processes` ranks, the rest on one; the same global sequence, losses within 1e-5.
    """
    same = {"epochs": 3, "data": 29}
    run = pool.run(
        CASES + "train", processes, strategy=strategy, run_dir=str(tmp_path / "a"), settings={"max_steps": 4}, **same
    )[0]
    source = str(tmp_path / "a" / "checkpoints" / "step-00000004")
    assert len(run["shards"]) > 20
    moved = {"source": source, "data": 29}
    single = pool.run(CASES + "resume_only", 1, strategy="single", run_dir=str(tmp_path / "b"), **moved)[0]
    assert single == run["shards"]
    moved["source"] = str(tmp_path / "b" / "checkpoints" / "step-00000004")
    back = pool.run(CASES + "resume_only", processes, strategy=strategy, run_dir=str(tmp_path / "c"), **moved)[0]
    assert back == run["shards"]
    rest = pool.run(CASES + "train", 1, strategy="single", run_dir=str(tmp_path / "a"), **same)[0]
    assert_same_training(rest, reference(**same))


@every_world
def test_evaluation_counts_each_sample_once(
    pool: Pool, reference: Any, tmp_path: Path, strategy: str, processes: int
) -> None:
    """D6: also with sizes that don't divide and fewer samples than ranks."""
    sizes = ((13, 3), (3, 2), (1, 4))
    results = pool.run(CASES + "evaluate", processes, strategy=strategy, run_dir=str(tmp_path), sizes=sizes)
    expected = reference("evaluate", sizes=[(data, data) for data, _ in sizes])
    for found in results:
        for (data, _), metrics, single in zip(sizes, found, expected, strict=True):
            assert metrics["samples"] == data
            assert metrics["index_sum"] == pytest.approx((data - 1) / 2)
            assert metrics["loss"] == pytest.approx(single["loss"], rel=1e-6)


@every_arrangement
def test_gather_keeps_the_order_and_leaves_padding_out(
    pool: Pool, tmp_path: Path, strategy: str, processes: int
) -> None:
    """D6, in a loop of the user's own."""
    results = pool.run(CASES + "gather_by_hand", processes, strategy=strategy, run_dir=str(tmp_path), data=13, batch=3)
    assert results == [list(range(13))] * processes


@every_two
def test_a_save_on_some_ranks_only_is_named(pool: Pool, tmp_path: Path, strategy: str) -> None:
    """K1."""
    with pytest.raises(WorkerError, match=r"trainer\.save\(\) must be called by all ranks.*missing: 1"):
        pool.run(CASES + "half_save", 2, strategy=strategy, run_dir=str(tmp_path), timeout=60)


@every_two
def test_models_that_differ_between_ranks_are_named(pool: Pool, tmp_path: Path, strategy: str) -> None:
    """H3."""
    with pytest.raises(WorkerError, match=r"wte\.weight \(32, 16\).*rank 0 and wte\.weight \(32, 32\).*rank 1"):
        pool.run(CASES + "different_models", 2, strategy=strategy, run_dir=str(tmp_path))


@every_many
def test_all_ranks_start_from_rank_0s_weights(pool: Pool, tmp_path: Path, strategy: str, processes: int) -> None:
    results = pool.run(CASES + "initial_parameters", processes, strategy=strategy, run_dir=str(tmp_path))
    assert all(result == results[0] for result in results)


@every_arrangement
def test_two_models_and_optimizers(pool: Pool, reference: Any, tmp_path: Path, strategy: str, processes: int) -> None:
    """A GAN through backward() and optimizer_step(): equal to one process, one step a batch."""
    expected = reference("gan")
    result = pool.run(CASES + "gan", processes, strategy=strategy, run_dir=str(tmp_path))[0]
    assert [line["step"] for line in result["log"]] == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "loss_1", "grad_norm", "grad_norm_1"):
        assert column(result, name) == pytest.approx(column(expected, name), abs=1e-5)
    assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
