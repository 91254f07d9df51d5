"""What is particular to megatron-zero1 to -zero3; the contract suite holds the rest."""

from __future__ import annotations

import importlib.machinery
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from distkit.config import load_config
from distkit.errors import ConfigError, StrategyUnavailable
from distkit.strategies import checks
from distkit.strategies.registry import apply_defaults, strategy_class
from tests.pool import Pool, WorkerError

CASES = "tests.strategies.megatron_cases:"
TRAIN, RESUME = "tests.contract.cases:train", "tests.contract.cases:resume_only"
STRATEGIES = ["megatron-zero1", "megatron-zero2", "megatron-zero3"]
SETTINGS = {"optim.clip_norm": 0.5}
SPLIT = {**SETTINGS, "parallel.tensor": 2}

PLAIN: dict[str, Any] = {}
LLAMA_LIKE: dict[str, Any] = {
    "tied": False,
    "rope": True,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
}

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core isn't installed: scripts/setup")


def assert_same_training(result: dict[str, Any], expected: dict[str, Any], steps: int = 20) -> None:
    assert len(result["log"]) == len(expected["log"]) >= steps
    for name, tolerance in (("loss", {"abs": 1e-5}), ("grad_norm", {"rel": 1e-4})):
        found, wanted = ([line[name] for line in run["log"]] for run in (result, expected))
        assert found == pytest.approx(wanted, **tolerance)


