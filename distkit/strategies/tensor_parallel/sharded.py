"""The tensor between two split layers: each rank holds a part of one dimension, and it shows the shape of the whole.

A model's forward reads sizes (``B, T, C = x.size()``), views, splits and transposes by them, and must not notice that a
rank holds some heads only. So :class:`ShardedTensor` has the global shape, and each function that it is given to runs on the
local part, with sizes among the arguments made local. What dimension of the result is the split one is found by running the
function on meta tensors too. Anything for which that has no single answer is refused: a sum over the split dimension is
never silently a partial sum.

Autograd sees the local tensors only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from distkit.errors import UsageError
from distkit.strategies.tensor_parallel.group import TensorGroup, gather_from_group, part_is_used
from distkit.strategies.tensor_parallel.loss import cross_entropy_of_part
from distkit.strategies.tensor_parallel.result_shapes import result_on_meta

__all__ = ["ShardedTensor", "local_part", "show_local_parts", "whole"]


class ShardedTensor(torch.Tensor):
    """A tensor of which this rank holds a part of dimension ``dim``.

    ``parts`` are the global sizes of what lies one behind the other along that dimension, each split for itself: (c, c, c)
    for a fused q, k, v, otherwise one. The local part has a rank's piece of each, in the same order.
    """

    local: torch.Tensor
    split_dim: int
    parts: tuple[int, ...]
    group: TensorGroup

    @staticmethod
    def __new__(cls, local: torch.Tensor, dim: int, parts: Sequence[int], group: TensorGroup) -> ShardedTensor:
        """Wrap a local part.

        Args:
            local: This rank's.
            dim: The split dimension.
            parts: Global sizes along it.
            group: The tensor group.
        """
        shape = list(local.shape)
        dim %= len(shape)
        shape[dim] = sum(parts)
        made: ShardedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=False
        )
        made.local, made.split_dim, made.parts, made.group = local, dim, tuple(parts), group
        return made

    def with_local(self, local: torch.Tensor) -> ShardedTensor:
        """The same part of something else."""
        return ShardedTensor(local, self.split_dim, self.parts, self.group)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedTensor({tuple(self.shape)}, dimension {self.split_dim} over {self.group.size})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _refused(str(func), "it went around torch's Python functions")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _OF_LOCAL:
            return func(args[0].local, *args[1:], **kwargs)
        special = _SPECIAL.get(getattr(func, "__name__", ""))
        try:
            if special is not None and isinstance(args[0], ShardedTensor):
                return special(func, *args, **kwargs)
            return _run(func, args, kwargs)
        except UsageError:
            if not _may_be_whole(func, args, kwargs):
                raise
        return _on_whole(func, args, kwargs)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return tensor.local if isinstance(tensor, ShardedTensor) else tensor


def _getters(*names: str) -> set[Any]:
    """What torch passes to ``__torch_function__`` when an attribute is read."""
    return {getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)}


def _methods(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name) for name in names}


_PLAIN: set[Any] = {
    *_getters(
        "shape", "ndim", "dtype", "device", "layout", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_meta"
    ),
    *_getters("is_mps", "is_xla", "is_xpu", "is_nested", "itemsize"),
    *_methods("size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "__len__"),
    *_methods("element_size", "get_device"),
    torch.is_floating_point,
    torch.numel,
}
"""Questions whose answer the global shape gives."""

_OF_LOCAL: set[Any] = {
    *_getters("requires_grad", "grad_fn", "is_leaf", "_base", "_version", "output_nr"),
    *_methods("is_contiguous", "stride", "register_hook", "retain_grad"),
}
"""Questions about the part that is there."""


def _run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """On the local parts, and on meta tensors of the global shapes to learn what the result is a part of."""
    flat, spec = tree_flatten((args, kwargs))
    sharded = [value for value in flat if isinstance(value, ShardedTensor)]
    group, name = sharded[0].group, getattr(func, "__name__", str(func))
    flat = [_matching_part(_used_in_part(value, group), sharded, name) for value in flat]
    local_args, local_kwargs = tree_unflatten([_local(value) for value in flat], spec)
    with torch._C.DisableTorchFunctionSubclass():
        try:
            expected = result_on_meta(func, args, kwargs)
            part = func(*local_args, **local_kwargs)
        except (RuntimeError, IndexError, TypeError) as error:  # values asked of meta tensors among them
            raise _refused(name, str(error)) from error
    parts = next((value.parts for value in sharded if len(value.parts) > 1), None)
    return _wrap(part, expected, parts, group, name)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, from all ranks of the group; called by all of them."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    if len(tensor.parts) > 1:
        raise _refused("gather", f"it consists of {len(tensor.parts)} parts")
    return gather_from_group(tensor.local, tensor.split_dim, tensor.group)


class _Opened(NamedTuple):
    """A split tensor as what engines find the local part in."""

    local: torch.Tensor
    split_dim: int
    parts: tuple[int, ...]
    group: TensorGroup


def show_local_parts(module: nn.Module) -> None:
    """Let an engine's own hook on a module's arguments, which was registered before, see local parts.

    It passes tensors through a function of its own so that it is told in backward, and autograd knows the local parts only.
    """
    module.register_forward_pre_hook(_open, with_kwargs=True, prepend=True)
    module.register_forward_pre_hook(_close, with_kwargs=True)


def _open(module: nn.Module, args: Any, kwargs: Any) -> Any:
    def opened(value: Any) -> Any:
        if not isinstance(value, ShardedTensor):
            return value
        return _Opened(value.local, value.split_dim, value.parts, value.group)

    return tree_map(opened, (args, kwargs))


def _close(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map(
        lambda value: ShardedTensor(*value) if isinstance(value, _Opened) else value,
        (args, kwargs),
        is_leaf=lambda value: isinstance(value, _Opened),
    )


def _may_be_whole(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether all that is split here came out of the model, and the function doesn't write into it."""
    sharded = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, ShardedTensor)]
    name = getattr(func, "__name__", "")
    writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    return not writes and all(value.group.gathers and len(value.parts) == 1 for value in sharded)


