"""What gradients are on the wire: in 16 bits as `compress.method` sends them, and by the published sparser ways."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from distkit.advise.models import ModelShape
from distkit.config.nearest import nearest
from distkit.errors import PlanError

__all__ = [
    "check_method",
    "compression_of",
    "low_rank_values",
    "methods",
    "sparse_bytes",
    "takes",
    "wire_bytes",
]

_WIDTHS = {"fp16": 2, "bf16": 2}
_KEPT = 0.01
"""Share of the gradient's values that TopK keeps in the comparison; arXiv 1712.01887 keeps 0.001 after a warm-up."""
_RANK = 4
"""Of PowerSGD in the comparison: arXiv 1905.13727, table 3."""


def methods() -> tuple[str, ...]:
    """Values of `compress.method`, as the settings have them."""
    from distkit.config.schema import keys

    return next(key.choices for key in keys() if key.name == "compress.method")


def check_method(name: str) -> None:
    """Refuse what no strategy sends.

    Raises:
        PlanError: It isn't a value of `compress.method`.
    """
    if name not in methods():
        near = nearest(name, list(methods())) or "bf16"
        raise PlanError(
            f"--compress was set to {name!r}, which no strategy has; valid: {', '.join(methods())}",
            hint=f"--compress {near}",
        )


def takes(strategy: str, method: str) -> bool:
    """Whether a strategy sends gradients so.

    Args:
        strategy: Name of the strategy.
        method: Value of `compress.method`.
    """
    from distkit.strategies.registry import strategy_class

    return method in strategy_class(strategy).capabilities.compress


def wire_bytes(gradient: float, method: str) -> float:
    """Bytes of one value of a gradient on the wire.

    Args:
        gradient: Bytes that it travels with uncompressed.
        method: Value of `compress.method`.
    """
    return min(gradient, _WIDTHS.get(method, gradient))


def sparse_bytes(values: float, ratio: float, ranks: int) -> float:
    """Bytes that a rank sends for an exchange of gradients of which it sends the largest values only (TopK).

    Each rank picks other ones, so they can't be added up on the way: all get all (all-gather), a value of 4 bytes with its
    index of 4. One rank's message is 2 x ``ratio`` of the gradients, but they pass N-1 times, where an all-reduce passes
    about twice: the saving shrinks with the ranks.

    Args:
        values: Of the gradient.
        ratio: Share that is sent.
        ranks: That exchange.
    """
    return (ranks - 1) * 8.0 * ratio * values


def low_rank_values(rows: int, columns: int, rank: int) -> int:
    """Values that PowerSGD sends for an n x m matrix: r (n + m) instead of n m; arXiv 1905.13727, section 3.

    Args:
        rows: n.
        columns: m.
        rank: r.
    """
    return min(rows * columns, rank * (rows + columns))


def matrices_of(model: ModelShape) -> list[tuple[int, int, int]]:
    """Rows, columns and number of a transformer's matrices; empty for other models."""
    if model.convolution is not None:
        return []
    hidden, inner, kv = model.hidden, model.feed_forward, model.hidden * model.kv_heads // model.heads
    layer = [(hidden, hidden, 2), (kv, hidden, 2), (inner, hidden, 3 if model.gated else 2)]
    ends = [(model.vocabulary, hidden, 1 if model.tied else 2)]
    return [(rows, columns, model.layers * count) for rows, columns, count in layer] + ends


def compression_of(model: ModelShape, ranks: int, chosen: str, strategies: Iterable[str]) -> dict[str, Any]:
    """Bytes that a rank sends to exchange fp32 gradients once, by each method, and which strategies have it.

    Args:
        model: The model.
        ranks: That exchange.
        chosen: The plan's `compress.method`.
        strategies: Candidates.
    """
    whole = 2.0 * (ranks - 1) / ranks
    named = sorted(set(strategies))
    rows = [
        {
            "method": name,
            "bytes": round(whole * model.parameters * wire_bytes(4, name)),
            "strategies": [strategy for strategy in named if takes(strategy, name)],
        }
        for name in methods()
    ]
    sparse = sparse_bytes(model.parameters, _KEPT, ranks)
    rows.append({"method": "topk", "ratio": _KEPT, "bytes": round(sparse), "strategies": []})
    matrices = matrices_of(model)
    if matrices:
        saved = sum(count * (n * m - low_rank_values(n, m, _RANK)) for n, m, count in matrices)
        low = whole * 4 * max(0, model.parameters - saved)
        rows.append({"method": "powersgd", "rank": _RANK, "bytes": round(low), "strategies": []})
    return {"method": chosen, "exchange_of_fp32_gradients": rows}
