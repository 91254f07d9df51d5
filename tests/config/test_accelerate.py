"""`strategy: accelerate`: files as `accelerate config` writes them, arguments of Accelerator, variables of its launcher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from distkit.config import load_config
from distkit.config.accelerate_meaning import SCHEDULER_NOTE, translate
from distkit.errors import ConfigError

BASE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "MULTI_GPU",
    "downcast_bf16": "no",
    "gpu_ids": "all",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "use_cpu": False,
}
FSDP = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,Other",
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_offload_params": False,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_activation_checkpointing": True,
}
ZERO3 = {
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "offload_optimizer_device": "cpu",
    "offload_param_device": "cpu",
    "zero3_init_flag": True,
    "zero3_save_16bit_model": True,
    "zero_stage": 3,
}


@pytest.fixture(autouse=True)
def no_default_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


def written(folder: Path, **changes: Any) -> str:
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump({**BASE, **changes}))
    return str(path)


def read(folder: Path, arguments: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return translate({"config_file": written(folder, **changes), **(arguments or {})}, {}).settings


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {"strategy": "ddp", "precision": "bf16"}),
        ({"distributed_type": "NO", "mixed_precision": "no"}, {}),
        (
            {"distributed_type": "MULTI_CPU", "use_cpu": True, "mixed_precision": "no"},
            {"strategy": "ddp", "device": "cpu"},
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": FSDP},
            {
                "strategy": "fsdp",
                "precision": "bf16",
                "engine.fsdp.wrap": ["LlamaDecoderLayer", "Other"],
                "memory.activation_checkpointing": "full",
            },
        ),
        (
            {
                "distributed_type": "FSDP",
                "mixed_precision": "no",
                "fsdp_config": {
                    "fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2",
                    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
                    "fsdp_min_num_params": 2000,
                    "fsdp_offload_params": "true",
                    "fsdp_forward_prefetch": True,
                },
            },
            {
                "strategy": "hsdp",
                "engine.fsdp.reshard_after_forward": False,
                "engine.fsdp.min_params": 2000,
                "engine.fsdp.prefetch": 1,
                "memory.offload": "params",
            },
        ),
        (
            {"distributed_type": "FSDP", "mixed_precision": "no", "fsdp_config": {"fsdp_sharding_strategy": 3}},
            {"strategy": "ddp"},
        ),
        (
            {
                "distributed_type": "FSDP",
                "mixed_precision": "no",
                "fsdp_config": {"fsdp_version": 2},
                "parallelism_config": {
                    "parallelism_config_dp_replicate_size": 2,
                    "parallelism_config_dp_shard_size": 4,
                },
            },
            {"strategy": "hsdp", "parallel.replicate": 2},
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": ZERO3},
            {
                "strategy": "zero3",
                "precision": "bf16",
                "batch.accumulate": 4,
                "optim.clip_norm": 1.0,
                "memory.offload": "params",
            },
        ),
        (
            {
                "distributed_type": "DEEPSPEED",
                "mixed_precision": "no",
                "deepspeed_config": {
                    "zero_stage": 3,
                    "offload_optimizer_device": "nvme",
                    "offload_optimizer_nvme_path": "/disk",
                    "offload_param_device": "none",
                },
            },
            {
                "strategy": "zero3",
                "memory.offload": "optimizer",
                "engine.deepspeed.zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}},
            },
        ),
        ({"distributed_type": "DEEPSPEED", "mixed_precision": "no", "deepspeed_config": {"zero_stage": 0}}, {"strategy": "ddp"}),
        (
            {"mixed_precision": "no", "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune"}},
            {
                "strategy": "ddp",
                "compile": True,
                "engine.compile.backend": "inductor",
                "engine.compile.mode": "max-autotune",
            },
        ),
    ],
)  # fmt: skip
def test_files(tmp_path: Path, changes: dict[str, Any], settings: dict[str, Any]) -> None:
    assert read(tmp_path, **changes) == settings


def test_deepspeeds_own_file(tmp_path: Path) -> None:
    """ "auto" is left to the other places; what is no portable key is passed on."""
    own = {
        "bf16": {"enabled": True},
        "optimizer_unknown_to_us": {"params": {"lr": "auto"}, "kind": 1},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "allgather_bucket_size": 2e8,
            "reduce_bucket_size": "auto",
        },
        "gradient_accumulation_steps": 2,
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 3,
    }
    (tmp_path / "ds.json").write_text(json.dumps(own))
    deepspeed = {"deepspeed_config_file": str(tmp_path / "ds.json"), "gradient_clipping": 0.5, "zero_stage": 3}
    assert read(tmp_path, distributed_type="DEEPSPEED", mixed_precision="no", deepspeed_config=deepspeed) == {
        "strategy": "zero2",
        "precision": "bf16",
        "batch.accumulate": 2,
        "batch.size": 3,
        "optim.clip_norm": 0.5,
        "memory.offload": "optimizer",
        "engine.deepspeed.optimizer_unknown_to_us": {"params": {}, "kind": 1},
        "engine.deepspeed.zero_optimization": {
            "allgather_bucket_size": 2e8,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
    }


def test_arguments_win_over_the_file(tmp_path: Path) -> None:
    arguments = {
        "mixed_precision": "no",
        "cpu": True,
        "fsdp_plugin": {"fsdp_version": 2, "cpu_offload": True, "transformer_cls_names_to_wrap": ["Block"],
                        "auto_wrap_policy": "transformer_based_wrap"},
        "dataloader_config": {"split_batches": True},
        "log_with": "tensorboard",
    }  # fmt: skip
    assert read(tmp_path, arguments) == {
        "strategy": "fsdp",
        "device": "cpu",
        "memory.offload": "params",
        "engine.fsdp.wrap": ["Block"],
        "batch.per": "global",
        "log.to": ["console", "jsonl", "tensorboard"],
    }
    plugin = {"zero_stage": 1, "hf_ds_config": {"zero_optimization": {"stage": 3}}, "gradient_clipping": 2}
    assert translate({"deepspeed_plugin": plugin, "gradient_accumulation_steps": 8}, {}).settings == {
        "strategy": "zero3",
        "optim.clip_norm": 2.0,
        "batch.accumulate": 8,
    }


def test_variables_of_accelerate_launch_and_the_default_file(tmp_path: Path) -> None:
    environ = {"ACCELERATE_MIXED_PRECISION": "fp16", "WORLD_SIZE": "2", "HF_HOME": str(tmp_path)}
    assert translate({}, environ).settings == {"strategy": "ddp", "precision": "fp16"}
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block", "FSDP_OFFLOAD_PARAMS": "false"}  # fmt: skip
    assert translate({}, {**environ, **fsdp}).settings == {
        "strategy": "fsdp",
        "precision": "fp16",
        "engine.fsdp.wrap": ["Block"],
    }
    zero = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2", "ACCELERATE_GRADIENT_CLIPPING": "none"}  # fmt: skip
    assert translate({}, {**environ, **zero}).settings == {
        "strategy": "zero1",
        "precision": "fp16",
        "batch.accumulate": 2,
    }
    (tmp_path / "accelerate").mkdir()
    Path(written(tmp_path)).rename(tmp_path / "accelerate" / "default_config.yaml")
    found = translate({}, {"HF_HOME": str(tmp_path)})
    assert found.settings == {"strategy": "ddp", "precision": "bf16"} and found.notes == [SCHEDULER_NOTE]
    assert found.launch is not None and found.launch.nproc == 8


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"distributed_type": "XLA"}, "distributed_type: XLA, which no strategy does", "MULTI_GPU"),
        ({"distributed_type": "MEGATRON_LM"}, "distributed_type: MEGATRON_LM", "megatron"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "AMAZON_SAGEMAKER", "LOCAL_MACHINE"),
        ({"mixed_precision": "fp8"}, "mixed_precision: fp8; valid: no, fp16, bf16", "bf16"),
        ({"num_processes": 3, "num_machines": 2}, "num_processes: 3 on num_machines: 2", "num_processes: 2"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_ignored_modules": "a"}}, "fsdp_ignored_modules: a", "null"),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu"}},
            "parameters are offloaded and the optimizer isn't",
            "offload_optimizer_device: cpu",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "no.json"}},
            "no.json",
            "json",
        ),
        ({"parallelism_config": {"parallelism_config_cp_size": 2}}, "cp_size: 2", "cp_size: 1"),
        (
            {"num_processes": "many"},
            "can't be read: invalid literal for int() with base 10: 'many'",
            "accelerate config",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": {"zero_optimization": 3}}},
            "can't be read",
            "accelerate config",
        ),
        ({"split_batches": True, "gradient_accumulation_steps": 2}, "split_batches with", "batch.per=global"),
    ],
)
def test_what_cannot_be_followed(tmp_path: Path, changes: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, **changes)
    assert message in str(error.value) and "accelerate.yaml" in str(error.value)
    assert hint in str(error.value.hint)


@pytest.mark.parametrize(
    ("section", "message", "hint"),
    [
        ({}, "there is no configuration of it", "config_file="),
        ({"config_file": "no.yaml"}, "no such file", "accelerate config"),
        (
            {"gradient_acumulation_steps": 2},
            "engine.accelerate.gradient_acumulation_steps",
            "gradient_accumulation_steps?",
        ),
        ({"fsdp_plugin": True}, "is a section", "fsdp_plugin={}"),
    ],
)
def test_bad_arguments(section: dict[str, Any], message: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="accelerate") as error:
        translate(section, {"HF_HOME": str(tmp_path)})
    assert message in str(error.value) and hint in str(error.value.hint)


def test_a_file_of_ours_is_no_file_of_accelerate(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("strategy: ddp\n")
    with pytest.raises(ConfigError, match="neither distributed_type"):
        translate({"config_file": str(tmp_path / "config.yaml")}, {})


def test_settings_of_distkit_win_and_say_where_others_come_from(tmp_path: Path) -> None:
    file = written(tmp_path, distributed_type="DEEPSPEED", deepspeed_config=ZERO3)
    loaded = load_config(
        script={"strategy": "accelerate", "optim.clip_norm": 0.5},
        overrides=[f"engine.accelerate.config_file={file}", "memory.offload=none"],
    )
    config = loaded.config
    assert (config.strategy, config.optim.clip_norm, config.memory.offload) == ("zero3", 0.5, "none")
    assert loaded.origins["strategy"] == loaded.origins["precision"] == "accelerate.yaml (accelerate)"
    assert loaded.origins["optim.clip_norm"] == "script" and "accelerate.yaml" in loaded.notes[0]
    again = load_config(script={"strategy": "accelerate"}, overrides=["strategy=ddp"])
    assert again.config.strategy == "ddp" and again.accelerate is None


def test_one_process_or_several_where_the_file_has_no_strategy(tmp_path: Path) -> None:
    file = written(tmp_path, distributed_type="NO")
    loaded = load_config(script={"strategy": "accelerate", "engine.accelerate": {"config_file": file}})
    assert loaded.origins["strategy"] == "default"  # single, or ddp under several processes
