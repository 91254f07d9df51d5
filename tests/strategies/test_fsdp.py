"""What is particular to fsdp and hsdp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distkit.config import load_config
from distkit.errors import ConfigError
from distkit.strategies.fsdp_settings import FsdpSettings, choose_replicas
from distkit.strategies.registry import strategy_class
from tests.pool import Pool, WorkerError

CASES = "tests.strategies.fsdp_cases:"


def column(result: dict[str, Any], name: str) -> list[float]:
    return [line[name] for line in result["log"]]


def same_training(a: dict[str, Any], b: dict[str, Any], loss: float = 1e-5, norm: float = 1e-4) -> None:
    assert len(a["log"]) == len(b["log"]) > 0
    assert column(a, "loss") == pytest.approx(column(b, "loss"), abs=loss)
    assert column(a, "grad_norm") == pytest.approx(column(b, "grad_norm"), rel=norm)


@pytest.fixture(scope="module")
def single(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs of the same cases in one process, each once."""
    known: dict[str, Any] = {}

    def run(case: str = "train", **arguments: Any) -> Any:
        key = repr((case, sorted(arguments.items())))
        if key not in known:
            known[key] = pool.run(
                CASES + case, 1, strategy="single", run_dir=str(tmp_path_factory.mktemp("s")), **arguments
            )[0]
        return known[key]

    return run


# -- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("fsdp", {"engine.fsdp": {"prefetsh": 2}}, r"engine\.fsdp\.prefetch="),
        ("fsdp", {"engine.fsdp": {"mp_policy": "bf16"}}, r"follows from precision"),
        ("fsdp", {"engine.fsdp": {"prefetch": -1}}, r"at least 0"),
        ("fsdp", {"engine.fsdp": {"wrap": []}}, r"list of class names"),
        ("fsdp", {"engine.fsdp": {"cast_forward_inputs": 3}}, r"true or false"),
        ("fsdp", {"engine.fsdp": {"wrap": ["Block"], "min_params": 10}}, r"min_params=null"),
        ("fsdp", {"memory.offload": "optimizer"}, r"memory\.offload=params"),
        ("fsdp", {"parallel.replicate": 2}, r"parallel\.replicate=1"),
        ("fsdp", {"parallel.tensor": 3}, r"parallel\.tensor=1"),
        ("hsdp", {"parallel.tensor": 2}, r"parallel\.tensor=1"),
        ("hsdp", {"parallel.replicate": 3}, r"these do: 1, 2, 4[\s\S]*parallel\.replicate=2"),
        ("hsdp", {"compress.method": "bf16"}, r"compress\.method=none"),
    ],
)
def test_refusals_before_anything_starts(name: str, settings: dict[str, Any], message: str) -> None:
    config = load_config(script={"strategy": name, **settings}).config
    with pytest.raises(ConfigError, match=message):
        strategy_class(name).check(config, processes=4)


def test_reshard_to_fewer_ranks_must_divide() -> None:
    settings = FsdpSettings.parse({"reshard_after_forward": 2})
    settings.check_ranks(4)
    with pytest.raises(ConfigError, match="divide the 3 ranks"):
        settings.check_ranks(3)


@pytest.mark.parametrize(
    ("replicate", "size", "nodes", "expected"),
    [(1, 4, 1, 2), (1, 8, 4, 4), (1, 2, 1, 1), (1, 5, 1, 1), (4, 8, 2, 4), (1, 1, 1, 1)],
)
def test_number_of_replicas(replicate: int, size: int, nodes: int, expected: int) -> None:
    config = load_config(script={"strategy": "hsdp", "parallel.replicate": replicate}).config
    assert choose_replicas(config, size, nodes)[0] == expected


def test_meshes(pool: Pool, tmp_path: Path) -> None:
    four = pool.run(CASES + "mesh", 4, strategy="hsdp", run_dir=str(tmp_path / "a"), settings={})
    assert [rank["data"] for rank in four] == [[r, 4] for r in range(4)]
    assert four[0]["mesh"] == [2, 2] and four[0]["names"] == ["replicate", "shard"]
    assert "2 replicas of 2 ranks" in four[0]["notes"][0] and "isn't set" in four[0]["notes"][0]
    two = pool.run(CASES + "mesh", 2, strategy="hsdp", run_dir=str(tmp_path / "b"), settings={"parallel.replicate": 2})
    assert two[0]["mesh"] == [2, 1]


