"""What is particular to horovod; the contract suite holds the rest."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from distkit.config import load_config
from distkit.errors import ConfigError
from distkit.strategies.registry import strategy_class
from tests.pool import Pool, WorkerError

CASES = "tests.strategies.horovod_cases:"

pytestmark = pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod isn't installed: scripts/install-horovod")


def column(result: dict[str, Any], name: str) -> list[float]:
    return [line[name] for line in result["log"]]


# -- World over Horovod -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4])
def test_verbs(pool: Pool, n: int) -> None:
    """The same body as over torch.distributed."""
    for found in pool.run(CASES + "world_case", n, name="verbs"):
        assert found["sum"] == [n * (n - 1) / 2, n]
        assert (found["max"], found["min"]) == (n - 1, 5)
        assert found["any"] == [True, False]
        assert found["all"] == [True, n == 1]
        assert found["gathered"] == [[10.0 * k + i for i in range(k + 1)] for k in range(n)]
        assert found["bools"] == [[k == 0] for k in range(n)]
        assert found["empty"] == [[0.0] * k for k in range(n)]
        assert found["objects"] == [{"rank": k, "text": "x" * k, "none": None} for k in range(n)]
        assert found["broadcast"] == [n - 1.0] * 2
        assert found["object"] == {"from": 0}


def test_every_dtype(pool: Pool) -> None:
    """Horovod reduces no bfloat16, uint8, int8 and bool; World does."""
    for found in pool.run(CASES + "dtypes", 2):
        assert [case for case in found if not case[2]] == []
        assert len(found) == 34


def test_a_rank_that_skips_a_verb_is_named(pool: Pool) -> None:
    for message in pool.run(CASES + "world_case", 3, name="mismatch")[:1]:
        assert "only ranks 0, 2 called it; missing: 1" in message


def test_flags_of_a_step_are_kept(pool: Pool) -> None:
    flags = [[False, False, True, False], [True, False, False, False], [False] * 4]
    assert pool.run(CASES + "world_case", 2, name="flags") == [flags] * 2


def test_main_first_may_take_longer_than_a_collective(pool: Pool) -> None:
    """H2."""
    first, second = pool.run(CASES + "world_case", 2, name="main_first", step_s=1.5, work_s=3.0)
    assert second[0] >= first[0]


def test_a_missing_rank_is_an_error_in_time(pool: Pool) -> None:
    """Horovod's own stall inspector never says a word under Gloo."""
    (message, seconds), _ = pool.run(CASES + "missing_rank", 2, limit=2.0)
    assert "not all ranks joined" in message and "timeouts.step_s=2" in message
    assert 2.0 <= seconds < 3.5
    pool.close()  # these workers never left Horovod in order


def test_torch_process_groups_live_beside_it(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(CASES + "beside_torch", 2, run_dir=str(tmp_path)) == [2.0, 2.0]


# -- gradients ----------------------------------------------------------------------------------------------------------


def test_gradients_travel_in_the_windows_last_backward_only(pool: Pool, tmp_path: Path) -> None:
    """L7; and they overlap with it: buckets leave before backward returns."""
    for found in pool.run(CASES + "traffic", 2, run_dir=str(tmp_path), accumulate=3, bucket_cap_mb=0.01):
        assert [ended for ended, _, _ in found] == [False, False, True] * 2 + [False, True]
        for ended, during, after in found:
            assert (during >= 4) == ended
            assert after == 0


@pytest.mark.parametrize("kind", ["foreach", "fused", "tensor_lr"])
def test_forms_of_adamw(pool: Pool, tmp_path: Path, kind: str) -> None:
    expected = pool.run(CASES + "train", 1, run_dir=str(tmp_path / "a"), strategy="single", kind=kind)[0]
    result = pool.run(CASES + "train", 2, run_dir=str(tmp_path / "b"), kind=kind)[0]
    for name in ("loss", "grad_norm"):
        assert column(result, name) == pytest.approx(column(expected, name), abs=1e-5)


def test_parameters_that_only_some_ranks_use(pool: Pool, tmp_path: Path) -> None:
    """P3, P6: a missing gradient counts as 0 in the mean; what nobody used has none and doesn't decay."""
    for found in pool.run(CASES + "branches", 2, run_dir=str(tmp_path)):
        assert found["bias"] == [0.5, 0.5]
        assert found["weight"] == [[1.5] * 3] * 2
        assert found["never"] is None
        assert not found["moved"]["never.weight"] and found["moved"]["odd.bias"] and found["moved"]["always.weight"]


def test_groups_that_come_later_and_layers_that_freeze(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(CASES + "late_group", 2, run_dir=str(tmp_path))
    assert results[0] == results[1]


def test_two_backwards_in_one_micro_batch(pool: Pool, tmp_path: Path) -> None:
    for together, split in pool.run(CASES + "two_losses", 2, run_dir=str(tmp_path)):
        assert split == pytest.approx(together, rel=1e-5)


def test_a_loader_that_was_not_prepared(pool: Pool, tmp_path: Path) -> None:
    """L4: an epoch ends inside a window that nobody announced."""
    one = pool.run(CASES + "unprepared_loader", 1, run_dir=str(tmp_path / "1"), strategy="single")[0]
    two = pool.run(CASES + "unprepared_loader", 2, run_dir=str(tmp_path / "2"), strategy="horovod")[0]
    assert [line["step"] for line in two] == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one], rel=1e-5)


