"""D7: tensors move wherever they are in a batch; all else passes untouched."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from distkit.data import batch_samples, move_to
from distkit.data.transfer import tensors_in

META = torch.device("meta")
CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: Any
    y: Any


Old = namedtuple("Old", "a b")


@dataclass(frozen=True)
class Frozen:
    x: Any
    name: str = "n"
    made: Any = field(init=False, default=None)


@dataclass
class Slotted:
    __slots__ = ("x", "y")
    x: Any
    y: Any


class Tagged(list[Any]):
    tag = "kept"


class Movable:
    def __init__(self, x: Any) -> None:
        self.x = x

    def to(self, device: torch.device) -> Movable:
        return Movable(self.x.to(device))


class Zoned:
    def to(self, zone: str) -> str:
        raise AssertionError("this `to` takes no device")


def t() -> torch.Tensor:
    return torch.ones(3, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: t(),
        lambda: [t(), "text", None, 3],
        lambda: (t(), b"bytes"),
        lambda: {"a": t(), "b": {"c": [t()]}, 3: None},
        lambda: Pair(t(), "y"),
        lambda: Old(1, t()),
        lambda: Frozen(t()),
        lambda: Slotted(t(), 1.5),
        lambda: OrderedDict(a=t(), b="x"),
        lambda: defaultdict(list, a=t()),
        lambda: UserDict({"a": t()}),
        lambda: MappingProxyType({"a": t(), "b": 1}),
        lambda: deque([t(), 1], maxlen=5),
        lambda: Tagged([t(), "x"]),
        lambda: [[(Frozen({"deep": [Pair(t(), None)]}),)]],
        lambda: pack_sequence([torch.ones(3), torch.ones(2)]),
        lambda: Movable(t()),
    ],
)
def test_tensors_move_and_the_structure_stays(make: Any) -> None:
    batch = make()
    moved = move_to(batch, META)
    assert type(moved) is type(batch)
    shape = _shape(batch)
    assert _shape(moved) == shape
    assert {x.device.type for x in tensors_in(moved)} <= {"meta", "cpu"}
    assert [x.device.type for x in tensors_in(moved)].count("meta") >= 1
    assert all(x.device.type == "cpu" for x in tensors_in(batch)), "the batch itself was changed"
    if not isinstance(batch, Movable):
        assert move_to(batch, CPU) is batch


def _shape(item: Any) -> Any:
    """The structure with shapes in the place of tensors."""
    if isinstance(item, torch.Tensor):
        return tuple(item.shape)
    if isinstance(item, dict | UserDict | MappingProxyType):
        return {key: _shape(value) for key, value in item.items()}
    if isinstance(item, tuple | list | deque):
        return [type(item).__name__, *map(_shape, item)]
    if isinstance(item, Frozen | Slotted | Movable):
        return [_shape(getattr(item, name, None)) for name in ("x", "y", "name", "made")]
    return item


def test_details_survive() -> None:
    moved = move_to(Tagged([t()]), META)
    assert moved.tag == "kept"
    kept = defaultdict(list, a=t())
    assert move_to(kept, META).default_factory is list
    assert move_to(deque([t()], maxlen=5), META).maxlen == 5
    frozen = Frozen(t())
    object.__setattr__(frozen, "made", t())
    assert move_to(frozen, META).made.device.type == "meta"


@pytest.mark.parametrize(
    "item", ["text", b"x", None, 3, 2.5, object(), np.ones(3), {"a", "b"}, range(3), Zoned(), int, Movable]
)
def test_others_pass_untouched(item: Any) -> None:
    assert move_to(item, META) is item
    assert move_to([item, t()], META)[0] is item


def test_shared_objects_stay_shared() -> None:
    x, inner = t(), [t()]
    moved = move_to({"a": x, "b": x, "c": inner, "d": inner}, META)
    assert moved["a"] is moved["b"] and moved["c"] is moved["d"]
    still = {"y": np.ones(2)}
    assert move_to([x, still], META)[1] is still


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.ones(4, 2), 4),
        ({"name": "x", "x": torch.ones(5)}, 5),
        ([torch.tensor(1.0), torch.ones(6, 1)], 6),
        (Frozen({"x": torch.ones(2)}), 2),
        (np.ones((7, 2)), 7),
        (pack_sequence([torch.ones(3), torch.ones(2)]), 2),
        (Movable(torch.ones(3)), 3),
        (["a", "b", "c"], 3),
        (torch.tensor(1.0), 1),
        ({"a": "text"}, 1),
        (None, 1),
    ],
)
def test_batch_samples(batch: Any, count: int) -> None:
    assert batch_samples(batch) == count
