"""Settings as YAML with comments, in a form that :func:`distkit.config.load_config` reads back to the same values."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from distkit.config.schema import Key, keys

__all__ = ["schema_yaml", "settings_yaml", "yaml_value"]

_WIDTH = 100


def settings_yaml(
    flat: Mapping[str, Any],
    *,
    above: Mapping[str, Iterable[str]] | None = None,
    beside: Mapping[str, str] | None = None,
) -> str:
    """Dotted keys as nested YAML.

    Args:
        flat: Values by dotted key; the keys of a section stand together.
        above: Comment lines before a key.
        beside: A comment behind a value.
    """
    lines: list[str] = []
    open_sections: list[str] = []
    for name, value in flat.items():
        *sections, last = name.split(".")
        for depth, section in enumerate(sections):
            if open_sections[: depth + 1] != sections[: depth + 1]:
                lines += [""] * (depth == 0) + [f"{'  ' * depth}{section}:"]
                open_sections = sections[: depth + 1]
        open_sections = sections
        indent = "  " * len(sections)
        lines += [f"{indent}# {comment}" for comment in (above or {}).get(name, ())]
        comment = (beside or {}).get(name)
        lines.append(f"{indent}{last}: {yaml_value(value)}" + (f"  # {comment}" if comment else ""))
    return "\n".join(lines) + "\n"


def schema_yaml() -> str:
    """Every key with its default; what it does, its type and its choices stand above it."""
    declared = list(keys())
    return settings_yaml({key.name: key.default for key in declared}, above={key.name: _about(key) for key in declared})


def yaml_value(value: Any) -> str:
    """A value in one line of YAML."""
    import yaml

    text: str = yaml.dump(
        value, Dumper=_dumper(), default_flow_style=True, width=1_000_000, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("...\n").rstrip("\n")


def _about(key: Key) -> list[str]:
    allowed = " | ".join(key.choices) if key.choices else key.type
    allowed += f", from {key.minimum:g} on" if key.minimum is not None else ""
    allowed += f", above {key.above:g}" if key.above is not None else ""
    depth = 2 * key.name.count(".")
    return textwrap.wrap(f"{key.help} ({allowed})", _WIDTH - depth, break_on_hyphens=False)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=1)
def _dumper() -> Any:
    """PyYAML writes the text 1e3 without quotes, and OmegaConf's loader then reads a number."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        style = '"' if _is_number(value) or "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return Dumper