# -- models that know nothing of it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_contracts_model_on_four_processes(pool: Pool, tmp_path: Path, strategy: str) -> None:
    """L1, L5, P1, K8, K9: 2 x 2 with clipping; its checkpoint is the same bits in one process and back."""
    same: dict[str, Any] = {"epochs": 7}
    expected = pool.run(TRAIN, 1, strategy="single", run_dir=str(tmp_path / "s"), settings=SETTINGS, **same)[0]
    run = pool.run(TRAIN, 4, strategy=strategy, run_dir=str(tmp_path / "a"), settings=SPLIT, **same)[0]
    assert_same_training(run, expected)
    assert run["norm"] == pytest.approx(expected["norm"], rel=1e-4)
    source = str(tmp_path / "a" / "checkpoints" / "step-00000021")
    assert pool.run(RESUME, 1, strategy="single", run_dir=str(tmp_path / "b"), source=source)[0] == run["shards"]
    source = str(tmp_path / "b" / "checkpoints" / "step-00000021")
    settings = {"parallel.tensor": 2}
    back = pool.run(RESUME, 4, strategy=strategy, run_dir=str(tmp_path / "c"), source=source, settings=settings)[0]
    assert back == run["shards"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_llama_on_four_processes(pool: Pool, tmp_path: Path, strategy: str) -> None:
    """The same for transformers' Llama; its 14 layers, embedding and head are computed by megatron-core, whose backward sums
    for the head only: q, k and v have one sum together, and rows none."""
    case = CASES + "train_llama"
    expected = pool.run(case, 1, strategy="single", run_dir=str(tmp_path / "s"), settings=SETTINGS)[0]
    assert expected["calls"] == expected["lookups"] == []
    run = pool.run(case, 4, strategy=strategy, run_dir=str(tmp_path / "a"), settings=SPLIT)[0]
    assert_same_training(run, expected)
    assert run["lookups"] == [32] * 20
    assert len(run["calls"]) == 15 * 20
    assert [shape for shape, _ in run["calls"][:7]] == [
        *([16, 32], [8, 32], [8, 32], [32, 16]),
        *([24, 32], [24, 32], [32, 24]),
    ]
    assert [[shape, sums] for shape, sums in run["calls"] if sums] == [[[32, 32], True]] * 20
    places = [("single", 1, SETTINGS), (strategy, 4, SPLIT)]
    last = "a"
    for folder, (name, size, settings) in zip("bc", places, strict=True):
        settings = {**settings, "checkpoint.resume": str(tmp_path / last / "checkpoints" / "step-00000020")}
        run_dir, last = str(tmp_path / folder), folder
        moved = pool.run(case, size, strategy=name, run_dir=run_dir, settings=settings, resave=True)[0]
        assert moved["shards"] == run["shards"]


@pytest.mark.parametrize(
    ("settings", "band"),
    [
        ({"precision": "bf16"}, 0.02),
        *(({"memory.activation_checkpointing": how}, 1e-5) for how in ("full", "selective")),
    ],
)
def test_precision_and_recomputation(pool: Pool, tmp_path: Path, settings: dict[str, Any], band: float) -> None:
    expected = pool.run(TRAIN, 1, strategy="single", run_dir=str(tmp_path / "s"))[0]
    run_dir, settings = str(tmp_path / "t"), {"parallel.tensor": 2, **settings}
    result = pool.run(TRAIN, 4, strategy="megatron-zero2", run_dir=run_dir, settings=settings)[0]
    losses = [line["loss"] for line in result["log"]]
    assert losses == pytest.approx([line["loss"] for line in expected["log"]], abs=band)


# -- megatron-core's own models ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_process(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A GPTModel trained in one process, once: (its result, its last checkpoint)."""

    @cache
    def run(llama_like: bool) -> tuple[dict[str, Any], str]:
        folder = tmp_path_factory.mktemp("one")
        model = LLAMA_LIKE if llama_like else PLAIN
        arguments = {"run_dir": str(folder), "settings": SETTINGS, "model": model}
        result = pool.run(CASES + "train_gpt", 1, strategy="megatron-zero2", **arguments)[0]
        return result, str(folder / "checkpoints" / "step-00000020")

    return run


@pytest.mark.parametrize("llama_like", [False, True], ids=["plain", "llama-like"])
@pytest.mark.parametrize(("strategy", "processes"), [*((s, 4) for s in STRATEGIES), ("megatron-zero2", 2)])
def test_a_gpt_model_as_it_is(
    pool: Pool, tmp_path: Path, one_process: Any, strategy: str, processes: int, llama_like: bool
) -> None:
    """Losses, norms and shapes are one process's, and nothing of megatron-core is left running."""
    expected, _ = one_process(llama_like)
    model = LLAMA_LIKE if llama_like else PLAIN
    run = pool.run(
        CASES + "train_gpt", processes, strategy=strategy, run_dir=str(tmp_path), settings=SPLIT, model=model
    )[0]
    assert_same_training(run, expected)
    assert run["shapes"] == expected["shapes"]
    assert run["shapes"]["decoder.layers.0.self_attention.linear_qkv.weight"] == [64, 32]
    assert not run["left"]


@pytest.mark.parametrize("llama_like", [False, True], ids=["plain", "llama-like"])
def test_its_checkpoint_moves_between_tensor_sizes(
    pool: Pool, tmp_path: Path, one_process: Any, llama_like: bool
) -> None:
    """K8, K9: 1 -> 2 -> 4 -> 1 ranks to a layer are the same bits, and the losses after a move those of staying."""
    case = CASES + "train_gpt"
    expected, source = one_process(llama_like)
    model = {**(LLAMA_LIKE if llama_like else PLAIN)}
    for step, (strategy, processes, size) in enumerate(
        [("megatron-zero3", 4, 2), ("megatron-zero1", 2, 2), ("megatron-zero2", 1, 1)]
    ):
        settings = {"parallel.tensor": size, "checkpoint.resume": source}
        run_dir = str(tmp_path / str(step))
        moved = pool.run(
            case, processes, strategy=strategy, run_dir=run_dir, settings=settings, model=model, resave=True
        )[0]
        assert moved["shards"] == expected["shards"]
        source = f"{run_dir}/checkpoints/step-00000020"
    begun = {**SPLIT, "max_steps": 8}
    pool.run(case, 4, strategy="megatron-zero2", run_dir=str(tmp_path / "go"), settings=begun, model=model)
    rest = pool.run(case, 1, strategy="megatron-zero2", run_dir=str(tmp_path / "go"), settings=SETTINGS, model=model)[0]
    assert_same_training(rest, expected)


def test_its_dropout_is_equal_where_it_is_whole_and_differs_where_it_is_split(pool: Pool, tmp_path: Path) -> None:
    ranks = pool.run(CASES + "masks", 4, run_dir=str(tmp_path))
    for name, drops in ranks[0]["dropped"].items():
        assert 0.05 < drops < 0.4, name
    digest = [rank["digests"] for rank in ranks]
    for name in ("whole", "hidden"):  # equal in a tensor group, different between data-parallel ranks
        assert digest[0][name] == digest[1][name] and digest[2][name] == digest[3][name]
        assert digest[0][name] != digest[2][name]
    assert len({rank["split"] for rank in digest}) == 4


def test_with_dropout_a_resumed_run_goes_on_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    """C1: the states of megatron-core's generators are kept too."""
    case, model = CASES + "train_gpt", {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    runs = []
    for folder, stops in (("a", (None,)), ("b", (7, None))):
        for stop in stops:
            settings = {**SPLIT, "max_steps": stop}
            arguments = {"run_dir": str(tmp_path / folder), "settings": settings, "model": model}
            result = pool.run(case, 2, strategy="megatron-zero2", **arguments)[0]
        runs.append(result)
    assert [line["loss"] for line in runs[0]["log"]] == [line["loss"] for line in runs[1]["log"]]
    assert runs[0]["shards"] == runs[1]["shards"]


@pytest.mark.parametrize(
    ("settings", "model", "steps", "band"),
    [
        ({"precision": "bf16"}, {}, 8, 0.03),
        ({}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, 20, 1e-5),
    ],
    ids=["bf16", "recompute"],
)
def test_its_precision_and_recomputation(
    pool: Pool,
    tmp_path: Path,
    one_process: Any,
    settings: dict[str, Any],
    model: dict[str, Any],
    steps: int,
    band: float,
) -> None:
    expected, _ = one_process(False)
    arguments = {"run_dir": str(tmp_path), "settings": {**SPLIT, **settings}, "model": model}
    run = pool.run(CASES + "train_gpt", 4, strategy="megatron-zero2", **arguments)[0]
    found, wanted = ([line["loss"] for line in result["log"][:steps]] for result in (run, expected))
    assert found == pytest.approx(wanted, abs=band)


@pytest.mark.parametrize(
    ("settings", "model", "message"),
    [
        ({"parallel.tensor": 2}, {"built_for": 1}, "tensor_model_parallel_size=1, and parallel.tensor is 2"),
        ({"memory.activation_checkpointing": "full"}, {}, "memory.activation_checkpointing was set to 'full', and GPTModel"),
        ({}, {"then": {"gradient_accumulation_fusion": True}}, "built with gradient_accumulation_fusion=True"),
        ({"parallel.sequence": True}, {}, "parallel.sequence was set, and GPTModel is made of megatron-core's layers"),
        ({}, {"num_query_groups": 1}, "num_query_groups=1, which parallel.tensor=2 doesn't divide"),
    ],
)  # fmt: skip
def test_models_that_would_train_wrongly_are_refused(
    pool: Pool, tmp_path: Path, settings: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    arguments = {"run_dir": str(tmp_path), "settings": settings, "model": model}
    with pytest.raises(WorkerError, match=message):
        pool.run(CASES + "train_gpt", 2, strategy="megatron-zero2", **arguments)


def test_the_native_way_refuses_them(pool: Pool, tmp_path: Path) -> None:
    settings = {"parallel.tensor": 2}
    with pytest.raises(WorkerError, match="Linear is split over a tensor group already(.|\n)*megatron-zero2"):
        pool.run(CASES + "prepare_marked", 2, run_dir=str(tmp_path), settings=settings)


# -- groups and settings ----------------------------------------------------------------------------------------------


def test_groups_are_those_of_the_world(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(CASES + "groups", 4)):
        assert found["tensor"] == ([0, 1] if rank < 2 else [2, 3])
        assert found["data"] == ([0, 2] if rank % 2 == 0 else [1, 3])
        assert found["places"] == found["world"] == [rank % 2, rank // 2]
        assert found["generator"]


def test_groups_that_the_script_made(pool: Pool, tmp_path: Path) -> None:
    """Fitting ones are used and stay, others are refused."""
    assert pool.run(CASES + "own_groups", 2, run_dir=str(tmp_path), size=2) == ["2", "2"]
    with pytest.raises(WorkerError, match=r"whose tensor group of rank 0 has ranks \[0\]; parallel.tensor=2 makes it"):
        pool.run(CASES + "own_groups", 2, run_dir=str(tmp_path), size=1)


def test_a_tensor_group_is_a_node_unless_it_is_set(pool: Pool, tmp_path: Path) -> None:
    case, arguments = CASES + "tensor_size", {"strategy": "megatron-zero1", "run_dir": str(tmp_path)}
    assert pool.run(case, 4, settings={}, **arguments)[0] == [4, 4, 1]
    assert pool.run(case, 4, settings={"parallel.tensor": 2}, **arguments)[0] == [2, 2, 2]
    assert pool.run(case, 1, settings={}, **arguments)[0] == [1, 1, 1]
    loaded = load_config(overrides=["strategy=megatron-zero2"])
    apply_defaults(loaded, 8)
    assert loaded.config.parallel.tensor == 8
    assert loaded.origins["parallel.tensor"] == "strategy megatron-zero2, 8 processes per node"
    strategy_class("megatron-zero2").check(loaded.config, processes=16)


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"parallel.tensor": 1}, "parallel.tensor is 1 for 4 processes", "--set parallel.tensor=2   or --strategy zero2"),
        ({"parallel.tensor": 3}, "parallel.tensor=3 doesn't divide the 4", "--set parallel.tensor=2   or --strategy zero2"),
        ({"parallel.tensor": 2, "precision": "fp16"}, "precision was set to 'fp16'", "--set precision=bf16"),
    ],
)  # fmt: skip
def test_settings_that_can_not_be(settings: dict[str, Any], message: str, hint: str) -> None:
    config = load_config(arguments={"strategy": "megatron-zero2", **settings}).config
    with pytest.raises(ConfigError, match=message) as caught:
        strategy_class("megatron-zero2").check(config, processes=4)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tensor_model_parallel_size", 2, "follows from other settings(.|\n)*parallel.tensor=N"),
        ("gradient_accumulation_fusion", True, "DeepSpeed reads gradients where torch puts them"),
        ("sequence_parallel", True, "activations between split layers are whole on every rank"),
        ("deterministic_mod", True, "did you mean engine.megatron.deterministic_mode"),
    ],
)
def test_engine_settings_that_can_not_be(pool: Pool, tmp_path: Path, name: str, value: Any, message: str) -> None:
    settings = {f"engine.megatron.{name}": value}
    with pytest.raises(WorkerError, match=message):
        pool.run(CASES + "tensor_size", 2, strategy="megatron-zero1", run_dir=str(tmp_path), settings=settings)


