"""``strategy: accelerate``: a run that is described by Hugging Face Accelerate's own configuration.

Three places may describe it, as for ``Accelerator`` itself: arguments (``engine.accelerate``) win over the file that
``accelerate config`` wrote, and over the variables that ``accelerate launch`` sets. :func:`describe` brings them into one
form, that of the file; :mod:`distkit.config.accelerate_meaning` says which settings of distkit that is. Nothing of
accelerate is imported. Facts about it: accelerate 1.15.0, ``commands/config/config_args.py``, ``utils/launch.py``,
``utils/dataclasses.py``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distkit.config.nearest import nearest
from distkit.errors import ConfigError

__all__ = ["Description", "describe", "flag"]

LAUNCHED = "ACCELERATE_MIXED_PRECISION"
"""A variable that ``accelerate launch`` always sets."""

ARGUMENTS = {
    "mixed_precision": "mixed_precision",
    "cpu": "use_cpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "split_batches": "split_batches",
    "dynamo_backend": "dynamo_config.dynamo_backend",
    "log_with": "log_with",
}
"""Arguments of Accelerator, and what they are in the description."""

SECTIONS = {
    "dataloader_config": ("", "", ""),
    "fsdp_plugin": ("fsdp_config", "fsdp_", "FSDP"),
    "deepspeed_plugin": ("deepspeed_config", "", "DEEPSPEED"),
    "dynamo_plugin": ("dynamo_config", "dynamo_", ""),
    "parallelism_config": ("parallelism_config", "parallelism_config_", ""),
}
"""Plugins among the arguments: their section in the file, what their fields' names begin with there, and which
distributed_type they imply."""

RENAMED = {
    "fsdp_cpu_offload": "fsdp_offload_params",
    "fsdp_transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "hf_ds_config": "deepspeed_config_file",
}
"""Fields of plugins that the file calls otherwise."""

WITHOUT_EFFECT = {
    "device_placement": "the Trainer places models and batches",
    "rng_types": "every sample has a seed of its own",
    "project_dir": "the run's folder is run_dir",
    "project_config": "the run's folder is run_dir",
    "step_scheduler_with_optimizer": "optim.schedule_by says when a scheduler steps",
}
"""Arguments that something else decides here."""


@dataclass
class Description:
    """A run in the terms of Accelerate's configuration file.

    Args:
        origin: Where it comes from, for messages.
        values: As in the file; arguments are merged in.
        launches: Whether numbers of processes and machines are in it.
    """

    origin: str
    values: dict[str, Any]
    launches: bool = False
    ignored: list[str] = field(default_factory=list)
    """Sentences about what has no effect."""

    def section(self, name: str) -> dict[str, Any]:
        """A section of the file, such as ``fsdp_config``; empty where there is none."""
        found = self.values.get(name)
        return dict(found) if isinstance(found, Mapping) else {}

    def wrong(self, what: str, hint: str) -> ConfigError:
        """The error for something that can't be followed."""
        return ConfigError(f"strategy is accelerate, and {self.origin} says {what}", hint=hint)


def flag(value: Any) -> bool:
    """A truth value, which the file and the variables write in many ways."""
    return value if isinstance(value, bool) else str(value).strip().lower() in ("1", "true", "yes", "on", "y", "t")


