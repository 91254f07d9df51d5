"""DeepSpeed's JSON from distkit's settings; no process, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distkit.config import load_config
from distkit.errors import ConfigError
from distkit.strategies.registry import strategy_class
from distkit.strategies.zero_config import deepspeed_config, reduce_bucket_size

ROOT = Path(__file__).resolve().parent.parent.parent

GUIDE = {
    "train_batch_size": 256,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "contiguous_gradients": True,
        "overlap_comm": True,
    },
    "fp16": {"enabled": True},
}
"""The selection guide's configuration for 13 billion parameters on 32 GPUs."""


def made(stage: int = 2, processes: int | None = 4, **settings: Any) -> dict[str, Any]:
    """The JSON for settings with dots as double underscores."""
    keys = {name.replace("__", "."): value for name, value in settings.items()}
    config = load_config(script={"strategy": f"zero{stage}", **keys}).config
    found = strategy_class(config.strategy).engine_config(config, processes)
    assert found is not None
    return found


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def test_the_guides_13b_configuration() -> None:
    config = load_config(file=ROOT / "recipes" / "13b" / "config.yaml").config
    found = strategy_class(config.strategy).engine_config(config, 32)
    assert found is not None
    assert {k: v for k, v in leaves(found).items() if k in leaves(GUIDE)} == leaves(GUIDE)
    assert found["train_micro_batch_size_per_gpu"] == 2
    unplaced = strategy_class(config.strategy).engine_config(config, None)
    assert unplaced is not None
    assert (unplaced["train_batch_size"], unplaced["gradient_accumulation_steps"]) == (256, 4)