def _on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    flat, spec = tree_flatten((args, kwargs))
    whole_args, whole_kwargs = tree_unflatten([whole(v) if isinstance(v, torch.Tensor) else v for v in flat], spec)
    return func(*whole_args, **whole_kwargs)


def _local(value: Any) -> Any:
    return value.local if isinstance(value, ShardedTensor) else value


def _used_in_part(value: Any, group: TensorGroup) -> Any:
    """A whole tensor beside a split one gets a part of its gradient on each rank."""
    whole = isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor)
    return part_is_used(value, group) if whole else value


def _matching_part(value: Any, sharded: Sequence[ShardedTensor], name: str) -> Any:
    """A whole tensor that is broadcast against split ones: this rank's part of it, where it has their dimension whole."""
    if name not in _BROADCASTING or not isinstance(value, torch.Tensor) or isinstance(value, ShardedTensor):
        return value
    for other in sharded:
        dim = other.split_dim - other.dim() + value.dim()
        if dim >= 0 and value.shape[dim] == other.shape[other.split_dim] and value.shape[dim] > 1:
            return shard(value, dim, other.parts, other.group)
    return value


def shard(tensor: torch.Tensor, dim: int, parts: Sequence[int], group: TensorGroup) -> ShardedTensor:
    """This rank's part of a tensor that is whole everywhere."""
    rank, size = group.rank, group.size
    pieces = [
        part.narrow(dim, rank * (part.shape[dim] // size), part.shape[dim] // size)
        for part in tensor.split(list(parts), dim)
    ]
    return ShardedTensor(torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0], dim, parts, group)


def _wrap(part: Any, whole: Any, parts: tuple[int, ...] | None, group: TensorGroup, name: str) -> Any:
    if isinstance(part, torch.Tensor) and isinstance(whole, torch.Tensor):
        dims = [d for d, (a, b) in enumerate(zip(part.shape, whole.shape, strict=True)) if a != b]
        if len(dims) != 1 or part.shape[dims[0]] * group.size != whole.shape[dims[0]]:
            raise _refused(name, f"its result would be {tuple(part.shape)} of {tuple(whole.shape)}")
        size = whole.shape[dims[0]]
        keeps = parts is not None and sum(parts) == size
        return ShardedTensor(part, dims[0], parts if keeps and parts is not None else (size,), group)
    if isinstance(part, tuple | list):
        wrapped = [_wrap(a, b, parts, group, name) for a, b in zip(part, whole, strict=True)]
        return type(part)(wrapped) if type(part) in (tuple, list) else tuple(wrapped)
    if part is None or isinstance(part, bool | int | float | torch.dtype | torch.device):
        return part
    raise _refused(name, f"its result is a {type(part).__name__}")


def _refused(name: str, why: str) -> UsageError:
    return UsageError(
        f"{name}() was called on a tensor that is split over the tensor group, and can't be done on a part: {why}",
        hint="keep the layers around it whole: --set 'parallel.tensor_layout={\"NAME.OF.MODULE\": replicate}'",
    )


# -- functions whose arguments are sizes ------------------------------------------------------------------------------


def _view(func: Any, tensor: ShardedTensor, *sizes: Any, **kwargs: Any) -> Any:
    if len(sizes) == 1 and isinstance(sizes[0], torch.dtype):
        return _run(func, (tensor, *sizes), kwargs)
    shape = kwargs.pop("size", None) or kwargs.pop("shape", None) or sizes
    shape = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
    return _reshaped(tensor, _complete(shape, tensor.numel()))


def _complete(shape: list[int], numel: int) -> list[int]:
    if -1 in shape:
        known = prod(n for n in shape if n != -1)
        shape = [numel // max(known, 1) if n == -1 else n for n in shape]
    return shape


def _reshaped(tensor: ShardedTensor, shape: list[int]) -> ShardedTensor:
    """Where the split dimension goes: what lies before it, its parts included, has as many elements as before."""
    size, dim = tensor.group.size, tensor.split_dim
    count = len(tensor.parts)
    if len(set(tensor.parts)) > 1 and shape[:dim] == list(tensor.shape[:dim]) and shape[dim] == tensor.shape[dim]:
        local = list(shape)
        local[dim] = tensor.local.shape[dim]
        return ShardedTensor(tensor.local.reshape(local), dim, tensor.parts, tensor.group)
    before = prod(tensor.shape[:dim])
    for outer, parts in ((before * count, 1), (before, count)):
        if len(set(tensor.parts)) > 1 and count > 1:
            break
        found = _dimension_behind(shape, outer)
        if (
            found is not None
            and shape[found] % (size * parts) == 0
            and tensor.parts[0] * parts % shape[found] in (0, tensor.parts[0] * parts)
        ):
            local = [n // size if d == found else n for d, n in enumerate(shape)]
            kept = (shape[found] // parts,) * parts
            return ShardedTensor(tensor.local.reshape(local), found, kept, tensor.group)
    raise _refused("view", f"{tuple(tensor.shape)} with dimension {dim} split, as {tuple(shape)}")


def _dimension_behind(shape: Sequence[int], outer: int) -> int | None:
    """The first dimension of more than one element that has ``outer`` elements before it."""
    product = 1
    for dim, n in enumerate(shape):
        if product == outer and n > 1:
            return dim
        product *= n
    return None


def _flatten(func: Any, tensor: ShardedTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % tensor.dim(), end_dim % tensor.dim()
    shape = [*tensor.shape[:start], prod(tensor.shape[start : end + 1]), *tensor.shape[end + 1 :]]
    return _reshaped(tensor, shape)


def _unflatten(func: Any, tensor: ShardedTensor, dim: int, sizes: Sequence[int]) -> Any:
    dim %= tensor.dim()
    inner = _complete(list(sizes), tensor.shape[dim])
    return _reshaped(tensor, [*tensor.shape[:dim], *inner, *tensor.shape[dim + 1 :]])


def _split(func: Any, tensor: ShardedTensor, split_size_or_sections: Any = None, dim: int = 0, **kwargs: Any) -> Any:
    sizes = kwargs.get("split_size", kwargs.get("split_sizes", split_size_or_sections))
    dim %= tensor.dim()
    if dim != tensor.split_dim:
        return _run(func, (tensor, sizes, dim), {})
    whole = tensor.shape[dim]
    sections = [min(sizes, whole - n) for n in range(0, whole, sizes)] if isinstance(sizes, int) else list(sizes)
    return _cut(tensor, sections)


def _chunk(func: Any, tensor: ShardedTensor, chunks: int, dim: int = 0) -> Any:
    dim %= tensor.dim()
    if dim != tensor.split_dim:
        return _run(func, (tensor, chunks, dim), {})
    per = -(-tensor.shape[dim] // chunks)
    return _split(func, tensor, per, dim)


def _cut(tensor: ShardedTensor, sections: list[int]) -> tuple[ShardedTensor, ...]:
    """Along the split dimension: only at the borders of parts, since elsewhere a rank holds nothing of some section."""
    left, pieces = list(tensor.parts), []
    for section in sections:
        own: list[int] = []
        while left and sum(own) < section:
            own.append(left.pop(0))
        if sum(own) != section:
            raise _refused("split", f"parts of {list(tensor.parts)}, into sections of {sections}")
        pieces.append(own)
    size, dim = tensor.group.size, tensor.split_dim
    locals_ = tensor.local.split([sum(own) // size for own in pieces], dim)
    return tuple(ShardedTensor(part, dim, own, tensor.group) for part, own in zip(locals_, pieces, strict=True))


def _expand(func: Any, tensor: ShardedTensor, *sizes: Any, **kwargs: Any) -> Any:
    shape = list(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else list(sizes or kwargs["size"])
    dim = tensor.split_dim - tensor.dim() + len(shape)
    if shape[dim] not in (-1, tensor.shape[tensor.split_dim]):
        raise _refused("expand", f"{tuple(tensor.shape)} to {tuple(shape)}")
    shape[dim] = -1
    return ShardedTensor(tensor.local.expand(shape), dim, tensor.parts, tensor.group)


def _like(func: Any, tensor: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    return ShardedTensor(func(tensor.local, *args, **kwargs), tensor.split_dim, tensor.parts, tensor.group)


def _dropout(func: Any, tensor: ShardedTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """The mask of the whole is drawn, since every rank of the group draws the same numbers, and this rank's part of it
    used: so parts differ, what follows stays in step, and the result is that of one process. Like torch, in the order in
    which the tensor lies in memory."""
    if not training or p == 0:
        return _like(func, tensor, p, training, inplace)
    with torch.no_grad():
        strides = tensor.local.stride()
        order = sorted(range(tensor.dim()), key=lambda d: -strides[d])
        ones = torch.ones([tensor.shape[d] for d in order], dtype=tensor.dtype, device=tensor.device)
        mask = torch.nn.functional.dropout(ones, p).permute([order.index(d) for d in range(tensor.dim())])
    part = shard(mask, tensor.split_dim, tensor.parts, tensor.group).local
    return ShardedTensor(tensor.local * part, tensor.split_dim, tensor.parts, tensor.group)


def _attention(
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **kwargs: Any,
) -> Any:
    """With dropout, which happens inside of the fused function, step by step; else the fused one on this rank's heads."""
    if dropout_p == 0:
        options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, **kwargs}
        return _run(func, (query, key, value), options)
    if kwargs.get("enable_gqa"):
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
    return torch.nn.functional.dropout(scores.softmax(-1), dropout_p) @ value


def _cross_entropy(
    func: Any,
    tensor: ShardedTensor,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Where the classes are what is split, on the parts; options that are rarer, on the whole."""
    classes = 1 if tensor.dim() > 1 else 0
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if not plain or tensor.split_dim != classes or len(tensor.parts) > 1 or target.is_floating_point():
        raise _refused("cross_entropy", "with these options")
    logits = tensor.local.movedim(classes, -1)
    losses = cross_entropy_of_part(
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        tensor.group,
        ignore_index=ignore_index,
        reduction=reduction,
    )
    return losses.reshape(target.shape) if reduction == "none" else losses


def _set_item(func: Any, tensor: ShardedTensor, index: Any, value: Any) -> None:
    """Where the index means the same on the part as on the whole."""
    if isinstance(tensor[index], ShardedTensor):
        _run(func, (tensor, index, value), {})
    else:
        raise _refused("__setitem__", "the index picks from the split dimension")


def _refuse_over(func: Any, tensor: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    """Functions that mix along a dimension and keep the shape would be wrong without a sign of it."""
    name = getattr(func, "__name__", "?")
    given = kwargs.get("dim", args[0] if args and isinstance(args[0], int) else None)
    normalized = kwargs.get("normalized_shape", args[0] if args and not isinstance(args[0], int) else None)
    dims = [given] if isinstance(given, int) else list(range(-len(normalized), 0)) if normalized is not None else [-1]
    if tensor.split_dim in [d % tensor.dim() for d in dims]:
        raise _refused(name, f"it works along the split dimension {tensor.split_dim}")
    return _run(func, (tensor, *args), kwargs)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "view": _view,
    "reshape": _view,
    "flatten": _flatten,
    "unflatten": _unflatten,
    "split": _split,
    "split_with_sizes": _split,
    "chunk": _chunk,
    "expand": _expand,
    "dropout": _dropout,
    "cross_entropy": _cross_entropy,
    "__setitem__": _set_item,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(
        (
            "zeros_like",
            "ones_like",
            "empty_like",
            "contiguous",
            "clone",
            "detach",
            "to",
            "float",
            "type_as",
            "cpu",
            "cuda",
        ),
        _like,
    ),
    **dict.fromkeys(
        ("softmax", "log_softmax", "layer_norm", "rms_norm", "normalize", "cumsum", "sort", "flip", "roll"),
        _refuse_over,
    ),
}

_BROADCASTING = {
    *(
        "add",
        "sub",
        "mul",
        "div",
        "rsub",
        "where",
        "masked_fill",
        "masked_fill_",
        "scaled_dot_product_attention",
        "maximum",
    ),
    *("__add__", "__sub__", "__mul__", "__truediv__", "__radd__", "__rsub__", "__rmul__", "__rtruediv__", "minimum"),
    *("add_", "mul_", "sub_", "div_", "__iadd__", "__imul__", "__isub__", "__itruediv__", "true_divide"),
}
"""Functions that broadcast; a whole tensor beside a split one is cut to match."""
