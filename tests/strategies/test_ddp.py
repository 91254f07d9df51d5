"""What is particular to ddp, and to dp on a machine without GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from distkit.config import load_config
from distkit.errors import ConfigError, StrategyUnavailable
from distkit.strategies.registry import strategy_class, strategy_names
from tests.pool import Pool, WorkerError

CASES = "tests.strategies.ddp_cases:"


def test_gradients_travel_at_the_windows_end_only(pool: Pool, tmp_path: Path) -> None:
    """L7: no traffic at all on the micro batches before; also in the short window at the epoch's end."""
    for found in pool.run(CASES + "traffic", 2, run_dir=str(tmp_path), accumulate=3):
        ended = [end for end, _ in found]
        assert ended == [False, False, True] * 2 + [False, True]
        assert all((count > 0) == end for end, count in found)


@pytest.mark.parametrize("method", ["fp16", "bf16"])
def test_compression_keeps_replicas_equal(pool: Pool, tmp_path: Path, method: str) -> None:
    plain = pool.run(CASES + "compressed", 2, run_dir=str(tmp_path / "a"), method="none")
    small = pool.run(CASES + "compressed", 2, run_dir=str(tmp_path / "b"), method=method)
    assert small[0]["state"] == small[1]["state"]
    a, b = ([line["loss"] for line in r[0]["log"]] for r in (plain, small))
    assert a != b
    assert b == pytest.approx(a, abs=0.02)


def test_attributes_of_the_model_are_in_reach(pool: Pool, tmp_path: Path) -> None:
    for blocks, tied, own, message in pool.run(CASES + "attributes", 2, run_dir=str(tmp_path)):
        assert (blocks, tied, own) == (2, True, True)
        assert "TinyGPT" in message


def test_compile_changes_no_names_and_no_losses(pool: Pool, tmp_path: Path) -> None:
    """P8."""
    plain = pool.run(CASES + "compiled", 2, run_dir=str(tmp_path / "a"), compile=False)[0]
    compiled = pool.run(CASES + "compiled", 2, run_dir=str(tmp_path / "b"), compile=True)[0]
    assert compiled["names"] == plain["names"]
    losses = [[line["loss"] for line in r["log"]] for r in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_unknown_arguments_name_the_nearest(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"engine\.ddp\.bucket_cap_mb=3"):
        pool.run(CASES + "bad_argument", 2, run_dir=str(tmp_path))


def test_a_frozen_teacher_is_the_same_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    a, b = pool.run(CASES + "frozen_teacher", 2, run_dir=str(tmp_path))
    assert a == b


def test_a_loader_that_was_not_prepared(pool: Pool, tmp_path: Path) -> None:
    """L4 without a prepared loader: three steps an epoch, the third short; equal at 1 and 2 processes."""
    runs = [pool.run(CASES + "unprepared_loader", n, run_dir=str(tmp_path / str(n)), ranks=n)[0] for n in (1, 2)]
    assert [line["step"] for line in runs[0]] == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "grad_norm"):
        one, two = ([line[name] for line in run] for run in runs)
        assert two == pytest.approx(one, rel=1e-5)


def test_dp_says_what_it_does_without_gpus() -> None:
    strategy = strategy_class("dp")(load_config(script={"strategy": "dp", "device": "cpu"}).config)
    (line,) = strategy.notes()
    assert "0 GPUs" in line and "unsplit" in line


@pytest.mark.parametrize(
    ("name", "settings", "processes", "message"),
    [
        ("single", {}, 2, "--strategy ddp"),
        ("dp", {}, 2, "--nproc 1"),
        ("ddp", {"memory.offload": "params"}, 2, "memory.offload=none"),
        ("ddp", {"parallel.tensor": 3}, 4, "parallel.tensor=1"),
        ("ddp", {"parallel.replicate": 2}, 2, "parallel.replicate=1"),
        ("ddp", {"engine.ddp.static_graph": True, "optim.unused_parameters": "allow"}, 2, "static_graph=false"),
    ],
)
def test_refusals_before_anything_starts(name: str, settings: dict[str, object], processes: int, message: str) -> None:
    config = load_config(script={"strategy": name, **settings}).config
    with pytest.raises(ConfigError, match=message):
        strategy_class(name).check(config, processes=processes)


def test_unknown_strategies_name_the_nearest() -> None:
    """X9."""
    with pytest.raises(ConfigError, match="--strategy ddp"):
        strategy_class("ddpp")
    with pytest.raises(ConfigError, match="--strategy dp"):
        strategy_class("dpp")
    with pytest.raises(ConfigError, match="--strategy ddp"):
        strategy_class("dpp", several=True)


def test_strategies_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point group: a package in the path with its metadata, as pip would install it."""
    from distkit.strategies import registry

    (tmp_path / "mine.py").write_text(
        "from distkit.strategies.single import SingleStrategy\nclass Mine(SingleStrategy):\n    name = 'mine'\n"
    )
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[distkit.strategies]\nmine = mine:Mine\ngone = nowhere.at.all:X\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._outside.cache_clear()
    try:
        assert {"mine", "gone"} <= set(strategy_names())
        assert strategy_class("mine").name == "mine"
        with pytest.raises(StrategyUnavailable, match="pip install mine"):
            strategy_class("gone")
    finally:
        registry._outside.cache_clear()


def test_several_processes_without_a_named_strategy_are_ddp(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(CASES + "unnamed", 2, run_dir=str(tmp_path / "a")) == [["ddp", 2]] * 2
    assert pool.run(CASES + "unnamed", 1, run_dir=str(tmp_path / "b")) == [["single", 1]]
