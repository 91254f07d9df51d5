"""Which names an optimizer's numbers stand for: only where there is one answer."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from distkit.checkpoint.foreign.naming import Candidate, infer_names, name_cleaner, trainable
from distkit.errors import CheckpointError

W, B = (4, 4), (4,)
NET = [Candidate("a.w", W), Candidate("a.b", B), Candidate("b.w", W), Candidate("b.b", B)]


def test_one_group_with_all() -> None:
    assert infer_names([[W, B, W, B]], NET, ordered=True, what="x") == [["a.w", "a.b", "b.w", "b.b"]]
    assert infer_names([[None] * 4], NET, ordered=True, what="x") == [["a.w", "a.b", "b.w", "b.b"]]  # SGD has no state


def test_two_groups_by_shape() -> None:
    assert infer_names([[B, B], [W, W]], NET, ordered=True, what="x") == [["a.b", "b.b"], ["a.w", "b.w"]]


def test_buffers_in_between() -> None:
    between = [NET[0], Candidate("table", (9, 9)), *NET[1:], Candidate("end", (3,))]
    assert infer_names([[W, B, W, B]], between, ordered=True, what="x") == [["a.w", "a.b", "b.w", "b.b"]]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[W, B]], "'b.b' may be in group 0 or may be in none"),  # a frozen half: which?
        ([[W, None], [None, B]], "more than one way"),
        ([[W, W, B, B]], "don't follow the order"),
        ([[W, B, W, B, B]], "has 5 parameters, but the model in the file only 4"),
        ([[(5,), B, W, B]], "don't follow the order"),
    ],
)
def test_nothing_is_guessed(groups: list[list[tuple[int, ...] | None]], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        infer_names(groups, NET, ordered=True, what="x")
    assert "--model MODULE:FUNCTION" in str(error.value)


def test_without_order_only_unique_shapes_count() -> None:
    net = [Candidate("w", W), Candidate("b", B)]
    assert infer_names([[B, W]], net, ordered=False, what="x") == [["b", "w"]]
    with pytest.raises(CheckpointError, match="alphabetical order.* could be 'a.w' or 'b.w'"):
        infer_names([[W, B]], NET, ordered=False, what="x")


def every_way(groups: list[list[tuple[int, ...]]], net: list[Candidate]) -> list[list[list[str]]]:
    """By trying all: names of each group in the model's order, shapes as they must be."""
    sizes = [len(group) for group in groups]
    marks = [index for index, size in enumerate(sizes) for _ in range(size)] + [-1] * (len(net) - sum(sizes))
    found = []
    for way in sorted(set(permutations(marks))):
        chosen = [[c for c, mark in zip(net, way, strict=True) if mark == index] for index in range(len(groups))]
        if [[c.shape for c in group] for group in chosen] == groups:
            found.append([[c.name for c in group] for group in chosen])
    return found


def test_against_trying_all_ways() -> None:
    """300 small models with random shapes, groups and frozen parameters."""
    rng = random.Random(3)
    seen = {0: 0, 1: 0, 2: 0}
    for _ in range(300):
        net = [Candidate(str(i), rng.choice([(1,), (2,), (3,), (2, 2)])) for i in range(rng.randint(2, 7))]
        marks = [rng.choice([-1, 0, 0, 1]) for _ in net]
        groups = [[c.shape for c, mark in zip(net, marks, strict=True) if mark == index] for index in (0, 1)]
        if rng.random() < 0.2:
            rng.shuffle(groups[0])
        ways = every_way(groups, net)
        seen[min(2, len(ways))] += 1
        if len(ways) == 1:
            assert infer_names(groups, net, ordered=True, what="x") == ways[0]
        else:
            with pytest.raises(CheckpointError):
                infer_names(groups, net, ordered=True, what="x")
    assert min(seen.values()) > 10  # all three cases came up


def test_statistics_of_a_normalisation_are_no_parameters() -> None:
    names = [
        "c.weight",
        "n.weight",
        "n.bias",
        "n.running_mean",
        "n.running_var",
        "n.num_batches_tracked",
        "running_mean",
    ]
    floating = {name: name != "n.num_batches_tracked" for name in names}
    assert trainable(names, floating) == ["c.weight", "n.weight", "n.bias", "running_mean"]


@pytest.mark.parametrize(
    ("names", "strip", "cleaned"),
    [
        (["module.a", "module.b.c"], None, ["a", "b.c"]),
        (["module.a", "b"], None, ["module.a", "b"]),  # a submodule of that name
        (["module._orig_mod.a", "module._orig_mod.b"], None, ["a", "b"]),
        (["_forward_module.net.a", "_forward_module.net.b"], "net.", ["a", "b"]),
        (["x._fsdp_wrapped_module.a", "_orig_mod.b"], None, ["x.a", "b"]),
        (["model.a", "loss.b"], "model.", ["a", "loss.b"]),
    ],
)
def test_prefixes(names: list[str], strip: str | None, cleaned: list[str]) -> None:
    assert list(map(name_cleaner(names, strip), names)) == cleaned


def test_prefixes_that_do_not_fit() -> None:
    with pytest.raises(CheckpointError, match="no name begins with it: net.a, net.b") as error:
        name_cleaner(["net.a", "net.b"], "model.")
    assert "--strip-prefix net." in str(error.value)
    with pytest.raises(CheckpointError, match="have the same name"):
        name_cleaner(["model.a", "a"], "model.")