def describe(section: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Description:
    """What ``engine.accelerate``, a file and the variables say, as one.

    Args:
        section: ``engine.accelerate``: ``config_file``, and arguments of Accelerator.
        environ: The variables of this process.

    Raises:
        ConfigError: An unknown argument, a file that isn't there or isn't Accelerate's, or nothing that describes a run.
    """
    environ = os.environ if environ is None else environ
    arguments = dict(section)
    path = arguments.pop("config_file", None)
    if path is not None:
        found = _read(Path(str(path)).expanduser())
    elif LAUNCHED in environ:
        found = Description("accelerate launch", _from_variables(environ))
    else:
        default = _default_file(environ)
        if default is not None:
            found = _read(default)
        elif arguments:
            found = Description("engine.accelerate", {})
        else:
            raise ConfigError(
                "strategy was set to 'accelerate', but there is no configuration of it: no engine.accelerate.config_file, no "
                "file where `accelerate config` writes one, and no `accelerate launch`",
                hint="--set engine.accelerate.config_file=accelerate.yaml",
            )
    _merge(found, arguments)
    return found


def _default_file(environ: Mapping[str, str]) -> Path | None:
    home = Path(
        environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    ).expanduser()
    for name in ("default_config.yaml", "default_config.json"):
        if (home / "accelerate" / name).is_file():
            return home / "accelerate" / name
    return None


def _read(path: Path) -> Description:
    from yaml import YAMLError, safe_load

    try:
        content = safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML too
    except FileNotFoundError as error:
        raise ConfigError(
            f"engine.accelerate.config_file was set to {str(path)!r}, but there is no such file in {str(Path.cwd())!r}",
            hint=f"accelerate config --config_file {path}",
        ) from error
    except (OSError, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"accelerate's config file {str(path)!r} can't be read as YAML: {error}") from error
    if not isinstance(content, dict) or not {"distributed_type", "compute_environment"} & set(content):
        raise ConfigError(
            f"{str(path)!r} was given as a config file of accelerate, but it has neither distributed_type nor "
            "compute_environment",
            hint="--set engine.accelerate.config_file=FILE   takes what `accelerate config` writes; -c takes distkit's own",
        )
    return Description(f"{path.name} (accelerate)", dict(content), launches=True)


def _from_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """What ``accelerate launch`` hands to its workers, in the file's words."""
    values: dict[str, Any] = {
        "mixed_precision": environ[LAUNCHED],
        "use_cpu": environ.get("ACCELERATE_USE_CPU", "false"),
        "distributed_type": "NO" if int(environ.get("WORLD_SIZE") or 1) == 1 else "MULTI_GPU",
        "fsdp_config": {
            f"fsdp_{name[5:].lower()}": value for name, value in environ.items() if name.startswith("FSDP_")
        },
        "dynamo_config": {
            name[len("ACCELERATE_") :].lower(): value
            for name, value in environ.items()
            if name.startswith("ACCELERATE_DYNAMO_")
        },
        "parallelism_config": {
            name.lower(): value for name, value in environ.items() if name.startswith("PARALLELISM_CONFIG_")
        },
    }
    fsdp = values["fsdp_config"]
    if "fsdp_transformer_cls_to_wrap" in fsdp:
        fsdp["fsdp_transformer_layer_cls_to_wrap"] = fsdp.pop("fsdp_transformer_cls_to_wrap")
    prefix = "ACCELERATE_DEEPSPEED_"
    deepspeed = {n[len(prefix) :].lower(): v for n, v in environ.items() if n.startswith(prefix)}
    if "config_file" in deepspeed:
        deepspeed["deepspeed_config_file"] = deepspeed.pop("config_file")
    for name in ("GRADIENT_ACCUMULATION_STEPS", "GRADIENT_CLIPPING"):
        if f"ACCELERATE_{name}" in environ:
            deepspeed[name.lower()] = environ[f"ACCELERATE_{name}"]
    values["deepspeed_config"] = deepspeed
    for name, kind in (("FSDP", "FSDP"), ("DEEPSPEED", "DEEPSPEED"), ("MEGATRON_LM", "MEGATRON_LM")):
        if flag(environ.get(f"ACCELERATE_USE_{name}", "false")):
            values["distributed_type"] = kind
    return values


def _merge(found: Description, arguments: Mapping[str, Any]) -> None:
    """Accelerator's arguments over the file."""
    for name, value in arguments.items():
        if name in WITHOUT_EFFECT:
            found.ignored.append(f"engine.accelerate.{name} has no effect: {WITHOUT_EFFECT[name]}")
        elif name in ARGUMENTS:
            owner, _, key = ARGUMENTS[name].rpartition(".")
            target = found.values.setdefault(owner, {}) if owner else found.values
            target[key] = value
        elif name in SECTIONS:
            _merge_section(found, name, value)
        else:
            known = ["config_file", *ARGUMENTS, *SECTIONS, *WITHOUT_EFFECT]
            close = nearest(name, known)
            raise ConfigError(
                f"engine.accelerate.{name} was set, which is neither config_file nor an argument of Accelerator that is "
                f"known here: {', '.join(known)}",
                hint=f"did you mean engine.accelerate.{close}?"
                if close
                else "--set engine.accelerate.config_file=FILE",
            )


def _merge_section(found: Description, name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"engine.accelerate.{name} was set to {value!r}, but it is a section with keys of its own",
            hint=f"--set engine.accelerate.{name}={{}}",
        )
    section, prefix, implied = SECTIONS[name]
    target = found.values if not section else found.values.setdefault(section, {})
    for key, inner in value.items():
        key = str(key) if str(key).startswith(prefix) else f"{prefix}{key}"
        target[RENAMED.get(key, key)] = inner
    if implied:
        found.values["distributed_type"] = implied
