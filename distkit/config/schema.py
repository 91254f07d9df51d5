"""The settings: one dataclass a section, every key with its choices and a sentence of help.

This file is the only place where a key is declared. ``distkit config schema`` prints it, the reference page of the
documentation is generated from it, and the checks in :mod:`distkit.config.checks` read the choices from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "CompressConfig",
    "Config",
    "DataConfig",
    "EngineConfig",
    "Key",
    "LogConfig",
    "MemoryConfig",
    "OptimConfig",
    "ParallelConfig",
    "TimeoutConfig",
    "keys",
]


def _key(
    default: Any, help: str, *, choices: tuple[str, ...] = (), minimum: float | None = None, above: float | None = None
) -> Any:
    """A setting: its default, what it does, and which values are allowed (``minimum`` included, ``above`` excluded)."""
    metadata = {"help": help, "choices": choices, "minimum": minimum, "above": above}
    if isinstance(default, list | dict):
        kind = type(default)
        return field(default_factory=lambda: kind(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class BatchConfig:
    """How large a batch is, and of which batch the number speaks."""

    size: int | None = _key(
        None, "Samples in a batch; null takes the DataLoader's own batch size. `per` says whose.", minimum=1
    )
    per: str = _key(
        "device",
        "device: `size` is one micro batch on one device. global: `size` is all the samples of one optimizer step.",
        choices=("device", "global"),
    )
    micro: int | None = _key(
        None, "Samples in one micro batch on one device; with `per: global` it gives `accumulate`.", minimum=1
    )
    accumulate: int | None = _key(
        None, "Micro batches in one optimizer step; null is 1, or what `size` and `micro` give.", minimum=1
    )


@dataclass
class OptimConfig:
    """What happens around the optimizer."""

    clip_norm: float | None = _key(None, "Clip the global gradient norm to this; null doesn't clip.", above=0.0)
    lr_scaling: str = _key(
        "auto",
        "How the learning rate follows the global batch; auto is the strategy's own custom (Horovod linear, others none).",
        choices=("auto", "none", "linear", "sqrt"),
    )
    reference_batch: int | None = _key(
        None,
        "Global batch for which the script's learning rate was chosen; null is the batch of one device.",
        minimum=1,
    )
    warmup_steps: int = _key(
        0, "Optimizer steps over which the learning rate rises from near 0 to its plan.", minimum=0
    )
    schedule_by: str = _key(
        "step", "What one scheduler step is: an optimizer step or an epoch.", choices=("step", "epoch")
    )
    unused_parameters: str = _key(
        "error",
        "Parameters that got no gradient in the first step: error names them and stops; allow goes on (costs DDP a "
        "walk over the graph each step).",
        choices=("error", "allow"),
    )


@dataclass
class ParallelConfig:
    """Degrees of parallelism beyond data parallelism."""

    tensor: int = _key(
        1,
        "Ranks that share one layer (tensor parallelism); under megatron-zero1 to -zero3 those of a node, unless set.",
        minimum=1,
    )
    replicate: int = _key(1, "Replica groups of hsdp; sharding happens inside each.", minimum=1)
    tensor_layout: Any = _key(
        "auto",
        "auto finds what can be split; or how modules are split whose names match: {'*.experts.*': replicate}; column, row, "
        "vocabulary or replicate.",
    )
    sequence: bool = _key(
        False,
        "Outside of split layers each rank of a tensor group holds some of the tokens (sequence parallelism): less memory "
        "for activations, for the same traffic.",
    )
    allow_tensor_across_nodes: bool = _key(False, "Let tensor groups reach over several nodes.")


@dataclass
class MemoryConfig:
    """What is traded for memory."""

    activation_checkpointing: str = _key(
        "none",
        "full recomputes each repeated block in backward; selective keeps the results of matrix products and attention.",
        choices=("none", "full", "selective"),
    )
    offload: str = _key(
        "none", "What lives in host memory: the optimizer, or parameters too.", choices=("none", "optimizer", "params")
    )


@dataclass
class CompressConfig:
    """What gradients look like on the wire."""

    method: str = _key(
        "none",
        "fp16 and bf16 halve the gradient traffic and round each gradient once to 11 or 8 significant bits.",
        choices=("none", "fp16", "bf16"),
    )


@dataclass
class DataConfig:
    """How data is split."""

    uneven: str = _key(
        "pad",
        "Iterable datasets of unequal length per rank: pad lets ranks that ran out repeat a batch with weight 0 until "
        "all have ended; stop ends with the first.",
        choices=("pad", "stop"),
    )
    seed_samples: bool = _key(
        True,
        "Seed torch, numpy and random before each sample from (seed, epoch, position), so that random augmentation is "
        "the same for any number of ranks and workers.",
    )
    iterable: str = _key(
        "shard",
        "shard: distkit splits an iterable dataset over ranks and workers. own: it already yields this rank's part.",
        choices=("shard", "own"),
    )


@dataclass
class CheckpointConfig:
    """When checkpoints are written, and which are kept."""

    dir: str | None = _key(
        None,
        "Where checkpoints lie: a folder or a URL such as s3://bucket/run; null is checkpoints in the run's folder.",
    )
    every_steps: int | None = _key(None, "Save every so many optimizer steps.", minimum=1)
    every_seconds: float | None = _key(None, "Save when so many seconds have passed since the last.", above=0.0)
    at_end: bool = _key(True, "Save when the run ends or is told to stop.")
    keep: int | None = _key(3, "Newest checkpoints to keep; null keeps all.", minimum=1)
    keep_best: int | None = _key(None, "Keep so many of the best besides the newest.", minimum=1)
    best_metric: str = _key("loss", "The evaluated metric that says which is best.")
    best_mode: str = _key("min", "Whether less or more of it is better.", choices=("min", "max"))
    background: bool = _key(
        True,
        "Copy the state to host memory and write periodic checkpoints while training goes on; costs host memory for "
        "one copy of what a rank writes.",
    )
    requeue: bool = _key(
        False,
        "In a Slurm job that gets SIGUSR1 or SIGTERM: after the checkpoint, ask Slurm to run the job again (scontrol "
        "requeue).",
    )
    resume: str = _key(
        "auto", "auto goes on from the newest complete checkpoint; none starts afresh; or a folder or URL."
    )
    verify: str = _key("full", "On load: full compares every checksum, fast only file sizes.", choices=("full", "fast"))


@dataclass
class LogConfig:
    """What is logged, how often and where to."""

    every_steps: int = _key(
        10, "Optimizer steps between two log points; nothing waits for the device in between.", minimum=1
    )
    to: list[str] = _key(
        ["console", "jsonl"], "Any of console, jsonl, tensorboard, wandb, mlflow. jsonl is always written."
    )


@dataclass
class TimeoutConfig:
    """How long to wait before calling it a failure. Seconds."""

    start_s: float = _key(300.0, "For all processes to meet at the start.", above=0.0)
    step_s: float = _key(600.0, "For one collective operation during training.", above=0.0)
    save_s: float = _key(3600.0, "For the slowest rank to write its part of a checkpoint in the background.", above=0.0)
    grace_s: float = _key(30.0, "Between asking processes to end and killing them.", above=0.0)


@dataclass
class EngineConfig:
    """Settings that go to an engine as they are."""

    ddp: dict[str, Any] = _key({}, "Arguments of DistributedDataParallel; sync_batchnorm: true converts BatchNorm.")
    fsdp: dict[str, Any] = _key({}, "Settings of fully_shard.")
    deepspeed: dict[str, Any] = _key({}, "DeepSpeed's own JSON.")
    horovod: dict[str, Any] = _key({}, "Settings of Horovod.")
    megatron: dict[str, Any] = _key({}, "Fields of megatron-core's ModelParallelConfig, for split layers.")
    accelerate: dict[str, Any] = _key(
        {}, "With strategy accelerate: config_file, and arguments of Accelerator, which win over it."
    )
    compile: dict[str, Any] = _key({}, "Arguments of torch.compile.")


@dataclass
class Config:
    """All settings of a run. Precedence: defaults < the script's arguments < the file < the launch line."""

    strategy: str = _key(
        "single",
        "Which way of training; `distkit strategies` lists them, accelerate takes one from a configuration of Accelerate. Where several processes were started and none was named: ddp.",
    )
    name: str | None = _key(None, "Name of the run; null is the script's name.")
    run_dir: str | None = _key(None, "Folder of the run; null is runs/<name>-<time>.")
    seed: int = _key(1234, "Seed of model initialisation, data order and workers.", minimum=0)
    max_steps: int | None = _key(
        None, "End the run after so many optimizer steps, whatever the script says.", minimum=0
    )
    precision: str = _key(
        "fp32",
        "Compute dtype; bf16 and fp16 keep fp32 master weights and optimizer states, bf16-pure keeps nothing in fp32.",
        choices=("fp32", "bf16", "fp16", "bf16-pure"),
    )
    compile: bool = _key(False, "Compile the model with torch.compile; names in checkpoints don't change.")
    device: str = _key(
        "auto", "auto takes what is there; cpu keeps away from GPUs.", choices=("auto", "cpu", "cuda", "mps")
    )
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    compress: CompressConfig = field(default_factory=CompressConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True)
class Key:
    """One declared setting, as the documentation and the checks see it."""

    name: str
    type: str
    default: Any
    help: str
    choices: tuple[str, ...]
    minimum: float | None
    above: float | None


def keys(section: Any = None, prefix: str = "") -> Iterator[Key]:
    """All settings, depth first, with their dotted names.

    Args:
        section: A dataclass instance; None is a fresh :class:`Config`.
        prefix: The dotted name of the section, with its last dot.
    """
    section = Config() if section is None else section
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            yield from keys(value, f"{prefix}{item.name}.")
        else:
            meta = item.metadata
            yield Key(
                name=prefix + item.name,
                type=str(item.type).replace(" | None", " or null"),
                default=value,
                help=meta["help"],
                choices=meta["choices"],
                minimum=meta["minimum"],
                above=meta["above"],
            )
