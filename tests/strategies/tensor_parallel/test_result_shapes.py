"""Results on meta tensors: remembered, and never another call's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distkit.strategies.tensor_parallel.result_shapes import result_on_meta

X = torch.rand(2, 3, 4)


def shape(func: Any, *args: Any, **kwargs: Any) -> tuple[int, ...]:
    result: torch.Tensor = result_on_meta(func, args, kwargs)
    assert result.is_meta
    return tuple(result.shape)


def test_the_same_call_is_run_once() -> None:
    calls = []

    def doubled(x: torch.Tensor, scale: float) -> torch.Tensor:
        calls.append(scale)
        return x * scale

    for scale in (2.0, 2.0, 3.0, 2.0):
        assert shape(doubled, torch.rand(2, 3), scale) == (2, 3)
    assert shape(doubled, torch.rand(3, 2), 2.0) == (3, 2)
    shape(doubled, torch.rand(2, 3).half(), 2.0)
    assert calls == [2.0, 3.0, 2.0, 2.0]


def test_calls_that_look_alike_are_told_apart() -> None:
    assert shape(torch.sum, X, 1) == (2, 4)
    assert shape(torch.sum, X, [1]) == shape(torch.sum, X, dim=1) == (2, 4)
    assert shape(torch.sum, X, 1, True) == (2, 1, 4)
    get = torch.Tensor.__getitem__
    assert shape(get, X, 1) == (3, 4)
    assert shape(get, X, True) == (1, 2, 3, 4)
    assert shape(get, X, slice(0, 1)) == (1, 3, 4)
    assert shape(get, X, slice(0, 2)) == (2, 3, 4)
    assert shape(get, X, (..., 1)) == (2, 3)
    assert shape(get, X, (..., None)) == (2, 3, 4, 1)
    assert shape(torch.cat, (X, X)) == (4, 3, 4)
    assert shape(torch.cat, (X, X, X), dim=1) == (2, 9, 4)


def test_arguments_of_other_kinds_are_run_each_time() -> None:
    calls = []

    def like(x: torch.Tensor, kind: object) -> torch.Tensor:
        calls.append(kind)
        return x

    kind = object()
    assert shape(like, X, kind) == shape(like, X, kind) == (2, 3, 4)
    assert calls == [kind, kind]


def test_errors_are_raised_each_time() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="meta"):  # a value is asked for
            result_on_meta(torch.Tensor.item, (X[0, 0, 0],), {})
        with pytest.raises(RuntimeError):
            result_on_meta(torch.matmul, (X, X), {})
