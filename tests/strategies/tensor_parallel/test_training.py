"""Split models against whole ones, alone and under every strategy that takes a tensor group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distkit.strategies.registry import strategy_class, strategy_names
from tests.pool import Pool, WorkerError
from tests.strategies.tensor_parallel.models import BLOCKS, OWN, SECOND_INPUTS, TRANSFORMERS

CASES = "tests.strategies.tensor_parallel.cases:"
TRAIN, RESUME = "tests.contract.cases:train", "tests.contract.cases:resume_only"
STRATEGIES = [name for name in strategy_names() if strategy_class(name).capabilities.tensor_parallel]


def test_which_strategies_take_a_tensor_group() -> None:
    assert STRATEGIES == [
        "ddp",
        "fsdp",
        *(f"{kind}{stage}" for kind in ("zero", "megatron-zero") for stage in (1, 2, 3)),
    ]


@pytest.mark.parametrize("model", [*OWN, *TRANSFORMERS])
def test_twenty_steps_with_shared_tokens_equal_the_whole_model(pool: Pool, model: str) -> None:
    """A gather and a scatter take the place of each all-reduce; 17 patches don't divide, so they stay whole."""
    for result in pool.run(CASES + "against_whole", 2, model=model, sequence=True):
        assert result["loss"] <= 1e-5
        assert result["gradients"] and max(result["gradients"].values()) <= 1e-5
        scattered = 0 if model == "vit" else BLOCKS[model] + result["lookups"]
        assert result["forward"].get("reduce_scatter", 0) == scattered
        assert result["forward"].get("all_reduce", 0) == (BLOCKS[model] if model == "vit" else 0)


@pytest.mark.parametrize("model", [*OWN, *TRANSFORMERS])
def test_twenty_steps_equal_the_whole_model(pool: Pool, model: str) -> None:
    """Losses within 1e-5 and each gradient within 1e-5 of the largest; with dropout too, whose masks are one process's."""
    for result in pool.run(CASES + "against_whole", 2, model=model):
        assert result["loss"] <= 1e-5
        assert result["gradients"] and max(result["gradients"].values()) <= 1e-5
        heads = result["heads"]
        assert heads == (model != "vit")
        forward = {"all_reduce": len(result["rows"]) + result["lookups"], "small": 2 * heads}
        assert result["forward"] == {kind: count for kind, count in forward.items() if count}
        assert len(result["rows"]) == BLOCKS[model]
        assert result["backward"]["all_reduce"] == BLOCKS[model] + heads + SECOND_INPUTS.get(model, 0)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_equals_one_process(pool: Pool, tmp_path: Path, strategy: str, processes: int) -> None:
    """L1, L2, L5, P1: on 2 and 2 x 2 processes, with clipping, accumulation and token weights."""
    settings = {"optim.clip_norm": 0.5}
    same: dict[str, Any] = {"scheduler": True, "weighted": True, "data": 29}
    expected = pool.run(TRAIN, 1, strategy="single", run_dir=str(tmp_path / "s"), settings=settings, **same)[0]
    settings |= {"parallel.tensor": 2, "batch.accumulate": 3}
    results = pool.run(TRAIN, processes, strategy=strategy, run_dir=str(tmp_path / "t"), settings=settings, **same)
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        found = [line[name] for line in results[0]["log"]]
        assert found == pytest.approx([line[name] for line in expected["log"]], rel=tolerance)
    assert [line["samples"] for line in results[0]["log"]] == [line["samples"] for line in expected["log"]]
    assert results[0]["norm"] == pytest.approx(expected["norm"], rel=1e-4)
    assert results[0]["order"] == results[1]["order"]  # L5: a tensor group sees the same samples


