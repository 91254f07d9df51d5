"""What an engine saved is imported bit for bit, and distkit goes on from it as the engine itself did."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from distkit.checkpoint import CheckpointReader
from distkit.checkpoint.foreign import Imported, import_checkpoint
from distkit.state import Region
from tests.checkpoint.foreign.conftest import Made, Origins
from tests.pool import Pool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # an engine's first import takes its time

HERE = "tests.checkpoint.foreign.origins"
BUILD = {"model": f"{HERE}:build"}
SCHEDULED = ("zero", "accelerate", "torch", "lightning")
"""Origins that stepped a scheduler; FSDP here has none."""

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "zero0": ({}, "deepspeed zero0"),
    "zero1": ({}, "deepspeed zero1"),
    "zero2": ({}, "deepspeed zero2"),
    "zero3": ({}, "deepspeed zero3"),
    "zero2-of-3": ({}, "deepspeed zero2"),
    "zero3-of-3": ({}, "deepspeed zero3"),
    "dcp": ({}, "torch.distributed.checkpoint"),
    "dcp-flat": ({}, "torch.distributed.checkpoint"),
    "titan": ({"epoch": 1}, "torch.distributed.checkpoint"),
    "accelerate": ({**BUILD, "epoch": 1}, "accelerate"),
    "accelerate-bin": ({"epoch": 1}, "accelerate"),
    "accelerate-fsdp": ({"epoch": 1}, "accelerate, fsdp"),
    "accelerate-fsdp-full": ({"epoch": 1}, "accelerate, fsdp"),
    "torch": ({}, "torch.save"),
    "torch-names": ({}, "torch.save"),
    "lightning": ({"strip_prefix": "net."}, "lightning 2.6.6"),
}


def check_truth(made: Made, done: Imported) -> None:
    """Parameters, buffers and moments are those that the engine held, bit for bit, and no others."""
    reader = CheckpointReader(done.path, verify="full")
    truth = torch.load(made.folder / "truth.pt", weights_only=True)
    for key, expected in truth.items():
        name, _, kind = key.rpartition("/")
        group = "optimizer" if kind.startswith("exp_avg") else "model"
        found = reader.read(group, name, kind, Region.whole(expected.shape))
        assert found.dtype == expected.dtype and torch.equal(found, expected), key
    stored = {(g, n) for g, n, kind, _ in reader.manifest.all_tensors() if kind != "step"}
    known = {("optimizer" if key.rpartition("/")[2].startswith("exp_avg") else "model", key.rpartition("/")[0]) for key in truth}  # fmt: skip
    assert stored == known
    assert reader.manifest.aliases == {"model": {"head.weight": "wte.weight"}}


@pytest.mark.parametrize("kind", CASES)
def test_import_and_go_on(kind: str, origins: Origins, pool: Pool, tmp_path: Path) -> None:
    options, written_by = CASES[kind]
    made = origins[kind]
    done = import_checkpoint(made.source, tmp_path / "run", **options)
    assert (done.origin, done.step, done.epoch) == (written_by, 3, 1)
    check_truth(made, done)
    strategy, processes = ("ddp", 2) if kind in ("zero2", "dcp", "torch") else ("single", 1)
    result = pool.run(
        "tests.contract.cases:train",
        processes,
        timeout=300,
        strategy=strategy,
        run_dir=str(tmp_path / "run"),
        shuffle=False,
        scheduler=kind.startswith(SCHEDULED) and "fsdp" not in kind,
    )[0]
    assert [entry["step"] for entry in result["log"]] == [4, 5, 6]
    assert [entry["loss"] for entry in result["log"]] == pytest.approx(made.losses, abs=1e-6)


@pytest.mark.parametrize("kind", ["zero2-frozen", "zero3-frozen"])
def test_frozen_parameters(kind: str, origins: Origins, pool: Pool, tmp_path: Path) -> None:
    made = origins[kind]
    done = import_checkpoint(made.source, tmp_path / "run")
    check_truth(made, done)
    assert done.optimizers[0]["parameters"] == 14 and done.parameters == 28
    arguments = {"strategy": "single", "run_dir": str(tmp_path / "run"), "shuffle": False, "scheduler": True}
    log = pool.run("tests.contract.cases:train", 1, model={"frozen": True}, **arguments)[0]["log"]
    assert [entry["loss"] for entry in log] == pytest.approx(made.losses, abs=1e-6)


@pytest.mark.parametrize("kind", ["zero0-bf16", "zero1-bf16", "zero3-bf16"])
def test_fp32_masters_of_bf16(kind: str, origins: Origins, tmp_path: Path) -> None:
    """Parameters are the masters, not what was rounded from them."""
    made = origins[kind]
    done = import_checkpoint(made.source, tmp_path / "run")
    if kind != "zero0-bf16":  # of which DeepSpeed gives no masters
        check_truth(made, done)
    reader = CheckpointReader(done.path)
    values = reader.read("model", "wpe.weight", "parameter", Region.whole((8, 16)))
    assert values.dtype == torch.float32 and not torch.equal(values, values.bfloat16().float())


def test_every_strategy_goes_on_from_it(origins: Origins, pool: Pool, tmp_path: Path) -> None:
    """What came from ZeRO-3 on two processes goes on under FSDP and ZeRO."""
    made = origins["zero3"]
    for strategy in ("fsdp", "zero2"):
        import_checkpoint(made.source, tmp_path / strategy)
        arguments = {"strategy": strategy, "run_dir": str(tmp_path / strategy), "shuffle": False, "scheduler": True}
        log = pool.run("tests.contract.cases:train", 2, **arguments)[0]["log"]
        assert [entry["loss"] for entry in log] == pytest.approx(made.losses, abs=1e-6)


def test_a_deepspeed_folder_of_accelerate(origins: Origins, tmp_path: Path) -> None:
    """save_state puts DeepSpeed's folder into ``pytorch_model`` and the rest beside it."""
    made = origins["zero2"]
    shutil.copytree(made.folder, tmp_path / "old" / "pytorch_model")
    for rank in range(2):
        torch.save({"random_state": object}, tmp_path / "old" / f"random_states_{rank}.pkl")
    done = import_checkpoint(tmp_path / "old", tmp_path / "run")
    assert done.origin == "accelerate, deepspeed zero2" and done.world_size == 2 and done.epoch == 1
    assert "random number generators (pickled Python objects)" in done.left
    check_truth(made, done)


