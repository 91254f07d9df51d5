"""What a configuration of Accelerate means in the settings of distkit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distkit.config.accelerate import Description, describe, flag
from distkit.errors import ConfigError

__all__ = ["Launch", "Translation", "translate"]

SCHEDULER_NOTE = (
    "accelerate steps a prepared scheduler once for every process, distkit once for every optimizer step: a schedule that was "
    "counted for accelerate is to be made shorter by the number of processes"
)

HYBRID = {"HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "4", "5"}
UNSHARDED_AFTER_FORWARD = {"SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "2", "5"}
COPIES = {"NO_SHARD", "3"}
"""Values of fsdp_sharding_strategy; numbers are torch's ShardingStrategy."""


@dataclass(frozen=True)
class Launch:
    """How many processes, and where: what `accelerate launch` would have started.

    Args:
        nproc: Processes on each machine.
        nnodes: Machines.
        node_rank: This machine's place.
        address: Machine 0.
        port: Port there; None leaves it to distkit.
        gpus: As in CUDA_VISIBLE_DEVICES; None is all.
    """

    nproc: int | None = None
    nnodes: int = 1
    node_rank: int | None = None
    address: str | None = None
    port: int | None = None
    gpus: str | None = None


@dataclass
class Translation:
    """Settings of distkit that say what a configuration of Accelerate says.

    Args:
        origin: Where they come from.
        settings: Dotted keys and values.
        launch: The processes, where the configuration has them.
        notes: What a user should know.
    """

    origin: str
    settings: dict[str, Any] = field(default_factory=dict)
    launch: Launch | None = None
    notes: list[str] = field(default_factory=list)