def test_fp16_compression_keeps_replicas_equal(pool: Pool, tmp_path: Path) -> None:
    plain = pool.run(CASES + "train", 2, run_dir=str(tmp_path / "a"))
    small = pool.run(CASES + "train", 2, run_dir=str(tmp_path / "b"), **{"compress.method": "fp16"})
    assert small[0]["sums"] == small[1]["sums"]
    assert column(small[0], "loss") != column(plain[0], "loss")
    assert column(small[0], "loss") == pytest.approx(column(plain[0], "loss"), abs=0.02)
    # Adam is blind to a wrong divisor; the norm is not.
    assert column(small[0], "grad_norm") == pytest.approx(column(plain[0], "grad_norm"), rel=0.01)


def test_an_overflow_on_one_rank_is_skipped_by_all(pool: Pool, tmp_path: Path) -> None:
    """R2, P1: unscaled after the exchange, so all ranks see the same gradients."""
    results = pool.run(CASES + "overflow", 2, run_dir=str(tmp_path))
    assert results[0]["sums"] == results[1]["sums"]
    assert all(math.isfinite(x) for x in results[0]["sums"])
    assert column(results[0], "skipped_steps") == [0, 1, 1]


def test_statistics_of_batch_norm_are_the_same_everywhere(pool: Pool, tmp_path: Path) -> None:
    a, b = pool.run(CASES + "batch_norm", 2, run_dir=str(tmp_path / "2"))
    assert a == b
    assert a[2] == 2
    alone = pool.run(CASES + "batch_norm", 1, run_dir=str(tmp_path / "1"), steps=1)[0]
    assert alone[0] != [0.0] * 4


# -- the start ----------------------------------------------------------------------------------------------------------


def test_rank_0s_optimizer_state_is_taken(pool: Pool, tmp_path: Path) -> None:
    a, b = pool.run(CASES + "restored_optimizer", 2, run_dir=str(tmp_path))
    assert a == b
    assert a["lr"] == 0.05 and [step for step, _ in a["state"]] == [1.0, 1.0]


def test_a_fresh_optimizer_takes_no_phantom_step(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(CASES + "fresh_optimizer", 2, run_dir=str(tmp_path)) == [[True, 0]] * 2


def test_the_learning_rate_follows_the_global_batch(pool: Pool, tmp_path: Path) -> None:
    """R3: linear by default, against the batch of one device; the start says so."""
    result = pool.run(CASES + "lines", 2, run_dir=str(tmp_path / "a"), **{"batch.per": "device"})[0]
    assert any("learning rate 0.01 -> 0.02: linear scaling, global batch 24" in line for line in result["said"])
    assert result["lr"] == [0.02] * len(result["lr"])
    settings = {"batch.per": "device", "optim.lr_scaling": "none"}
    assert set(pool.run(CASES + "lines", 2, run_dir=str(tmp_path / "b"), **settings)[0]["lr"]) == {0.01}


def test_process_sets(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(CASES + "process_sets", 4, run_dir=str(tmp_path)) == [1.0, 1.0, 5.0, 5.0]


def test_adasum_without_mpi_is_refused(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="--launcher mpirun"):
        pool.run(CASES + "train", 2, run_dir=str(tmp_path), **{"engine.horovod": {"op": "adasum"}})


@pytest.mark.parametrize(
    ("settings", "processes", "message"),
    [
        ({"compress.method": "bf16"}, 2, "compress.method=fp16"),
        ({"engine.horovod": {"cycle_tme": 2}}, 2, "engine.horovod.cycle_time=2"),
        ({"engine.horovod": {"op": "sum"}}, 2, "op=average"),
        ({"engine.horovod": {"op": "adasum"}}, 6, "--nproc 4"),
        ({"engine.horovod": {"op": "adasum"}, "compress.method": "fp16"}, 4, "compress.method=none"),
        ({"parallel.tensor": 2}, 2, "parallel.tensor=1"),
        ({"memory.offload": "optimizer"}, 2, "memory.offload=none"),
    ],
)
def test_refusals_before_anything_starts(settings: dict[str, Any], processes: int, message: str) -> None:
    config = load_config(script={"strategy": "horovod", **settings}).config
    with pytest.raises(ConfigError, match=message):
        strategy_class("horovod").check(config, processes=processes)


def test_adasum_keeps_the_learning_rate() -> None:
    for op, rule in (("average", "linear"), ("adasum", "none")):
        config = load_config(script={"strategy": "horovod", "engine.horovod": {"op": op}}).config
        assert strategy_class("horovod")(config).lr_scaling == rule