# -- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "processes", "engine"),
    [
        ("fsdp", 4, {}),
        ("fsdp", 2, {"prefetch": 2, "reshard_after_forward": True}),
        ("fsdp", 2, {"reshard_after_forward": False, "min_params": 500}),
        ("fsdp", 4, {"reshard_after_forward": 2, "reduce_every_micro_batch": True}),
        ("hsdp", 4, {"wrap": ["Block", "Linear"]}),
        ("hsdp", 2, {"replicate": 2}),
    ],
)
def test_parameters_that_split_badly(
    pool: Pool, single: Any, tmp_path: Path, strategy: str, processes: int, engine: dict[str, Any]
) -> None:
    """A scalar, one row, three rows; accumulation and clipping; under every way of cutting and gathering."""
    expected = single(model="awkward", settings={"optim.clip_norm": 0.5})
    settings: dict[str, Any] = {"optim.clip_norm": 0.5, "batch.accumulate": 3, "engine.fsdp": dict(engine)}
    if "replicate" in engine:
        settings["parallel.replicate"] = settings["engine.fsdp"].pop("replicate")
    results = pool.run(
        CASES + "train", processes, strategy=strategy, run_dir=str(tmp_path), model="awkward", settings=settings
    )
    same_training(results[0], expected)
    assert results[0]["start"] == expected["start"]
    assert sorted(results[0]["shards"]) == sorted(expected["shards"])


@pytest.mark.parametrize("engine", [{}, {"reshard_after_forward": False}, {"reduce_every_micro_batch": True}], ids=str)
def test_gradients_travel_at_the_windows_end_only(pool: Pool, tmp_path: Path, engine: dict[str, Any]) -> None:
    """L7; and when memory is no concern, parameters are gathered once a window."""
    for found in pool.run(
        CASES + "traffic", 2, strategy="fsdp", run_dir=str(tmp_path), settings={"engine.fsdp": engine}
    ):
        assert [end for end, _, _ in found] == [False, False, True] * 2
        if engine.get("reduce_every_micro_batch"):
            assert all(reduced > 0 for _, reduced, _ in found)
        else:
            assert all((reduced > 0) == end for end, reduced, _ in found)
        gathered = [count for _, _, count in found]
        if engine.get("reshard_after_forward") is False:
            assert gathered == [3, 0, 0] * 2
        else:
            assert gathered == [5, 5, 5] * 2


def test_state_after_an_evaluation(pool: Pool, single: Any, tmp_path: Path) -> None:
    """A forward without a backward leaves the outermost unit gathered: neither the checkpoint nor the next steps see it."""
    expected = single(evaluate=True)
    result = pool.run(CASES + "train", 2, strategy="fsdp", run_dir=str(tmp_path), evaluate=True)[0]
    same_training(result, expected)
    assert result["evaluated"] == pytest.approx(expected["evaluated"], abs=1e-5)


@pytest.mark.parametrize(("optimizer", "loss"), [("fused", 1e-5), ("NAdam", 1e-4), ("Adagrad", 1e-5), ("Muon", 1e-3)])
def test_optimizers(pool: Pool, single: Any, tmp_path: Path, optimizer: str, loss: float) -> None:
    """Also those that look at whole matrices (Muon, in bf16): DTensor computes as if it were one. Their state resumes
    at another world size."""
    expected = single(model="untied", optimizer=optimizer)
    arguments = {"model": "untied", "optimizer": optimizer}
    result = pool.run(CASES + "train", 2, strategy="fsdp", run_dir=str(tmp_path), **arguments)[0]
    same_training(result, expected, loss=loss, norm=100 * loss)
    assert sorted(result["shards"]) == sorted(expected["shards"])
    longer = pool.run(CASES + "train", 4, strategy="hsdp", run_dir=str(tmp_path), epochs=3, **arguments)[0]
    same_training(longer, single(epochs=3, **arguments), loss=loss, norm=100 * loss)


def test_an_optimizer_that_has_stepped_before(pool: Pool, single: Any, tmp_path: Path) -> None:
    """P4."""
    expected = single("warm_optimizer")
    same_training(pool.run(CASES + "warm_optimizer", 2, strategy="fsdp", run_dir=str(tmp_path))[0], expected)


def test_ranks_that_use_different_parameters(pool: Pool, single: Any, tmp_path: Path) -> None:
    """P6: gradients are those of all ranks; what no rank used stays as it was, weight decay or not."""
    expected = single("choosy")
    for result in pool.run(CASES + "choosy", 2, strategy="fsdp", run_dir=str(tmp_path))[:1]:
        assert list(result) == list(expected)
        for name, values in expected.items():
            assert result[name] == pytest.approx(values, abs=2e-5), name


