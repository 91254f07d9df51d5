"""From the sources to one checked :class:`Config`, with the origin of every value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from distkit.config.accelerate_meaning import Translation, translate
from distkit.config.checks import check_config, check_values, unknown_key
from distkit.config.schema import Config, keys
from distkit.errors import ConfigError

__all__ = ["LoadedConfig", "flatten", "load_config", "parse_override", "read_file"]


@dataclass
class LoadedConfig:
    """The merged settings and where each value came from.

    Args:
        config: The settings.
        origins: For each dotted key: ``default``, ``script``, the file's path, or ``launch line``.
        accelerate: What a configuration of Accelerate was read as, where ``strategy`` was set to accelerate.
    """

    config: Config
    origins: dict[str, str] = field(default_factory=dict)
    accelerate: Translation | None = None

    @property
    def notes(self) -> list[str]:
        """What a user should know of where settings come from."""
        if self.accelerate is None:
            return []
        first = f"settings from {self.accelerate.origin}: `distkit config show` with the same options prints them"
        return [first, *self.accelerate.notes]

    def flat(self) -> dict[str, Any]:
        """All settings with dotted names (``engine.*`` sections whole)."""
        return {key.name: _get(self.config, key.name) for key in keys()}

    def set(self, name: str, value: Any, origin: str) -> None:
        """Give a setting another value, and say from where."""
        section, _, last = name.rpartition(".")
        setattr(_get(self.config, section) if section else self.config, last, value)
        self.origins[name] = origin


def load_config(
    *,
    script: Mapping[str, Any] | str | Path | None = None,
    arguments: Mapping[str, Any] | None = None,
    file: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> LoadedConfig:
    """Merge all sources: defaults < the script's arguments < the file < the launch line.

    Args:
        script: What the script gave to ``Trainer(...)``: a nested or dotted mapping, or the path of a YAML file.
        arguments: Keyword arguments that the script gave besides; they win over ``script`` when that is a mapping.
        file: The YAML file of the launch line (``-c``).
        overrides: ``KEY=VALUE`` texts of the launch line; values are read as YAML.

    Raises:
        ConfigError: An unknown key (naming the nearest), a value of a wrong type or out of range, a contradiction.

    With ``strategy: accelerate`` the settings that its configuration means come between the defaults and the script's
    arguments, so that anything can be set otherwise.
    """
    sources: list[tuple[str, dict[str, Any]]] = []
    if isinstance(script, str | Path):
        if arguments:
            sources.append(("script", flatten(arguments, "script")))
        sources.append((str(script), read_file(script)))
    else:
        sources.append(("script", flatten({**(script or {}), **(arguments or {})}, "script")))
    if file is not None:
        sources.append((str(file), read_file(file)))
    sources.append(("launch line", dict(parse_override(text) for text in overrides)))

    accelerate = None
    strategy = next((values["strategy"] for _, values in reversed(sources) if "strategy" in values), None)
    if strategy == "accelerate":
        accelerate = translate(_merge(sources)[0].engine.accelerate)
        sources = [(origin, {k: v for k, v in values.items() if k != "strategy"}) for origin, values in sources]
        sources.insert(0, (accelerate.origin, accelerate.settings))
    config, origins = _merge(sources)
    loaded = LoadedConfig(config, origins, accelerate)
    check_values(loaded.flat(), origins)
    check_config(config, origins)
    return loaded


def _merge(sources: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[Config, dict[str, str]]:
    """Later sources win; and which one each value is from."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    merged = deepcopy(_defaults())
    origins = {key.name: "default" for key in keys()}
    for origin, values in sources:
        for name, value in values.items():
            try:
                OmegaConf.update(merged, name, value, merge=True, force_add=name.startswith("engine."))
            except OmegaConfBaseException as error:
                raise _wrong_type(name, value, origin, error) from error
            owner = ".".join(name.split(".")[:2]) if name.startswith("engine.") else name
            origins["parallel.tensor_layout" if name.startswith("parallel.tensor_layout") else owner] = origin
    config = OmegaConf.to_object(merged)
    assert isinstance(config, Config)
    return config, origins


