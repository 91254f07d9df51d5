"""From distkit's settings to DeepSpeed's JSON. Needs neither torch nor DeepSpeed, so that it can be printed anywhere.

Portable keys decide; ``engine.deepspeed`` is merged over them and may say anything that they don't. Where both speak of the
same thing they must agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from distkit.errors import ConfigError

if TYPE_CHECKING:
    from distkit.config import Config

__all__ = ["DEEPSPEED_OWN", "deepspeed_config", "reduce_bucket_size"]

LARGEST_BUCKET = 500_000_000
"""DeepSpeed's own default of ``reduce_bucket_size``, in elements."""

SMALLEST_BUCKET = 1 << 20
"""Below this, collectives are bound by latency."""

BUCKETS = 10
"""So many buckets at least, so that reducing one overlaps with the backward of the next."""

DEEPSPEED_OWN = "engine.deepspeed"

OWNED_ELSEWHERE = {
    "optimizer": "the optimizer is the one that the script makes and gives to trainer.prepare()",
    "scheduler": "the scheduler is the one that the script makes and gives to trainer.prepare()",
    "amp": "precision says how the model computes",
    "torch_autocast": "precision says how the model computes",
    "pipeline": "the zero strategies have no pipeline stages",
    "tensor_parallel": "the zero strategies split no layers",
    "sequence_parallel_size": "every rank sees samples of its own",
    "data_parallel_size": "every process is a data-parallel rank",
    "elasticity": "the launcher decides how many processes there are",
    "gradient_allreduce_op": "the accumulation window owns the divisor",
    "zero_optimization.zenflow": "it takes the optimizer step out of the Trainer's hands",
    "compile.deepcompile": "DeepSpeed 0.19 can't run it together with managed_gradient_accumulation=false",
}
"""Sections of DeepSpeed's JSON for which there is another place, and which."""