@pytest.mark.parametrize(("settings", "loss"), [({}, 1e-5), ({"precision": "bf16"}, 0.1)], ids=["fp32", "bf16"])
def test_a_window_that_ends_unforeseen(
    pool: Pool, single: Any, tmp_path: Path, settings: dict[str, Any], loss: float
) -> None:
    """L4 without a prepared loader."""
    expected = single("unprepared_loader", settings=settings)
    result = pool.run(CASES + "unprepared_loader", 2, strategy="fsdp", run_dir=str(tmp_path), settings=settings)[0]
    same_training({"log": result}, {"log": expected}, loss=loss, norm=loss)


def test_gradients_can_be_forgotten_in_mid_window(pool: Pool, tmp_path: Path) -> None:
    """Those that fully_shard keeps whole until the window ends, too."""
    runs = [
        pool.run(CASES + "forgotten", 2, strategy="fsdp", run_dir=str(tmp_path / str(forget)), forget=forget)[0]
        for forget in (False, True)
    ]
    assert column(runs[1], "loss") == column(runs[0], "loss")


def test_a_frozen_teacher_and_a_model_without_parameters(pool: Pool, single: Any, tmp_path: Path) -> None:
    """Beside the trained model, whose optimizer is made after it was prepared."""
    expected = single("teacher")
    for result in pool.run(CASES + "teacher", 2, strategy="fsdp", run_dir=str(tmp_path)):
        assert result["teacher"] == pytest.approx(expected["teacher"], rel=1e-6)
        assert result["log"] == [] or column(result, "loss") == pytest.approx(column(expected, "loss"), abs=1e-5)


def test_compile_changes_no_names_and_no_losses(pool: Pool, single: Any, tmp_path: Path) -> None:
    """P8: blocks are compiled one by one, inside of fully_shard."""
    expected = single(settings={"memory.activation_checkpointing": "full"})
    settings = {"compile": True, "engine.compile": {"backend": "aot_eager"}, "memory.activation_checkpointing": "full"}
    result = pool.run(CASES + "train", 2, strategy="fsdp", run_dir=str(tmp_path), settings=settings)[0]
    same_training(result, expected)
    assert sorted(result["model"]) == sorted(expected["model"])


# -- precision and memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["gather torch.float32", "reduce torch.float32"]),
        ({"precision": "bf16"}, ["gather torch.bfloat16", "reduce torch.float32"]),
        ({"precision": "bf16-pure"}, ["gather torch.bfloat16", "reduce torch.bfloat16"]),
        ({"compress.method": "fp16"}, ["gather torch.float32", "reduce torch.float16"]),
        ({"precision": "bf16", "compress.method": "bf16"}, ["gather torch.bfloat16", "reduce torch.bfloat16"]),
    ],
)
def test_what_travels(pool: Pool, tmp_path: Path, settings: dict[str, Any], expected: list[str]) -> None:
    """L6: 16-bit parameters, and gradients in fp32 unless asked otherwise."""
    assert pool.run(CASES + "wire", 2, strategy="fsdp", run_dir=str(tmp_path), settings=settings)[0] == expected


@pytest.mark.parametrize("precision", ["fp16", "bf16-pure"])
def test_precisions(pool: Pool, single: Any, tmp_path: Path, precision: str) -> None:
    expected = single(model="awkward", settings={"precision": precision})
    result = pool.run(
        CASES + "train", 2, strategy="fsdp", run_dir=str(tmp_path), model="awkward", settings={"precision": precision}
    )[0]
    assert result["dtypes"] == (["torch.bfloat16"] if precision == "bf16-pure" else ["torch.float32"])
    assert column(result, "loss") == pytest.approx(column(expected, "loss"), abs=0.02)
    assert column(result, "skipped_steps")[-1] == column(expected, "skipped_steps")[-1]


def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: Pool, tmp_path: Path) -> None:
    """R2: only rank 1 holds the element whose gradient is infinite."""
    arguments = {"model": "awkward", "settings": {"precision": "fp16"}, "epochs": 4, "broken": (1, 10)}
    result = pool.run(CASES + "train", 2, strategy="fsdp", run_dir=str(tmp_path), **arguments)[0]
    ddp = pool.run(CASES + "train", 2, strategy="ddp", run_dir=str(tmp_path / "ddp"), **arguments)[0]
    skipped = column(result, "skipped_steps")
    assert skipped == column(ddp, "skipped_steps")
    assert skipped[9] == skipped[8] + 1 and skipped[-1] == skipped[9]
    assert column(result, "loss") == pytest.approx(column(ddp, "loss"), rel=0.01)