def test_one_tag_of_several(origins: Origins, tmp_path: Path) -> None:
    done = import_checkpoint(origins["zero2"].folder / "global_step3", tmp_path / "run")
    assert done.step == 3 and "'mine'" in done.left


def as_lightning(folder: Path, copy: Path) -> dict[str, Any]:
    """What Lightning 2.6 adds to a folder of its engine (strategies/deepspeed.py, strategies/fsdp.py)."""
    shutil.copytree(folder, copy)
    schedulers = [{"last_epoch": 3, "_step_count": 4}]
    return {"pytorch-lightning_version": "2.6.6", "epoch": 4, "global_step": 3, "lr_schedulers": schedulers, "loops": {"fit_loop": {"x": 1}}}  # fmt: skip


def test_a_deepspeed_folder_of_lightning(origins: Origins, tmp_path: Path) -> None:
    """The tag is ``checkpoint``, and Lightning's dict is DeepSpeed's client_state."""
    made, copy = origins["zero2"], tmp_path / "last.ckpt"
    added = as_lightning(made.folder, copy)
    (copy / "global_step3").rename(copy / "checkpoint")
    (copy / "latest").write_text("checkpoint")
    file = copy / "checkpoint" / "mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=True)
    del state["epoch"]
    torch.save({**state, "lr_scheduler": None, **added}, file)
    done = import_checkpoint(copy, tmp_path / "run", origin="lightning")
    assert (done.origin, done.epoch, done.schedulers) == ("lightning 2.6.6, deepspeed zero2", 4, 1)
    assert "the loops' progress" in done.left
    check_truth(made, done)


def test_a_sharded_folder_of_lightning(origins: Origins, tmp_path: Path) -> None:
    """What isn't sharded lies in ``meta.pt``."""
    made, copy = origins["dcp"], tmp_path / "last.ckpt"
    added = as_lightning(made.folder, copy)
    torch.save(added, copy / "meta.pt")
    done = import_checkpoint(copy, tmp_path / "run")
    assert done.origin == "lightning 2.6.6, torch.distributed.checkpoint"
    assert done.schedulers == 1 and done.optimizers[0]["parameters"] == 28
    check_truth(made, done)
