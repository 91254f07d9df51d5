"""The selection rules, as data: rules.yaml, applied to the facts of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["Rule", "matching", "rules"]


@dataclass(frozen=True)
class Rule:
    """One of them.

    Args:
        id: Its name.
        when: Facts that must hold.
        prefer: Strategies, the first that fits first.
        says: The reason.
        source: Where it comes from.
    """

    id: str
    when: Mapping[str, Any]
    prefer: tuple[str, ...]
    says: str
    source: str

    def holds(self, facts: Mapping[str, Any]) -> bool:
        """Whether all its facts do.

        Args:
            facts: Numbers, texts and booleans by name; ``fits`` is the set of strategies that fit.
        """
        return all(_holds(wanted, facts.get(name)) for name, wanted in self.when.items())


def _holds(wanted: Any, fact: Any) -> bool:
    if isinstance(wanted, Mapping):
        return fact is not None and wanted.get("min", fact) <= fact <= wanted.get("max", fact)
    if isinstance(fact, frozenset | set):
        return wanted in fact
    return bool(wanted == fact)


@cache
def rules() -> tuple[Rule, ...]:
    """All, in their order."""
    import yaml

    found = yaml.safe_load(files("distkit.advise").joinpath("rules.yaml").read_text("utf-8"))
    return tuple(Rule(**{**rule, "prefer": tuple(rule["prefer"])}) for rule in found)


def matching(facts: Mapping[str, Any]) -> Sequence[Rule]:
    """Those that hold."""
    return [rule for rule in rules() if rule.holds(facts)]