def test_an_optimizer_that_dtensor_cannot_step(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"Adafactor[\s\S]*--strategy ddp"):
        pool.run(CASES + "train", 2, strategy="fsdp", run_dir=str(tmp_path), optimizer="Adafactor")


def test_a_parameter_without_elements_stays_whole(pool: Pool, tmp_path: Path) -> None:
    expected = pool.run(CASES + "empty_parameter", 1, strategy="single", run_dir=str(tmp_path / "s"))[0]
    result = pool.run(CASES + "empty_parameter", 2, strategy="fsdp", run_dir=str(tmp_path / "f"))[0]
    assert column(result, "loss") == pytest.approx(column(expected, "loss"), abs=1e-6)
    assert sorted(result["shards"]) == sorted(expected["shards"])
    assert "optimizer/none/exp_avg" in result["shards"]


@pytest.mark.parametrize("method", ["fp16", "bf16"])
def test_compression_rounds_once(pool: Pool, single: Any, tmp_path: Path, method: str) -> None:
    settings = {"compress.method": method, "batch.accumulate": 3}
    result = pool.run(CASES + "train", 2, strategy="fsdp", run_dir=str(tmp_path), settings=settings, optimizer="SGD")[0]
    expected = single(optimizer="SGD")
    same_training(result, expected, loss=0.01, norm=0.01)
    assert column(result, "loss") != column(expected, "loss")


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_offload_changes_no_losses(pool: Pool, single: Any, tmp_path: Path, strategy: str) -> None:
    settings = {"memory.offload": "params", "optim.clip_norm": 0.5}
    result = pool.run(CASES + "train", 2, strategy=strategy, run_dir=str(tmp_path), model="awkward", settings=settings)[
        0
    ]
    same_training(result, single(model="awkward", settings={"optim.clip_norm": 0.5}))


# -- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "processes", "model"), [("fsdp", 4, "awkward"), ("fsdp", 2, "gpt2"), ("hsdp", 4, "tiny")]
)
def test_a_model_without_memory_gets_its_ordinary_values(
    pool: Pool, single: Any, tmp_path: Path, strategy: str, processes: int, model: str
) -> None:
    """Built under trainer.init_model(): the same bits as built on the host, still tied, the same training."""
    if model == "gpt2":
        pytest.importorskip("transformers")
    expected = single(model=model)
    result = pool.run(CASES + "train", processes, strategy=strategy, run_dir=str(tmp_path), model=model, deferred=True)[
        0
    ]
    assert result["start"] == expected["start"]
    same_training(result, expected)


def test_a_model_on_the_meta_device_without_notes(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"wte\.weight[\s\S]*with trainer\.init_model\(\)"):
        pool.run(CASES + "not_deferred", 2, strategy="fsdp", run_dir=str(tmp_path))


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}], ids=["fp32", "bf16"])
def test_a_residual_network_with_batch_norm(pool: Pool, single: Any, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Statistics are each rank's own while it trains, and rank 0's when they are read: the evaluation is one model's."""
    results = pool.run(CASES + "conv", 2, strategy="fsdp", run_dir=str(tmp_path), settings=settings)
    a, b = results
    assert a["trained"] != b["trained"]
    assert a["evaluated"] == b["evaluated"] == a["trained"]
    assert a["samples"] == 48
    assert column(a, "loss")[-1] < column(a, "loss")[0] * 0.8
    ddp = pool.run(CASES + "conv", 2, strategy="ddp", run_dir=str(tmp_path / "ddp"), settings=settings)[0]
    assert column(a, "loss") == pytest.approx(column(ddp, "loss"), abs=1e-5 if not settings else 0.05)
    assert a["loss"] == pytest.approx(ddp["loss"], abs=1e-4 if not settings else 0.05)


@pytest.mark.parametrize(("strategy", "processes"), [("fsdp", 2), ("hsdp", 4)])
def test_a_transformers_model(pool: Pool, single: Any, tmp_path: Path, strategy: str, processes: int) -> None:
    """Weights tied by the library, outputs in its own classes."""
    pytest.importorskip("transformers")
    expected = single(model="gpt2", settings={"optim.clip_norm": 0.5})
    settings = {"optim.clip_norm": 0.5, "batch.accumulate": 3}
    result = pool.run(
        CASES + "train", processes, strategy=strategy, run_dir=str(tmp_path), model="gpt2", settings=settings
    )[0]
    same_training(result, expected)
    assert "2 GPT2Block" in " ".join(result["notes"])
