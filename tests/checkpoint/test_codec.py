"""Values to JSON and back."""

from __future__ import annotations

import enum
import http
import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from distkit.checkpoint.codec import decode, encode
from distkit.errors import CheckpointError


class Colour(enum.Enum):
    RED = "r"


def round_trip(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, tensors), allow_nan=False)
    return decode(json.loads(text), tensors)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**70),
        0.1 + 0.2,
        5e-324,
        math.inf,
        -math.inf,
        "ü\n\U0001f600",
        [1, [2, None]],
        {"a": {"b": []}},
        (0.9, (0.95,), ()),
        {3, 1, 2},
        frozenset({"x"}),
        {1: "one", (2, 3): "pair", None: 0},
        {"$": "a user's own key", "b": 1},
        b"\x00\xff",
        complex(1, -0.0),
        torch.bfloat16,
        torch.device("cuda:1"),
        torch.Size([2, 3]),
        Counter({3: 1, 8: 2}),
        OrderedDict([("b", 1), ("a", 2)]),
        Colour.RED,
        http.HTTPStatus.OK,
    ],
    ids=repr,
)
def test_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)


def test_nan_and_defaultdict() -> None:
    assert math.isnan(round_trip([float("nan")])[0])
    assert round_trip(defaultdict(list, {"a": [1]})) == {"a": [1]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.int64])
def test_tensors_go_beside_the_json(dtype: torch.dtype) -> None:
    value = {"old_dirs": [torch.ones(3).to(dtype), torch.zeros(()).to(dtype)], "lr": torch.nn.Parameter(torch.ones(1))}
    tensors: dict[str, torch.Tensor] = {}
    back = decode(json.loads(json.dumps(encode(value, tensors))), tensors)
    assert len(tensors) == 3
    assert back["old_dirs"][0].dtype == dtype
    assert torch.equal(back["old_dirs"][1], value["old_dirs"][1])


@pytest.mark.parametrize(
    "value", [np.float32(0.1), np.int64(-3), np.bool_(True), np.float64(2.5), np.complex64(1 + 2j)]
)
def test_numpy_scalars_keep_their_type(value: Any) -> None:
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)


def test_numpy_arrays() -> None:
    array = np.arange(6.0).reshape(2, 3)[:, ::-1]
    back = round_trip({"a": array})["a"]
    assert isinstance(back, np.ndarray)
    assert (back == array).all()


def test_state_of_every_scheduler_of_torch_survives() -> None:
    from torch.optim import lr_scheduler as lrs

    def sgd() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)

    chain = sgd()
    made = [
        lrs.LambdaLR(sgd(), lambda step: 1.0),
        lrs.MultiStepLR(sgd(), [3, 8]),
        lrs.CyclicLR(sgd(), 0.1, 0.2),
        lrs.OneCycleLR(sgd(), 0.1, 9),
        lrs.CosineAnnealingWarmRestarts(sgd(), 3),
        lrs.ReduceLROnPlateau(sgd()),
        lrs.SequentialLR(chain, [lrs.LinearLR(chain), lrs.StepLR(chain, 2)], [3]),
    ]
    for scheduler in made:
        state = scheduler.state_dict()
        assert round_trip(state) == state
        scheduler.load_state_dict(round_trip(state))


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"schedulers": [{"f": print}]}, "state['schedulers'][0]['f'] is a builtins.builtin_function_or_method"),
        ([object()], "state[0] is a builtins.object"),
        (Pair(1, 2), "state is a tests.checkpoint.test_codec.Pair"),
        ({"a": {1: lambda: 0}}, "state['a'][1] is a builtins.function"),
        (np.array(["text"]), "state is a numpy.ndarray"),
    ],
    ids=["function", "object", "namedtuple", "lambda", "strings"],
)
def test_unknown_types_are_refused_with_their_place(value: Any, path: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        encode(value, {})
    assert path in str(caught.value)
    assert "Hint:" in str(caught.value)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode(loop, {})


@pytest.mark.parametrize(
    "hostile",
    [
        {"$": "os.system", "value": "true"},
        {"$": ["tuple"], "items": []},
        {"$": "tuple"},
        {"$": "tuple", "items": "abc"},
        {"$": "set", "items": [[1]]},
        {"$": "dict", "items": [[1]]},
        {"$": "dict", "items": [[[1], 2]]},
        {"$": "tensor", "key": "absent", "dtype": "float32"},
        {"$": "bytes", "value": "!!"},
        {"$": "dtype", "value": "load"},
        {"$": "device", "value": "; rm"},
        {"$": "float", "value": "one"},
        {"$": "enum", "module": ["x"], "class": "A", "name": "B", "value": 1},
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_hostile_data_is_an_error_and_nothing_else(hostile: Any) -> None:
    with pytest.raises(CheckpointError):
        decode(hostile, {})


def test_an_enum_imports_no_module_and_makes_no_other_object() -> None:
    """K13: the names in the data are only looked up among what is loaded, and only enums are taken."""
    for module, name in (
        ("this", "s"),
        ("os", "system"),
        ("subprocess", "Popen"),
        ("tests.checkpoint.test_codec", "Pair"),
    ):
        data = {"$": "enum", "module": module, "class": name, "name": "RED", "value": 5}
        assert decode(data, {}) == 5
    assert "this" not in sys.modules