def translate(section: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Translation:
    """Read the configuration of Accelerate and say it in distkit's settings.

    Args:
        section: ``engine.accelerate``.
        environ: Variables; None is this process's.

    Raises:
        ConfigError: It can't be read, or asks for what no strategy does.
    """
    found = describe(section, environ)
    try:
        return _translate(found)
    except ConfigError:
        raise
    except (ValueError, TypeError, AttributeError) as error:  # a text where a number belongs, or a value for a section
        raise found.wrong(
            f"something that can't be read: {error}", "accelerate config   writes a valid file"
        ) from error


def _translate(found: Description) -> Translation:
    made = Translation(found.origin)
    kind = str(found.values.get("distributed_type", "NO")).upper()
    if str(found.values.get("compute_environment", "LOCAL_MACHINE")).upper() == "AMAZON_SAGEMAKER":
        raise found.wrong("compute_environment: AMAZON_SAGEMAKER", "compute_environment: LOCAL_MACHINE")
    _KINDS.get(kind, _refuse)(found, made)
    _precision(found, made)
    _batches(found, made)
    _dynamo(found, made)
    _mesh(found, made)
    if flag(found.values.get("use_cpu", False)):
        made.settings["device"] = "cpu"
    if found.values.get("log_with") is not None:
        made.settings["log.to"] = ["console", "jsonl", *_names(found.values["log_with"])]
    if found.launches:
        made.launch = _launch(found)
    made.notes += found.ignored
    if made.settings.get("strategy", "single") != "single":
        made.notes.append(SCHEDULER_NOTE)
    return made


def _names(value: Any) -> list[str]:
    """A list, or names with commas between them."""
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def _refuse(found: Description, made: Translation) -> None:
    kind = found.values.get("distributed_type")
    hints = {"MEGATRON_LM": "--strategy megatron-zero1   with parallel.tensor"}
    known = ", ".join(sorted(_KINDS))
    raise found.wrong(
        f"distributed_type: {kind}, which no strategy does; valid: {known}",
        hints.get(str(kind).upper(), "distributed_type: MULTI_GPU"),
    )


def _one(found: Description, made: Translation) -> None:
    """Without a strategy the number of processes decides: single, or ddp."""


def _copies(found: Description, made: Translation) -> None:
    made.settings["strategy"] = "ddp"


# -- FSDP -----------------------------------------------------------------------------------------------------------------


def _fsdp(found: Description, made: Translation) -> None:
    given = {str(k).removeprefix("fsdp_"): v for k, v in found.section("fsdp_config").items()}
    how = given.get("sharding_strategy")
    if how is None or str(given.get("version", "1")) == "2":
        how = given.get("reshard_after_forward", how)
    how = str(how).upper()
    if how in COPIES:
        _copies(found, made)
        return
    made.settings["strategy"] = "hsdp" if how in HYBRID else "fsdp"
    if how in UNSHARDED_AFTER_FORWARD or how == "FALSE":
        made.settings["engine.fsdp.reshard_after_forward"] = False
    if flag(given.get("offload_params", False)):
        made.settings["memory.offload"] = "params"
    if flag(given.get("activation_checkpointing", False)):
        made.settings["memory.activation_checkpointing"] = "full"
    if flag(given.get("forward_prefetch", False)):
        made.settings["engine.fsdp.prefetch"] = 1
    for key in ("ignored_modules", "activation_checkpointing_offload"):
        value = given.get(key)
        if value not in (None, "", "None") and str(value).lower() != "false":
            raise found.wrong(f"fsdp_{key}: {value}, which strategy fsdp can't do", f"fsdp_{key}: null")
    policy = str(given.get("auto_wrap_policy") or "").upper()
    wrap, least = given.get("transformer_layer_cls_to_wrap"), given.get("min_num_params")
    if policy == "SIZE_BASED_WRAP" and least and int(least) > 0:
        made.settings["engine.fsdp.min_params"] = int(least)
    elif policy == "TRANSFORMER_BASED_WRAP" and wrap not in (None, "", "None"):
        made.settings["engine.fsdp.wrap"] = _names(wrap)
    elif policy == "NO_WRAP":
        made.notes.append(
            "fsdp_auto_wrap_policy is NO_WRAP; distkit makes a unit of each repeated block, with the same numbers"
        )


# -- DeepSpeed ------------------------------------------------------------------------------------------------------------


def _deepspeed(found: Description, made: Translation) -> None:
    given = found.section("deepspeed_config")
    own = _own_json(found, given.get("deepspeed_config_file"))
    zero = own.pop("zero_optimization", {})
    stage = zero.pop("stage", None) if own or zero else None
    stage = _auto(stage, given.get("zero_stage", 2))
    if str(stage) not in ("0", "1", "2", "3"):
        raise found.wrong(f"zero_stage: {stage}", "zero_stage: 2")
    made.settings["strategy"] = f"zero{stage}" if int(stage) else "ddp"
    _set_number(made, "batch.accumulate", own.pop("gradient_accumulation_steps", None), given, int)
    _set_number(made, "optim.clip_norm", own.pop("gradient_clipping", None), given, float)
    _deepspeed_batch(own, made)
    for precision in ("fp16", "bf16"):
        section = own.get(precision)
        if isinstance(section, dict) and flag(section.pop("enabled", False)):
            made.settings["precision"] = precision
        if not section:
            own.pop(precision, None)
    if int(stage):
        _deepspeed_offload(found, given, zero, made)
        _pass_on({**own, "zero_optimization": zero}, made)
    elif own:
        made.notes.append(
            f"zero_stage is 0, which is strategy ddp; DeepSpeed's own {', '.join(sorted(own))} has no effect"
        )
    if flag(given.get("zero3_init_flag", False)):
        made.notes.append(
            "zero3_init_flag: build the model under `with trainer.init_model():` to have it split at birth"
        )


def _own_json(found: Description, path: Any) -> dict[str, Any]:
    """DeepSpeed's own file, or the mapping that stands in its place."""
    if isinstance(path, Mapping):
        return json.loads(json.dumps(path))  # type: ignore[no-any-return]
    if path in (None, "", "none", "None"):
        return {}
    try:
        content = json.loads(Path(str(path)).expanduser().read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise found.wrong(
            f"deepspeed_config_file: {path}, but there is no such file in {str(Path.cwd())!r}",
            "deepspeed_config_file: /absolute/path.json",
        ) from error
    except ValueError as error:
        raise ConfigError(f"DeepSpeed's config file {str(path)!r} can't be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"DeepSpeed's config file {str(path)!r} holds a {type(content).__name__}, and not keys with values"
        )
    return content


def _auto(value: Any, other: Any) -> Any:
    """Accelerate writes "auto" where another place decides."""
    return other if value in (None, "auto") else value


def _set_number(
    made: Translation, key: str, first: Any, given: Mapping[str, Any], convert: Callable[[Any], float]
) -> None:
    name = {"batch.accumulate": "gradient_accumulation_steps", "optim.clip_norm": "gradient_clipping"}[key]
    value = _auto(first, given.get(name))
    if value not in (None, "auto", "none", "None") and float(value) != 0:
        made.settings[key] = convert(value)


def _deepspeed_batch(own: dict[str, Any], made: Translation) -> None:
    micro, whole = own.pop("train_micro_batch_size_per_gpu", "auto"), own.pop("train_batch_size", "auto")
    if micro != "auto":
        made.settings["batch.size"] = int(micro)  # the whole batch follows from it
    elif whole != "auto":
        made.settings |= {"batch.size": int(whole), "batch.per": "global"}


def _deepspeed_offload(found: Description, given: Mapping[str, Any], zero: dict[str, Any], made: Translation) -> None:
    sections = {}
    for what in ("optimizer", "param"):
        section = zero.pop(f"offload_{what}", None) or {}
        section["device"] = _auto(section.get("device"), given.get(f"offload_{what}_device", "none"))
        if section["device"] == "nvme":
            section["nvme_path"] = _auto(section.get("nvme_path"), given.get(f"offload_{what}_nvme_path"))
        else:
            section.pop("nvme_path", None)
        sections[what] = {key: value for key, value in section.items() if value != "auto"}
    on = {what for what, section in sections.items() if section["device"] not in ("none", None)}
    if on == {"param"}:
        raise found.wrong(
            "that parameters are offloaded and the optimizer isn't, which memory.offload can't say",
            "offload_optimizer_device: cpu",
        )
    if on:
        made.settings["memory.offload"] = "params" if "param" in on else "optimizer"
    for what in on:
        section = sections[what]
        if section["device"] == "nvme" or len(section) > 1:
            zero[f"offload_{what}"] = section


def _pass_on(own: Mapping[str, Any], made: Translation) -> None:
    for name, value in own.items():
        kept = _without_auto(value)
        if kept != {} and kept != "auto":
            made.settings[f"engine.deepspeed.{name}"] = kept


def _without_auto(value: Any) -> Any:
    if isinstance(value, Mapping):
        inner = {key: _without_auto(item) for key, item in value.items()}
        return {key: item for key, item in inner.items() if item != "auto"}
    return value


# -- what all kinds have ----------------------------------------------------------------------------------------------------


def _precision(found: Description, made: Translation) -> None:
    value = str(found.values.get("mixed_precision", "no")).lower()
    if value in ("no", "none", ""):
        return
    if value not in ("fp16", "bf16"):
        raise found.wrong(f"mixed_precision: {value}; valid: no, fp16, bf16", "mixed_precision: bf16")
    made.settings["precision"] = value


def _batches(found: Description, made: Translation) -> None:
    accumulate = _auto(found.values.get("gradient_accumulation_steps"), None)
    if accumulate is not None and "batch.accumulate" not in made.settings:
        made.settings["batch.accumulate"] = int(accumulate)
    if flag(found.values.get("split_batches", False)):
        if made.settings.get("batch.accumulate", 1) != 1:
            raise found.wrong(
                "split_batches with gradient accumulation, so that a step has several of the DataLoader's batches",
                "--set batch.per=global --set batch.size=SAMPLES_IN_A_STEP   and split_batches: false",
            )
        made.settings["batch.per"] = "global"
    if flag(found.values.get("dispatch_batches", False)):
        made.notes.append("dispatch_batches has no effect: each rank reads its own samples, in the same global order")


def _dynamo(found: Description, made: Translation) -> None:
    given = {str(k).removeprefix("dynamo_"): v for k, v in found.section("dynamo_config").items()}
    backend = str(given.get("backend", "no")).lower()
    if backend in ("no", "none", ""):
        return
    made.settings["compile"] = True
    made.settings["engine.compile.backend"] = backend
    if str(given.get("mode", "default")).lower() != "default":
        made.settings["engine.compile.mode"] = str(given["mode"])
    for key in ("fullgraph", "dynamic"):
        if flag(given.get(f"use_{key}", False)):
            made.settings[f"engine.compile.{key}"] = True


def _mesh(found: Description, made: Translation) -> None:
    prefix = "parallelism_config_"
    given = {str(k).removeprefix(prefix): v for k, v in found.section("parallelism_config").items()}

    def size(name: str) -> int:
        return int(given.get(f"{name}_size") or 1)

    for name in ("cp", "sp"):
        if size(name) > 1:
            raise found.wrong(f"{prefix}{name}_size: {size(name)}, which no strategy does", f"{prefix}{name}_size: 1")
    if size("tp") > 1:
        made.settings["parallel.tensor"] = size("tp")
    if size("dp_replicate") > 1 and made.settings.get("strategy") == "fsdp":
        made.settings |= {"strategy": "hsdp", "parallel.replicate": size("dp_replicate")}


def _launch(found: Description) -> Launch:
    def number(name: str) -> int | None:
        value = found.values.get(name)
        return None if value in (None, "", -1) else int(value)

    nodes, processes = number("num_machines") or 1, number("num_processes")
    if processes is not None and processes % nodes:
        raise found.wrong(
            f"num_processes: {processes} on num_machines: {nodes}, which doesn't divide", f"num_processes: {nodes}"
        )
    gpus = found.values.get("gpu_ids")
    return Launch(
        nproc=None if processes is None else processes // nodes,
        nnodes=nodes,
        node_rank=number("machine_rank") if nodes > 1 else None,
        address=found.values.get("main_process_ip") if nodes > 1 else None,
        port=number("main_process_port") or None,
        gpus=None if gpus in (None, "", "all") else str(gpus),
    )


_KINDS: dict[str, Callable[[Description, Translation], None]] = {
    "NO": _one,
    "MULTI_CPU": _copies,
    "MULTI_GPU": _copies,
    "FSDP": _fsdp,
    "DEEPSPEED": _deepspeed,
}
