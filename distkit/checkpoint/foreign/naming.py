"""Names: without wrappers' prefixes, and for optimizer state that a file only numbers.

A file that numbers parameters lists them group by group, and each group in the model's order. So where shapes leave only
one way to do that, the names are known. Where they leave more than one, nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from distkit.errors import CheckpointError
from distkit.state import clean_name

__all__ = ["Candidate", "infer_names", "name_cleaner", "trainable"]

COMMON_PREFIXES = ("module.", "_forward_module.")
"""DDP's, DeepSpeed's and Lightning's, before every name of a model. One that only some names have is the model's own."""

MAX_STATES = 50_000
"""Partial assignments looked at side by side; real models with two or three groups have a few hundred."""

Shape = tuple[int, ...]
HINT = "say how the model is built, in your script or a module of its own: --model MODULE:FUNCTION"


@dataclass(frozen=True)
class Candidate:
    """A tensor of the model that an optimizer may train."""

    name: str
    shape: Shape


def name_cleaner(names: Iterable[str], strip: str | None) -> Callable[[str], str]:
    """What takes prefixes off the names of one model.

    Args:
        names: All of them.
        strip: A prefix to take off besides, from the names that have it.

    Raises:
        CheckpointError: No name has it, or two names become one.
    """
    names = list(names)
    common: list[str] = []
    cleaned = [clean_name(name) for name in names]
    while prefix := next((p for p in COMMON_PREFIXES if cleaned and all(n.startswith(p) for n in cleaned)), None):
        common.append(prefix)
        cleaned = [clean_name(name[len(prefix) :]) for name in cleaned]
    if strip and not any(name.startswith(strip) for name in cleaned):
        raise CheckpointError(
            f"--strip-prefix was set to {strip!r}, but no name begins with it: {', '.join(cleaned[:3])} ...",
            hint=f"--strip-prefix {cleaned[0].partition('.')[0]}." if cleaned and "." in cleaned[0] else None,
        )

    def clean(name: str) -> str:
        name = clean_name(name)
        for prefix in common:
            name = clean_name(name.removeprefix(prefix))
        return clean_name(name.removeprefix(strip or ""))

    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(clean(name), name)
        if other != name:
            raise CheckpointError(f"without prefixes {name!r} and {other!r} have the same name")
    return clean


def trainable(names: Iterable[str], floating: Mapping[str, bool]) -> list[str]:
    """Names that may be trained parameters: no integers, and no running statistics of a normalisation.

    ``running_mean`` and ``running_var`` beside ``num_batches_tracked`` are the buffers of torch's normalisations.
    """
    names = list(names)
    normalised = {n.removesuffix("num_batches_tracked") for n in names if n.endswith("num_batches_tracked")}
    statistics = {prefix + name for prefix in normalised for name in ("running_mean", "running_var")}
    return [name for name in names if floating[name] and name not in statistics]


def infer_names(
    groups: Sequence[Sequence[Shape | None]], candidates: Sequence[Candidate], *, ordered: bool, what: str
) -> list[list[str]]:
    """The only way to give each numbered parameter a name.

    Args:
        groups: For each parameter group the shapes, in its order; None is one that the file doesn't tell.
        candidates: Tensors of the model that may be trained, in its order. Some of them may be in no group.
        ordered: Whether the order of candidates is the model's; otherwise only shapes that occur once count.
        what: How messages call the optimizer.

    Returns:
        For each group the names.

    Raises:
        CheckpointError: There is no way, or more than one; says why.
    """
    wanted = sum(map(len, groups))
    if wanted > len(candidates):
        raise CheckpointError(
            f"{what} has {wanted} parameters, but the model in the file only {len(candidates)} that can be trained",
            hint=HINT,
        )
    if not ordered:
        return _by_shape(groups, candidates, what)
    return _by_order(groups, candidates, what)


def _by_shape(groups: Sequence[Sequence[Shape | None]], candidates: Sequence[Candidate], what: str) -> list[list[str]]:
    names: dict[Shape, list[str]] = {}
    for candidate in candidates:
        names.setdefault(candidate.shape, []).append(candidate.name)
    result = []
    for group in groups:
        found = []
        for shape in group:
            options = names.get(shape, []) if shape is not None else []
            if len(options) != 1:
                raise CheckpointError(
                    f"{what} only numbers its parameters, and the file of weights lists names in alphabetical order; by "
                    f"shape alone a parameter of shape {list(shape) if shape is not None else 'unknown'} could be "
                    f"{' or '.join(map(repr, options[:2])) or 'any'}",
                    hint=HINT,
                )
            found.append(options[0])
        result.append(found)
    return result


def _by_order(groups: Sequence[Sequence[Shape | None]], candidates: Sequence[Candidate], what: str) -> list[list[str]]:
    """Candidates one by one: each is the next parameter of some group, or in none. Counts the ways, up to two."""
    lengths = tuple(map(len, groups))
    spare = len(candidates) - sum(lengths)
    levels: list[dict[tuple[int, ...], list[int]]] = []  # at each: where the groups stand, and the last choices
    ways = {(0,) * len(groups): 1}
    for position, candidate in enumerate(candidates):
        choices: dict[tuple[int, ...], list[int]] = {}
        after: dict[tuple[int, ...], int] = {}
        for state, count in ways.items():
            if position - sum(state) < spare:  # it may be in no group
                choices.setdefault(state, []).append(-1)
                after[state] = min(2, after.get(state, 0) + count)
            for index, taken in enumerate(state):
                if taken < lengths[index] and groups[index][taken] in (None, candidate.shape):
                    reached = (*state[:index], taken + 1, *state[index + 1 :])
                    choices.setdefault(reached, []).append(index)
                    after[reached] = min(2, after.get(reached, 0) + count)
        levels.append(choices)
        ways = after
        if len(ways) > MAX_STATES:
            raise CheckpointError(
                f"{what} only numbers its parameters, and there are too many ways to name them", hint=HINT
            )
    if not ways.get(lengths):
        raise CheckpointError(
            f"{what} only numbers its parameters, and their shapes don't follow the order of the model in the file",
            hint=HINT,
        )
    names: list[list[str]] = [[] for _ in groups]
    state = lengths
    for candidate, choices in zip(reversed(candidates), reversed(levels), strict=True):
        if len(choices[state]) > 1:
            raise CheckpointError(
                f"{what} only numbers its parameters, and by order and shape there is more than one way to name them: "
                f"{candidate.name!r} {' or '.join(map(_place, choices[state][:2]))}",
                hint=HINT,
            )
        (index,) = choices[state]
        if index >= 0:
            names[index].append(candidate.name)
            state = (*state[:index], state[index] - 1, *state[index + 1 :])
    return [list(reversed(found)) for found in names]


def _place(index: int) -> str:
    return "may be in none" if index < 0 else f"may be in group {index}"