@cache
def _defaults() -> Any:
    """All settings as omegaconf has them; a copy takes a tenth of the time of building them from the classes."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(Config)


def read_file(path: str | Path) -> dict[str, Any]:
    """A YAML file as dotted keys.

    Raises:
        ConfigError: The file is missing, is no YAML, or has an unknown key.
    """
    from omegaconf import OmegaConf
    from yaml import YAMLError

    path = Path(path)
    try:
        content: Any = OmegaConf.load(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"config file {str(path)!r} was given, but there is no such file in {str(Path.cwd())!r}",
            hint="distkit config schema > config.yaml   writes a file with every key",
        ) from error
    except (OSError, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} can't be read as YAML: {error}") from error
    if content is None:
        return {}
    plain = OmegaConf.to_container(content, resolve=True)
    if not isinstance(plain, dict):
        raise ConfigError(
            f"config file {str(path)!r} holds a {type(plain).__name__}, and not keys with values", hint="strategy: ddp"
        )
    return flatten({str(k): v for k, v in plain.items()}, str(path))


def flatten(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Nested or dotted keys to dotted keys that the schema knows.

    Raises:
        ConfigError: A key that the schema doesn't have.
    """
    known = {key.name for key in keys()}
    sections = {name.rsplit(".", 1)[0] for name in known if "." in name}
    return dict(_flatten(values, "", known, sections, origin))


def _flatten(
    values: Mapping[str, Any], prefix: str, known: set[str], sections: set[str], origin: str
) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in known or name.startswith("parallel.tensor_layout.") or _inside_engine(name, known):
            yield name, value
        elif name in sections:
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{name} was set to {value!r} ({origin}), but it is a section with keys of its own",
                    hint=f"{min(k for k in known if k.startswith(name + '.'))}={value}",
                )
            yield from _flatten(value, name + ".", known, sections, origin)
        else:
            raise unknown_key(name, known | sections, origin)


def _inside_engine(name: str, known: set[str]) -> bool:
    return name.startswith("engine.") and ".".join(name.split(".")[:2]) in known


def parse_override(text: str) -> tuple[str, Any]:
    """One ``KEY=VALUE`` of the launch line.

    Raises:
        ConfigError: No ``=``, an unknown key, or a value that is no YAML.
    """
    from yaml import YAMLError, safe_load

    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise ConfigError(f"--set was given {text!r}, which is not KEY=VALUE", hint="--set optim.clip_norm=1.0")
    try:
        parsed = safe_load(value) if value.strip() else None
    except YAMLError as error:
        raise ConfigError(f"--set {name} was given {value!r}, which can't be read: {error}") from error
    if isinstance(parsed, str) and value.strip() == parsed:  # a quoted text stays one
        parsed = _number(parsed)
    ((key, parsed),) = (
        flatten({name: parsed}, "launch line").items() if not isinstance(parsed, dict) else (_one(name, parsed),)
    )
    return key, parsed


def _one(name: str, value: dict[str, Any]) -> tuple[str, Any]:
    known = {key.name for key in keys()}
    if name not in known and not _inside_engine(name, known):
        raise ConfigError(
            f"--set {name} was given several values {value!r}, but it sets one key", hint=f"--set {name}.KEY=VALUE"
        )
    return name, value


def _number(text: str) -> Any:
    """YAML 1.1 reads 1e-4 as text; people mean a number."""
    try:
        return float(text) if "e" in text.lower() and text.lower().strip("+-").replace(".", "")[:1].isdigit() else text
    except ValueError:
        return text


def _wrong_type(name: str, value: Any, origin: str, error: Exception) -> ConfigError:
    key = next((key for key in keys() if key.name == name), None)
    wanted = key.type if key else "another type"
    example = "null" if key is None or key.default is None else key.default
    if key is not None and key.default is None:
        example = "8" if "int" in key.type else "1.0" if "float" in key.type else "text"
    first = str(error).splitlines()[0]
    return ConfigError(
        f"{name} was set to {value!r} ({origin}), but it takes {wanted}: {first}", hint=f"--set {name}={example}"
    )


def _get(config: Config, dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = getattr(value, part)
    return value