@pytest.mark.parametrize("settings", [{}, {"memory.activation_checkpointing": "full"}], ids=["plain", "recomputed"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens_are_shared_between_split_layers(
    pool: Pool, tmp_path: Path, strategy: str, settings: dict[str, Any]
) -> None:
    """Sequence parallelism over blocks that engines wrap, parameters that they gather, clipping and accumulation."""
    settings = {**settings, "optim.clip_norm": 0.5}
    expected = pool.run(TRAIN, 1, strategy="single", run_dir=str(tmp_path / "s"), settings=settings)[0]
    settings |= {"parallel.tensor": 2, "parallel.sequence": True, "batch.accumulate": 2}
    if strategy.endswith("zero3"):  # of so small a model every parameter would stay whole
        settings["engine.deepspeed.zero_optimization"] = {"stage3_param_persistence_threshold": 16}
    result = pool.run(TRAIN, 4, strategy=strategy, run_dir=str(tmp_path / "t"), settings=settings)[0]
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        found = [line[name] for line in result["log"]]
        assert found == pytest.approx([line[name] for line in expected["log"]], rel=tolerance)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_checkpoints_move_both_ways(pool: Pool, tmp_path: Path, strategy: str) -> None:
    """K8, K9: from 2 x 2 to one process and back, the same bits in the logical order of fused weights."""
    settings = {"max_steps": 4, "parallel.tensor": 2}
    run = pool.run(TRAIN, 4, strategy=strategy, run_dir=str(tmp_path / "a"), settings=settings)[0]
    source = str(tmp_path / "a" / "checkpoints" / "step-00000004")
    single = pool.run(RESUME, 1, strategy="single", run_dir=str(tmp_path / "b"), source=source)[0]
    assert single == run["shards"]
    source = str(tmp_path / "b" / "checkpoints" / "step-00000004")
    whole = pool.run(TRAIN, 1, strategy="single", run_dir=str(tmp_path / "d"), settings={"checkpoint.resume": source})[
        0
    ]
    settings = {"parallel.tensor": 2, "checkpoint.resume": source}
    back = {"strategy": strategy, "run_dir": str(tmp_path / "c"), "settings": settings, "look_at_start": True}
    on = pool.run(TRAIN, 4, **back)[0]
    assert on["start"] == run["model"]
    assert [line["loss"] for line in on["log"]] == pytest.approx([line["loss"] for line in whole["log"]], abs=1e-5)


def test_bf16_activation_checkpointing_and_compression(pool: Pool, tmp_path: Path) -> None:
    expected = pool.run(TRAIN, 1, strategy="single", run_dir=str(tmp_path / "s"))[0]
    for index, (settings, band) in enumerate(
        [
            ({"precision": "bf16"}, 0.02),
            ({"memory.activation_checkpointing": "full"}, 1e-5),
            ({"compress.method": "bf16"}, 0.01),
        ]
    ):
        run_dir = str(tmp_path / str(index))
        result = pool.run(TRAIN, 4, strategy="ddp", run_dir=run_dir, settings={**settings, "parallel.tensor": 2})[0]
        losses = [line["loss"] for line in result["log"]]
        assert losses == pytest.approx([line["loss"] for line in expected["log"]], abs=band)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parallel.tensor": 3}, r"parallel\.tensor=3 doesn't divide the 2 processes"),
        ({"parallel.tensor": 2, "precision": "fp16"}, "precision was set to fp16, which does not go together"),
        ({"parallel.tensor": 2, "compile": True}, "compile was set to true, which does not go together"),
        (
            {"parallel.tensor": 2, "parallel.tensor_layout": {"blocks.*": "rows"}},
            r"was set to 'rows'; there are: column, row, vocabulary, replicate",
        ),
        ({"parallel.tensor": 2, "parallel.tensor_layout": "all"}, "it is auto, or patterns of names"),
        (
            {"parallel.tensor": 2, "parallel.tensor_layout": {"experts.*": "replicate"}},
            "no module of TinyGPT has such a name",
        ),
    ],
)
def test_what_can_not_be_is_refused(pool: Pool, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        pool.run(TRAIN, 2, strategy="ddp", run_dir=str(tmp_path), settings=settings)


def test_layers_can_be_kept_whole(pool: Pool, tmp_path: Path) -> None:
    settings = {"parallel.tensor": 2, "parallel.tensor_layout": {"blocks.0.*": "replicate"}}
    expected = pool.run(TRAIN, 1, strategy="single", run_dir=str(tmp_path / "s"))[0]
    result = pool.run(TRAIN, 2, strategy="ddp", run_dir=str(tmp_path / "t"), settings=settings)[0]
    losses = [line["loss"] for line in result["log"]]
    assert losses == pytest.approx([line["loss"] for line in expected["log"]], abs=1e-5)


def test_dropout_agrees_where_tensors_are_whole_and_differs_where_they_are_split(pool: Pool) -> None:
    """Every mask is that of one process: of a split tensor each rank has its part of it."""
    whole = pool.run(CASES + "dropout_masks", 1)[0]
    first, second = pool.run(CASES + "dropout_masks", 2)
    assert first["behind"] == second["behind"] == whole["behind"]
    assert first["between"] != second["between"]
    assert [a + b for a, b in zip(first["between"], second["between"], strict=True)] == whole["between"]


@pytest.mark.parametrize("settings", [{"optim.unused_parameters": "allow"}, {"engine.ddp.static_graph": True}])
def test_ddp_finds_the_graph_behind_a_split_output(pool: Pool, tmp_path: Path, settings: dict[str, Any]) -> None:
    expected = pool.run(TRAIN, 1, strategy="single", run_dir=str(tmp_path / "s"))[0]
    settings = {"parallel.tensor": 2, **settings}
    result = pool.run(TRAIN, 4, strategy="ddp", run_dir=str(tmp_path / "t"), settings=settings)[0]
    losses = [line["loss"] for line in result["log"]]
    assert losses == pytest.approx([line["loss"] for line in expected["log"]], abs=1e-5)


def test_a_script_may_do_anything_with_a_split_output(pool: Pool) -> None:
    """Loss, metrics and indexing of logits, which are made whole where a function needs all of them."""
    expected, *_ = pool.run(CASES + "use_of_logits", 1, model="small-gpt")
    for found in pool.run(CASES + "use_of_logits", 2, model="small-gpt"):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, str):
                assert found[name] == value
            else:
                np.testing.assert_allclose(found[name], value, atol=1e-5 * np.abs(value).max(), err_msg=name)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_evaluation_gathering_and_export_with_a_split_head(pool: Pool, tmp_path: Path, strategy: str) -> None:
    case = CASES + "evaluated"
    expected = pool.run(case, 1, strategy="single", run_dir=str(tmp_path / "s"), settings={})[0]
    split = {"strategy": strategy, "run_dir": str(tmp_path / "t"), "settings": {"parallel.tensor": 2}}
    for result in pool.run(case, 4, **split):
        assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
        assert result["rows"] == [4, 9, 64]  # two samples of each of two data-parallel ranks
        assert result["apart"] < 1e-5


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero3"])
def test_exported_weights_are_not_rounded_in_16_bits(pool: Pool, tmp_path: Path, strategy: str) -> None:
    settings = {"parallel.tensor": 2, "precision": "bf16"}
    assert pool.run(CASES + "evaluated", 4, strategy=strategy, run_dir=str(tmp_path), settings=settings)[0]["exact"]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_inside_of_heads_get_their_whole_gradient(
    pool: Pool, tmp_path: Path, strategy: str, sequence: bool
) -> None:
    """A norm over each head's features is whole on every rank, and each rank sees its own heads only."""
    case = CASES + "interleaved_losses"
    expected = pool.run(case, 1, strategy="single", run_dir=str(tmp_path / "s"), settings={})[0]
    settings = {"parallel.tensor": 2, "parallel.sequence": sequence}
    split = pool.run(case, 4, strategy=strategy, run_dir=str(tmp_path / "t"), settings=settings)[0]
    assert len(split) == len(expected) == 6
    for found, wanted in zip(split, expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
