"""Python values as JSON and tensors, and back, without pickle.

What JSON has goes through as it is. Anything else becomes an object with the key ``$`` that says what it is, and a
tensor goes into a dict of tensors beside the JSON. Types that aren't listed here are refused with the path to the value.
Decoding builds only the types listed here; it imports nothing and calls nothing that the data names.
"""

from __future__ import annotations

import base64
import binascii
import enum
import math
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from distkit.errors import CheckpointError

__all__ = ["decode", "dtype_from_name", "dtype_name", "encode"]

TAG = "$"
MAX_DEPTH = 100
PLAIN_DICTS = (dict, defaultdict)
"""Stored as JSON objects; the factory of a defaultdict is a function and is not kept."""

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """``torch.float32`` for ``float32``.

    Raises:
        CheckpointError: This torch has no such dtype.
    """
    if name not in _DTYPES:
        raise CheckpointError(
            f"the checkpoint holds values of dtype {name!r}, which torch {torch.__version__} doesn't have",
            hint="pip install -U torch",
        )
    return _DTYPES[name]


def encode(value: Any, tensors: dict[str, torch.Tensor], path: str = "state") -> Any:
    """A value as something that ``json.dumps(..., allow_nan=False)`` takes.

    Args:
        value: None, bool, int, float, str, list, tuple, dict, set, frozenset, bytes, complex, tensors, dtypes, devices,
            sizes, enums, numpy scalars and arrays, OrderedDict, Counter, in any nesting.
        tensors: Tensors found in it are put here; the JSON holds their keys.
        path: How messages call the value.

    Raises:
        CheckpointError: Something in it is of another type; names where.
    """
    return _encode(value, tensors, path, 0)


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that :func:`encode` was given. Enums whose class isn't loaded come back as their values.

    Raises:
        CheckpointError: The data isn't what ``encode`` makes.
    """
    try:
        return _decode(value, tensors)
    except (ValueError, TypeError, KeyError, OverflowError, RuntimeError, RecursionError) as error:
        raise CheckpointError(f"a stored value can't be read: {type(error).__name__}: {error}") from error


def _encode(value: Any, tensors: dict[str, torch.Tensor], path: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{path} is nested deeper than {MAX_DEPTH} levels, or contains itself")
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
    if kind is list:
        return [_encode(item, tensors, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if kind in PLAIN_DICTS and TAG not in value and all(type(key) is str for key in value):
        return {key: _encode(item, tensors, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        key = f"{len(tensors)}"
        tensors[key] = value.detach()
        return {TAG: "tensor", "key": key, "dtype": dtype_name(value.dtype)}
    tagged = _encode_container(value, tensors, path, depth) or _encode_leaf(value, tensors, path, depth)
    if tagged is None:
        raise CheckpointError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint can't hold",
            hint="keep numbers, strings, lists, dicts and tensors in what state_dict() returns",
        )
    return tagged


def _encode_container(value: Any, tensors: dict[str, torch.Tensor], path: str, depth: int) -> dict[str, Any] | None:
    kind = type(value)
    if kind is torch.Size:
        return {TAG: "size", "items": list(value)}
    if kind in (tuple, set, frozenset):
        items = value if kind is tuple else sorted(value, key=repr)  # the same file for the same set
        encoded = [_encode(item, tensors, f"{path}[{i}]", depth + 1) for i, item in enumerate(items)]
        return {TAG: kind.__name__, "items": encoded}
    if kind in (*PLAIN_DICTS, OrderedDict, Counter):
        name = {OrderedDict: "ordered_dict", Counter: "counter"}.get(kind, "dict")
        pairs = [
            [
                _encode(key, tensors, f"key {key!r} of {path}", depth + 1),
                _encode(item, tensors, f"{path}[{key!r}]", depth + 1),
            ]
            for key, item in value.items()
        ]
        return {TAG: name, "items": pairs}
    return None


def _encode_leaf(value: Any, tensors: dict[str, torch.Tensor], path: str, depth: int) -> dict[str, Any] | None:
    kind = type(value)
    if isinstance(value, enum.Enum):
        inner = _encode(value.value, tensors, f"{path}.value", depth + 1)
        return {TAG: "enum", "module": kind.__module__, "class": kind.__qualname__, "name": value.name, "value": inner}
    if kind is bytes:
        return {TAG: "bytes", "value": base64.b64encode(value).decode()}
    if kind is complex:
        return {TAG: "complex", "value": [_encode(part, tensors, path, depth + 1) for part in (value.real, value.imag)]}
    if kind is torch.dtype:
        return {TAG: "dtype", "value": dtype_name(value)}
    if kind is torch.device:
        return {TAG: "device", "value": str(value)}
    return _encode_numpy(value, tensors, path)


def _encode_numpy(value: Any, tensors: dict[str, torch.Tensor], path: str) -> dict[str, Any] | None:
    np = sys.modules.get("numpy")
    if np is None or not isinstance(value, np.generic | np.ndarray) or value.dtype.kind not in "biufc":
        return None
    key = f"{len(tensors)}"
    try:
        tensor = torch.from_numpy(np.array(value))  # a copy: numpy arrays may be read-only or strided backwards
    except TypeError as error:
        raise CheckpointError(f"{path} is of numpy's dtype {value.dtype}, which torch doesn't have") from error
    tensors[key] = tensor
    tag = "ndarray" if isinstance(value, np.ndarray) else "numpy_scalar"
    return {TAG: tag, "key": key, "dtype": dtype_name(tensor.dtype)}


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _decode(item, tensors) for key, item in value.items()}
    tag = value[TAG]
    if not isinstance(tag, str) or tag not in _DECODERS:
        raise CheckpointError(
            f"a stored value is of the type {tag!r}, which this distkit doesn't know", hint="pip install -U distkit"
        )
    return _DECODERS[tag](value, tensors)


def _items(value: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    if not isinstance(value["items"], list):
        raise TypeError("items is not a list")
    return [_decode(item, tensors) for item in value["items"]]


def _text(value: dict[str, Any]) -> str:
    if not isinstance(value["value"], str):
        raise TypeError("value is not a string")
    return value["value"]


def _bytes(value: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> bytes:
    try:
        return base64.b64decode(_text(value), validate=True)
    except binascii.Error as error:
        raise ValueError("value is not base64") from error


def _enum(value: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """The member, if its class is loaded already. vars() and not getattr(): a module's __getattr__ may import things."""
    found: Any = sys.modules.get(value["module"])
    for part in str(value["class"]).split("."):
        found = vars(found).get(part) if isinstance(found, type | ModuleType) else None
    if isinstance(found, enum.EnumMeta) and value["name"] in found._member_map_:
        return found._member_map_[value["name"]]
    return _decode(value["value"], tensors)