def test_the_command_prints_it() -> None:
    command = ["config", "show", "--engine", "deepspeed", "-c", "recipes/13b/config.yaml", "--processes", "32"]
    program = [sys.executable, "-c", "import sys; from distkit.cli import main; main()"]
    printed = subprocess.run([*program, *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    config = load_config(file=ROOT / "recipes" / "13b" / "config.yaml").config
    assert json.loads(printed) == strategy_class("zero3").engine_config(config, 32)


def test_the_command_names_a_strategy_that_has_one() -> None:
    program = [sys.executable, "-c", "import sys; from distkit.cli import main; main()"]
    command = [*program, "config", "show", "--engine", "deepspeed", "-s", "ddp"]
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode == 2
    assert "'ddp' makes no configuration" in failed.stderr
    assert "Hint: -s zero3 --engine deepspeed" in failed.stderr


def test_settings_need_no_torch() -> None:
    code = (
        "import sys; from distkit.strategies.registry import strategy_class as s; from distkit.config import load_config as l;"
        "c = l(script={'strategy': 'zero3'}).config; s('zero3').check(c, processes=2);"
        "print([m for m in ('torch', 'deepspeed') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_batch_numbers() -> None:
    numbers = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [made(batch__size=8, batch__accumulate=2)[n] for n in numbers] == [64, 8, 2]
    assert [made(batch__size=64, batch__per="global", batch__micro=4)[n] for n in numbers] == [64, 4, 4]
    assert [made()[n] for n in numbers] == [4, 1, 1]  # the DataLoader's own size isn't known here
    assert [made(processes=None, batch__size=8).get(n) for n in numbers] == [None, 8, 1]


def test_precision() -> None:
    assert {"fp16", "bf16"}.isdisjoint(made())
    assert made(precision="bf16")["bf16"]["enabled"] is True
    assert made(precision="fp16")["fp16"] == {"enabled": True}
    for precision in ("fp32", "bf16", "fp16"):  # L6
        found = made(precision=precision)
        assert (found["communication_data_type"], found["data_types"]["grad_accum_dtype"]) == ("fp32", "fp32")
    assert made(precision="bf16", compress__method="bf16")["communication_data_type"] == "bf16"


def test_clipping_is_said_also_when_there_is_none() -> None:
    """DeepSpeed's own default is 1.0."""
    assert made()["gradient_clipping"] == 0.0
    assert made(optim__clip_norm=0.5)["gradient_clipping"] == 0.5


def test_offload() -> None:
    assert "offload_optimizer" not in made()["zero_optimization"]
    assert made(memory__offload="optimizer")["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    both = made(3, memory__offload="params")["zero_optimization"]
    assert (both["offload_optimizer"]["device"], both["offload_param"]["device"]) == ("cpu", "cpu")
    with pytest.raises(ConfigError, match=r"memory\.offload was set to 'params', but strategy 'zero2'"):
        strategy_class("zero2").check(
            load_config(script={"strategy": "zero2", "memory.offload": "params"}).config, processes=2
        )


def test_pure_bf16_is_not_offloaded() -> None:
    config = load_config(script={"strategy": "zero2", "precision": "bf16-pure", "memory.offload": "optimizer"}).config
    with pytest.raises(ConfigError, match="precision=bf16-pure and memory.offload=optimizer"):
        strategy_class("zero2").check(config, processes=2)


def test_nvme_is_passed_on() -> None:
    nvme = {"device": "nvme", "nvme_path": "/disk", "buffer_count": 5}
    found = made(3, memory__offload="optimizer", engine__deepspeed={"zero_optimization": {"offload_optimizer": nvme}})
    assert found["zero_optimization"]["offload_optimizer"] == {**nvme, "pin_memory": True}


def test_buckets_follow_the_model() -> None:
    config = load_config(script={"strategy": "zero3"}).config
    sizes = [
        deepspeed_config(config, stage=3, data_size=2, trained=n)["zero_optimization"]["reduce_bucket_size"]
        for n in (1_000, 100_000_000, 13_000_000_000)
    ]
    assert sizes == [1 << 20, 10_000_000, 500_000_000] == [reduce_bucket_size(n) for n in (10, 10**8, 10**11)]
    given = load_config(
        script={"strategy": "zero3", "engine.deepspeed": {"zero_optimization": {"reduce_bucket_size": 7}}}
    ).config
    assert deepspeed_config(given, stage=3, data_size=2, trained=10**9)["zero_optimization"]["reduce_bucket_size"] == 7


def test_anything_else_is_passed_on() -> None:
    extra = {"zero_optimization": {"sub_group_size": 1000}, "flops_profiler": {"enabled": True}}
    found = made(3, engine__deepspeed=extra)
    assert found["zero_optimization"]["sub_group_size"] == 1000
    assert found["zero_optimization"]["stage"] == 3
    assert found["flops_profiler"] == {"enabled": True}


@pytest.mark.parametrize(
    ("settings", "engine", "message", "hint"),
    [
        ({}, {"zero_optimization": {"stage": 1}}, "stage=1 contradicts strategy=zero2", "--strategy zero1"),
        ({}, {"fp16": {"enabled": True}}, "fp16.enabled=true contradicts precision=fp32", "precision=fp16"),
        ({"precision": "bf16"}, {"bf16": {"enabled": False}}, "contradicts precision=bf16", "precision=fp32"),
        ({}, {"gradient_clipping": 1.0}, "gradient_clipping=1.0 contradicts optim.clip_norm=null", "clip_norm=1.0"),
        (
            {"optim.clip_norm": 0.5},
            {"gradient_clipping": 1.0},
            "gradient_clipping=1.0 contradicts optim.clip_norm=0.5",
            "optim.clip_norm=1.0",
        ),
        (
            {"batch.size": 8, "batch.accumulate": 2},
            {"train_batch_size": 32},
            "train_batch_size=32 contradicts batch.size=8, which makes it 64",
            "batch.size=32",
        ),
        (
            {},
            {"gradient_accumulation_steps": 4},
            "gradient_accumulation_steps=4 contradicts batch.accumulate=null",
            "batch.accumulate=4",
        ),
        (
            {},
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer.device=cpu contradicts memory.offload=none",
            "memory.offload=optimizer",
        ),
        (
            {"memory.offload": "optimizer"},
            {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
            "offload_optimizer.device=none contradicts memory.offload=optimizer",
            "memory.offload=none",
        ),
        (
            {"memory.offload": "optimizer"},
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}},
            "ZeRO stage 2 keeps them in host memory",
            "--strategy zero3",
        ),
        (
            {"strategy": "zero3", "memory.offload": "optimizer"},
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "offload_optimizer.device=nvme was set, but not where",
            "nvme_path=",
        ),
        (
            {"strategy": "zero3", "memory.offload": "params"},
            {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/x"}}},
            "only optimizer states and masters",
            "device=cpu",
        ),
        (
            {"compress.method": "bf16"},
            {"communication_data_type": "fp16"},
            "communication_data_type=fp16 contradicts compress.method=bf16",
            "compress.method=fp16",
        ),
        ({}, {"optimizer": {"type": "AdamW"}}, "the optimizer is the one that the script makes", "leave optimizer out"),
        ({}, {"managed_gradient_accumulation": True}, "accumulation window", "batch.accumulate"),
        ({}, {"gradient_allreduce_op": "sum"}, "owns the divisor", "leave gradient_allreduce_op out"),
        ({"strategy": "zero1"}, {"zero_optimization": {"overlap_comm": True}}, "reduces once", "--strategy zero2"),
        (
            {"strategy": "zero3", "memory.activation_checkpointing": "selective"},
            {"zero_optimization": {"memory_efficient_linear": True}},
            "memory_efficient_linear=true contradicts memory.activation_checkpointing=selective",
            "memory.activation_checkpointing=full",
        ),
    ],
)
def test_contradictions_show_both_values(
    settings: dict[str, Any], engine: dict[str, Any], message: str, hint: str
) -> None:
    config = load_config(script={"strategy": "zero2", **settings, "engine.deepspeed": engine}).config
    with pytest.raises(ConfigError) as caught:
        strategy_class(config.strategy).check(config, processes=4)
    assert message in caught.value.message
    assert caught.value.hint is not None
    assert hint in caught.value.hint


def test_agreeing_values_are_fine() -> None:
    engine = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1, "fp16": {"enabled": False}}
    found = made(optim__clip_norm=1.0, engine__deepspeed={**engine, "optimizer": None})
    assert found["gradient_clipping"] == 1
