"""What runs inside of worker processes on models with torch's own attention."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from distkit.strategies.tensor_parallel.apply import apply_layout, part_of
from distkit.strategies.tensor_parallel.detect import detect
from distkit.strategies.tensor_parallel.group import TensorGroup
from distkit.strategies.tensor_parallel.sharded import whole as gathered
from distkit.strategies.tensor_parallel.wishes import wishes_of
from distkit.world import detect_environment
from tests.strategies.tensor_parallel.attention_models import MODELS
from tests.strategies.tensor_parallel.models import model_and_run


def group() -> TensorGroup:
    environment = detect_environment()
    dist.init_process_group("gloo")
    return TensorGroup(environment.rank, environment.size, dist.group.WORLD)


def evaluated(model: str, kept: str | None = None) -> float:
    """The largest difference between a split model's output and a whole one's, in evaluation mode without gradients.

    Args:
        kept: A pattern of modules that stay whole.
    """
    own = group()
    build, run = model_and_run(model)
    torch.manual_seed(0)
    split = build()
    torch.manual_seed(0)
    whole = build()
    layout = detect(split, run, own.size, wishes_of(split, {kept: "replicate"} if kept else {}))
    assert any("layers" in name for name in layout.splits)
    apply_layout(split, layout, own)
    with torch.no_grad():
        difference = (gathered(run(split.eval())) - run(whole.eval())).abs().max()
    dist.destroy_process_group()
    return float(difference)


CONSTRUCTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch-first": {"batch_first": True},
    "dropout": {"dropout": 0.3},
    "other widths": {"kdim": 24, "vdim": 12, "batch_first": True},
    "no bias": {"bias": False},
    "biases behind": {"add_bias_kv": True},
    "zeros behind": {"add_zero_attn": True, "dropout": 0.2},
    "both behind": {"add_zero_attn": True, "add_bias_kv": True, "batch_first": True},
}
MASKS = (None, "bool", "float", "heads", "float heads")
QUERIES, KEYS, BATCH, WIDTH, HEADS = 6, 5, 3, 32, 4


def _arguments(module: nn.MultiheadAttention, inputs: str, mask: str | None, padded: bool) -> dict[str, Any]:
    """Of one call, the same on all ranks."""
    batched = inputs != "unbatched"
    shape = (BATCH, KEYS) if module.batch_first and batched else (KEYS, BATCH) if batched else (KEYS,)
    key, value = torch.randn(*shape, module.kdim), torch.randn(*shape, module.vdim)
    shape = (BATCH, QUERIES) if module.batch_first and batched else (QUERIES, BATCH) if batched else (QUERIES,)
    query = torch.randn(*shape, WIDTH)
    if inputs == "self":
        key = value = query
    elif inputs == "memory":
        value = key
    keys, batch = (QUERIES if inputs == "self" else KEYS), (BATCH if batched else 1)
    size = (QUERIES, keys) if mask in ("bool", "float") else (batch * HEADS, QUERIES, keys)
    made: Any = None if mask is None else torch.rand(size) < 0.2
    if made is not None:
        made[..., 0] = False  # a row without any key is no number
        made = made if "float" not in str(mask) else torch.randn(size)
    pad: Any = torch.zeros(batch, keys, dtype=torch.bool) if padded else None
    if pad is not None:
        pad[0, -2:] = True
        pad = pad if batched else pad[0]
        pad = pad if made is None or made.dtype == torch.bool else (pad.float() * -3.0).requires_grad_()
    tensors = {"query": query, "key": key, "value": value, "attn_mask": made}
    for tensor in tensors.values():
        if tensor is not None and tensor.is_floating_point():
            tensor.requires_grad_()
    return {**tensors, "key_padding_mask": pad}


def _outcome(module: nn.MultiheadAttention, arguments: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Output, weights and gradients."""
    module.zero_grad()
    torch.manual_seed(3)
    output, weights = module(**arguments, **options)
    taken = [t for t in arguments.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    if torch.is_grad_enabled():
        loss = output.square().mean() + (weights.square().sum() if weights is not None else 0.0)
        for tensor in taken:
            tensor.grad = None
        loss.backward()
    names = [name for name, t in arguments.items() if isinstance(t, torch.Tensor) and t.requires_grad]
    gradients = {name: arguments[name].grad for name in names}
    gradients |= {name: p.grad for name, p in module.named_parameters()}
    return {"output": output.detach(), "weights": None if weights is None else weights.detach(), **gradients}


def _difference(found: Any, expected: Any) -> float:
    if found is None or expected is None:
        return 0.0 if found is expected else 1.0
    if found.shape != expected.shape:
        return 2.0
    return float((found - expected).abs().max() / max(float(expected.abs().max()), 1e-3))


def calls(constructed: str) -> dict[str, float]:
    """All ways of calling one attention: the largest relative difference between split and whole of outputs, weights and
    gradients of inputs, masks and parameters, for each way."""
    own = group()
    torch.manual_seed(0)
    whole = nn.MultiheadAttention(WIDTH, HEADS, **CONSTRUCTED[constructed])
    split = nn.MultiheadAttention(WIDTH, HEADS, **CONSTRUCTED[constructed])
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.normal_(std=0.3)
    split.load_state_dict(whole.state_dict())
    example = _arguments(whole, "self" if whole.kdim == WIDTH else "cross", None, False)
    layout = detect(split, lambda m: m(**example), own.size)
    assert set(layout.splits) == {"", "out_proj"}, layout.notes
    places = apply_layout(split, layout, own)
    assert set(places) == {n for n, _ in whole.named_parameters() if n != "out_proj.bias"}
    inputs = ("self", "memory", "cross", "unbatched") if whole.kdim == WIDTH else ("cross", "unbatched")
    options = [{"need_weights": False}, {"average_attn_weights": True}, {"average_attn_weights": False}]
    found: dict[str, float] = {}
    for kind, mask, padded, option, training in product(inputs, MASKS, (False, True), options, (True, False)):
        torch.manual_seed(1)
        arguments = _arguments(whole, kind, mask, padded)
        given = {**option, **({"is_causal": True} if mask == "float" and not padded else {})}
        with torch.set_grad_enabled(training):
            expected = _outcome(whole.train(training), arguments, given)
            result = _outcome(split.train(training), arguments, given)
        for name, place in places.items():
            if training and expected[name] is not None:
                expected[name] = part_of(expected[name], place, own.rank)
        ways = f"{kind}, {mask}, {padded}, {given}, {training}"
        names = expected if training else ("output", "weights")
        found |= {f"{name}: {ways}": _difference(result[name], expected[name]) for name in names}
    dist.destroy_process_group()
    return {way: difference for way, difference in found.items() if difference > 1e-5}


def train(
    strategy: str, run_dir: str, *, model: str, settings: dict[str, Any] | None = None, save_at_once: bool = False
) -> dict[str, Any]:
    """Train a model of :mod:`.attention_models`; the log, digests of its state and of the last checkpoint.

    Args:
        save_at_once: Write what was resumed from, and end.
    """
    import distkit
    from tests.contract.cases import checkpoint_digest, digests, read_log

    base = {"strategy": strategy, "run_dir": run_dir, "batch.per": "global", "log.every_steps": 1, "log.to": ["jsonl"]}
    trainer = distkit.Trainer({**base, **(settings or {})})
    net: Any = MODELS[model]()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
    data = torch.randint(0, 60, (24, 9), generator=torch.Generator().manual_seed(2))
    loader: Any = DataLoader(data, batch_size=8)  # type: ignore[arg-type]
    net, optimizer, loader = trainer.prepare(net, optimizer, loader)
    if save_at_once:
        trainer.save()
        trainer.strategy.close()
        return {"shards": checkpoint_digest(run_dir)}
    for _ in trainer.epochs(2):
        for batch in loader:
            logits = net(batch)
            trainer.step(F.cross_entropy(logits.flatten(0, 1), batch[:, : logits.shape[1]].flatten()))
    evaluation = trainer.evaluate(
        net,
        DataLoader(data[:8], batch_size=4),  # type: ignore[arg-type]
        loss_fn=lambda m, b: m(b).logsumexp(-1).mean(),
    )
    state = digests(trainer.model_state_dict(net))
    trainer.close()
    log = [[line["loss"], line["grad_norm"]] for line in read_log(run_dir)]
    return {"log": log, "model": state, "evaluation": evaluation, "shards": checkpoint_digest(run_dir)}