def test_engine_settings_are_passed_on(pool: Pool, tmp_path: Path) -> None:
    settings = {"engine.megatron.deterministic_mode": True}
    sizes = pool.run(CASES + "tensor_size", 2, strategy="megatron-zero1", run_dir=str(tmp_path), settings=settings)[0]
    assert sizes == [2, 2, 1]


# -- what is installed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({"megatron"}, "needs megatron-core, which is not installed"),
        ({"megatron", "deepspeed"}, "needs deepspeed and megatron-core, which are not installed"),
    ],
)
def test_an_engine_that_is_missing(monkeypatch: pytest.MonkeyPatch, missing: set[str], message: str) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name in missing else find_spec(name))
    config = load_config(arguments={"strategy": "megatron-zero1"}).config
    with pytest.raises(StrategyUnavailable, match=message) as caught:
        strategy_class("megatron-zero1").check(config, processes=None)
    assert caught.value.hint == "pip install 'distkit[deepspeed,megatron]'"


def test_layers_that_lack_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older megatron-core: its layers take no group."""
    import megatron.core.tensor_parallel as megatron_layers

    from distkit.strategies.tensor_parallel import megatron

    class Older:
        def __init__(self, input_size: int, output_size: int) -> None: ...

    monkeypatch.setattr(megatron_layers, "RowParallelLinear", Older)
    with pytest.raises(
        StrategyUnavailable, match=r"megatron-core [\d.]+ is installed, and its layers take no tp_group"
    ):
        megatron.import_megatron()


def test_a_module_that_needs_triton_is_stood_in_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only where there is such a module, as from 0.19 on, and no triton."""
    from distkit.strategies.tensor_parallel import megatron

    name = "megatron.core.transformer.moe.ops.paged_stash"
    monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.machinery.ModuleSpec("megatron.core", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(megatron, "find_spec", {"triton": None, "megatron.core": spec}.__getitem__)
    megatron._stand_in_for_triton()
    assert name not in sys.modules
    folder = tmp_path / "transformer" / "moe" / "ops"
    folder.mkdir(parents=True)
    (folder / "paged_stash.py").write_text("import triton\n")
    megatron._stand_in_for_triton()
    stand_in = sys.modules.pop(name)
    assert stand_in.paged_stash_copy_kernel is None
    assert not hasattr(stand_in, "__path__")