def _tensor(value: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Types that safetensors lacks lie in the file as their bytes, in one more dimension."""
    tensor, dtype = tensors[value["key"]], dtype_from_name(value["dtype"])
    return tensor if tensor.dtype == dtype else tensor.view(dtype).squeeze(-1)


def _numpy(value: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    array = _tensor(value, tensors).numpy()
    return array[()] if value[TAG] == "numpy_scalar" else array


_DECODERS: dict[str, Callable[[dict[str, Any], Mapping[str, torch.Tensor]], Any]] = {
    "float": lambda value, tensors: float(_text(value)),
    "tuple": lambda value, tensors: tuple(_items(value, tensors)),
    "set": lambda value, tensors: set(_items(value, tensors)),
    "frozenset": lambda value, tensors: frozenset(_items(value, tensors)),
    "size": lambda value, tensors: torch.Size(_items(value, tensors)),
    "dict": lambda value, tensors: dict(_items(value, tensors)),
    "ordered_dict": lambda value, tensors: OrderedDict(_items(value, tensors)),
    "counter": lambda value, tensors: Counter(dict(_items(value, tensors))),
    "bytes": _bytes,
    "complex": lambda value, tensors: complex(*_decode(value["value"], tensors)),
    "dtype": lambda value, tensors: dtype_from_name(_text(value)),
    "device": lambda value, tensors: torch.device(_text(value)),
    "enum": _enum,
    "tensor": _tensor,
    "ndarray": _numpy,
    "numpy_scalar": _numpy,
}