def reduce_bucket_size(trained: int) -> int:
    """Elements that DeepSpeed reduces at a time, for a model of so many trained parameters.

    Stage 3 allocates one bucket for good when it starts (stage3.py, ``_setup_for_real_optimizer``), and stages 1 and 2
    one or two while backward runs; DeepSpeed's default of 5e8 is 2 GB a rank in fp32, however small the model.
    """
    return min(LARGEST_BUCKET, max(SMALLEST_BUCKET, trained // BUCKETS))


def deepspeed_config(
    config: Config,
    *,
    stage: int,
    data_size: int | None = None,
    micro: int | None = None,
    trained: int | None = None,
) -> dict[str, Any]:
    """DeepSpeed's JSON for these settings.

    Args:
        config: The merged settings.
        stage: ZeRO stage, 1 to 3.
        data_size: Data-parallel ranks; None when only the settings are known.
        micro: Samples in one micro batch on one device where the settings don't say it.
        trained: Number of trained parameters, by which the buckets are sized; None leaves DeepSpeed's sizes.

    Returns:
        JSON values only.

    Raises:
        ConfigError: ``engine.deepspeed`` contradicts a portable key; shows both.
    """
    generated: dict[str, Any] = {
        **_batch(config, data_size, micro),
        "managed_gradient_accumulation": False,  # the accumulation window scales losses and says when to step
        "gradient_clipping": config.optim.clip_norm or 0.0,  # said in any case: DeepSpeed's own default is 1.0
        "zero_optimization": _zero(config, stage, trained),
        "zero_allow_untested_optimizer": True,  # the list of tested ones goes by class, and any elementwise one works
        "timers": {"throughput": {"enabled": False}},  # it waits for the device twice a micro batch (utils/timer.py)
        **_precision(config),
    }
    if config.memory.offload != "none":
        generated["zero_force_ds_cpu_optimizer"] = False  # the script's own optimizer may step on the host
    given = _plain(config.engine.deepspeed)
    _refuse_contradictions(config, stage, generated, given)
    return _merged(generated, given)


def _batch(config: Config, data_size: int | None, micro: int | None) -> dict[str, Any]:
    """The three batch numbers, as far as they are known; DeepSpeed finds a missing one."""
    from distkit.data.batch import resolve_batch

    batch = config.batch
    if data_size is None:
        numbers = {
            "train_batch_size": batch.size if batch.per == "global" else None,
            "train_micro_batch_size_per_gpu": batch.micro if batch.per == "global" else batch.size or batch.micro,
            "gradient_accumulation_steps": batch.accumulate or 1,
        }
        if batch.per == "global" and batch.micro is not None and batch.accumulate is None:
            numbers["gradient_accumulation_steps"] = None
        return {name: number for name, number in numbers.items() if number is not None}
    plan = resolve_batch(batch, None, data_size)
    size = plan.micro or micro or 1
    return {
        "train_batch_size": size * plan.accumulate * data_size,
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": plan.accumulate,
    }


def _zero(config: Config, stage: int, trained: int | None) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        # Stage 1 reduces when the window ends, after its backward passes: nothing to overlap with.
        "overlap_comm": stage > 1,
        "reduce_scatter": True,
    }
    if stage == 3 and config.memory.activation_checkpointing == "selective":
        # DeepSpeed's own linear adds the bias in place to a product that selective checkpointing has kept, so that
        # the recomputed one has it twice (zero/linear.py, 0.19.8). Without it, blocks that aren't recomputed would keep
        # gathered weights for backward; here they are.
        zero["memory_efficient_linear"] = False
    if trained is not None:
        zero["reduce_bucket_size"] = reduce_bucket_size(trained)
    if config.memory.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if config.memory.offload == "params":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return zero


def _precision(config: Config) -> dict[str, Any]:
    """Data types: gradients are accumulated and reduced in fp32 unless a key says otherwise."""
    wire = {"none": "fp32"}.get(config.compress.method, config.compress.method)
    settings: dict[str, Any] = {"communication_data_type": wire}
    if config.precision == "bf16-pure":
        pure = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        return {"bf16": {**pure, "check_grad_overflow": False}, "communication_data_type": _pure_wire(config)}
    settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if config.precision == "fp16":
        settings["fp16"] = {"enabled": True}
    elif config.precision == "bf16":
        # bf16 has fp32's range: no step is skipped, so none needs a host that waits for the answer.
        settings["bf16"] = {"enabled": True, "check_grad_overflow": False}
    return settings


def _pure_wire(config: Config) -> str:
    return "bf16" if config.compress.method == "none" else config.compress.method


# -- engine.deepspeed against the portable keys ------------------------------------------------------------------------


def _plain(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section as JSON values: a torch.dtype in it would fail inside of DeepSpeed, on some ranks first."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(section)))
    except TypeError as error:
        raise ConfigError(
            f"{DEEPSPEED_OWN} holds a value that is no JSON: {error}",
            hint="data types are texts there: fp32, bf16, fp16",
        ) from error
    return plain


def _refuse_contradictions(config: Config, stage: int, generated: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    _refuse_owned_elsewhere(given)
    _refuse_offload(config, stage, given)
    portable = {
        "zero_optimization.stage": ("strategy", config.strategy),
        "gradient_clipping": ("optim.clip_norm", config.optim.clip_norm),
        "fp16.enabled": ("precision", config.precision),
        "bf16.enabled": ("precision", config.precision),
        "bfloat16.enabled": ("precision", config.precision),
        "bf16.bf16_master_weights_and_grads": ("precision", config.precision),
        "fp16.fp16_master_weights_and_grads": ("precision", config.precision),
        "communication_data_type": ("compress.method", config.compress.method),
        "train_batch_size": ("batch.size", config.batch.size),
        "train_micro_batch_size_per_gpu": ("batch.micro", config.batch.micro),
        "gradient_accumulation_steps": ("batch.accumulate", config.batch.accumulate),
    }
    linear = "zero_optimization.memory_efficient_linear"
    if linear in dict(_leaves(generated)):
        portable[linear] = ("memory.activation_checkpointing", config.memory.activation_checkpointing)
    expected = {**dict(_leaves(generated)), "bfloat16.enabled": config.precision.startswith("bf16")}
    for path, value in _leaves(given):
        if path in portable and not _same(value, expected.get(path, False)):
            key, setting = portable[path]
            raise ConfigError(
                f"{DEEPSPEED_OWN}.{path}={_text(value)} contradicts {key}={_text(setting)}"
                + (f", which makes it {_text(expected[path])}" if path in expected else ""),
                hint=_portable_hint(path, value, key),
            )
    _refuse_unmanaged_limits(stage, given)


def _portable_hint(path: str, value: Any, key: str) -> str:
    if path == "zero_optimization.stage" and value in (1, 2, 3):
        return f"--strategy zero{value}"
    if path == "zero_optimization.stage":
        return "--strategy ddp"
    if key == "precision":
        dtype = "fp16" if path.startswith("fp16") else "bf16"
        return f"--set precision={dtype if value else 'fp32'}"
    if path == "train_batch_size":
        return f"--set batch.per=global --set batch.size={value}"
    if path == "gradient_clipping":
        return f"--set optim.clip_norm={value or 'null'}"
    if key == "memory.activation_checkpointing":
        return f"--set {key}=full"
    if path == "communication_data_type":
        return f"--set compress.method={'none' if value == 'fp32' else value}"
    return f"--set {key}={_text(value)}"


def _refuse_owned_elsewhere(given: Mapping[str, Any]) -> None:
    for path, why in OWNED_ELSEWHERE.items():
        section, _, name = path.partition(".")
        found = given.get(section)
        if name and isinstance(found, Mapping):
            found = found.get(name)
        elif name:
            found = None
        off = found is None or found is False or (isinstance(found, Mapping) and found.get("enabled") is False)
        if off or (path == "gradient_allreduce_op" and found == "mean"):
            continue
        raise ConfigError(
            f"{DEEPSPEED_OWN}.{path} was set to {_text(found)}, but {why}", hint=f"leave {path} out of {DEEPSPEED_OWN}"
        )


def _refuse_offload(config: Config, stage: int, given: Mapping[str, Any]) -> None:
    """Offload is asked for by ``memory.offload``; the engine's section may add to it."""
    sections = {name: _section(given, name) for name in ("offload_optimizer", "offload_param")}
    wanted = config.memory.offload
    for name, value, needed in (
        ("offload_optimizer", "optimizer", ("optimizer", "params")),
        ("offload_param", "params", ("params",)),
    ):
        device = sections[name].get("device")
        on = device not in (None, "none")
        if device is not None and on != (wanted in needed):
            raise ConfigError(
                f"{DEEPSPEED_OWN}.zero_optimization.{name}.device={device} contradicts memory.offload={wanted}",
                hint=f"--set memory.offload={value if on else 'none'}",
            )
        if device == "nvme":
            _check_nvme(name, stage, sections[name])
    ratio = sections["offload_optimizer"].get("ratio", 1)
    if ratio != 1:
        raise ConfigError(
            f"{DEEPSPEED_OWN}.zero_optimization.offload_optimizer.ratio={ratio} was set, but it swaps the optimizer of a "
            "part of the parameters for another class",
            hint="leave ratio out, or --set memory.offload=none",
        )
    for old, value in (("cpu_offload", "optimizer"), ("cpu_offload_param", "params"), ("cpu_offload_params", "params")):
        if _section(given, "").get(old):
            raise ConfigError(
                f"{DEEPSPEED_OWN}.zero_optimization.{old} was set, which DeepSpeed has given up",
                hint=f"--set memory.offload={value}",
            )


def _check_nvme(name: str, stage: int, section: Mapping[str, Any]) -> None:
    path = f"{DEEPSPEED_OWN}.zero_optimization.{name}"
    if name == "offload_param":
        raise ConfigError(
            f"{path}.device=nvme was set, but only optimizer states and masters (12 of 16 bytes a parameter) go to NVMe",
            hint=f"--set {path}.device=cpu   and offload_optimizer.device=nvme",
        )
    if stage < 3:
        raise ConfigError(
            f"{path}.device=nvme was set, but ZeRO stage {stage} keeps them in host memory", hint="--strategy zero3"
        )
    if not section.get("nvme_path"):
        raise ConfigError(
            f"{path}.device=nvme was set, but not where", hint=f"--set {path}.nvme_path=/folder/on/the/disk"
        )


def _section(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of ``zero_optimization``, or with an empty name all of it."""
    zero = given.get("zero_optimization")
    found = zero.get(name) if name and isinstance(zero, Mapping) else zero
    return found if isinstance(found, Mapping) else {}


def _refuse_unmanaged_limits(stage: int, given: Mapping[str, Any]) -> None:
    if given.get("managed_gradient_accumulation"):
        raise ConfigError(
            f"{DEEPSPEED_OWN}.managed_gradient_accumulation=true was set, but the Trainer's accumulation window scales the "
            "losses and says when to step",
            hint=f"leave managed_gradient_accumulation out of {DEEPSPEED_OWN}; batch.accumulate is the key",
        )
    if stage == 1 and _section(given, "").get("overlap_comm"):
        raise ConfigError(
            f"{DEEPSPEED_OWN}.zero_optimization.overlap_comm=true was set with strategy zero1, which reduces once, when the "
            "window ends",
            hint="--strategy zero2   overlaps its reduction with backward",
        )


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool) or isinstance(a, str) or isinstance(b, str):
        return bool(a == b)
    return float(a or 0) == float(b or 0)


def _text(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid onto ``base``, section by section."""
    result = {name: deepcopy(value) for name, value in base.items()}
    for name, value in over.items():
        below = result.get(name)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            result[name] = _merged(below, value)
        else:
            result[name] = deepcopy(value)
    return result
