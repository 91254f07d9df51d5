"""What runs inside of worker processes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

import distkit
from distkit.strategies.tensor_parallel.megatron import import_megatron
from tests.contract.cases import checkpoint_digest, read_log
from tests.strategies.tensor_parallel.models import model_and_run

VOCABULARY, LENGTH = 64, 12


def _trainer(strategy: str, run_dir: str, settings: dict[str, Any]) -> distkit.Trainer:
    base = {"strategy": strategy, "run_dir": run_dir, "batch.per": "global", "log.every_steps": 1, "log.to": ["jsonl"]}
    return distkit.Trainer({**base, **settings})


def _loader() -> Any:
    data = torch.randint(0, VOCABULARY, (32, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return DataLoader(data, batch_size=8, shuffle=True)  # type: ignore[arg-type]


def gpt_model(size: int, **settings: Any) -> Any:
    """megatron-core's GPTModel of local layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    rope, tied = settings.pop("rope", False), settings.pop("tied", True)
    size, then = settings.pop("built_for", size), settings.pop("then", {})
    base = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    off = ("bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion", "gradient_accumulation_fusion")
    config = TransformerConfig(
        **{**base, "hidden_dropout": 0.0, "attention_dropout": 0.0, **dict.fromkeys(off, False), **settings},
        tensor_model_parallel_size=size,
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope" if rope else "learned_absolute",
        share_embeddings_and_output_weights=tied,
    )
    vars(config).update(then)
    return model


def gpt_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Next token, from a batch [samples, LENGTH + 1]."""
    positions = torch.arange(LENGTH).expand(len(batch), LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    losses: torch.Tensor = model(batch[:, :-1].contiguous(), positions, mask, labels=batch[:, 1:].contiguous())
    return losses.mean()


def train_gpt(
    strategy: str,
    run_dir: str,
    *,
    settings: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    resave: bool = False,
) -> dict[str, Any]:
    """Twenty steps of a GPTModel; the log, and digests of the whole checkpoint.

    Args:
        model: For :func:`gpt_model`.
        resave: Write the checkpoint again as soon as it is loaded, and train no further.
    """
    import_megatron()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers

    trainer = _trainer(strategy, run_dir, settings or {})
    net = gpt_model(trainer.world.tensor.size, **(model or {}))
    trained: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, trained, loader = trainer.prepare(net, trained, _loader())
    if resave:
        trainer.save()
        trainer.strategy.close()
        return {"shards": checkpoint_digest(run_dir)}
    for _ in trainer.epochs(5):
        for batch in loader:
            trainer.step(gpt_loss(net, batch))
    state = trainer.model_state_dict(net)
    trainer.close()
    return {
        "log": read_log(run_dir),
        "shards": checkpoint_digest(run_dir),
        "shapes": {name: list(tensor.shape) for name, tensor in state.items()},
        "left": bool(parallel_state.model_parallel_is_initialized() or layers.torch is not torch),
    }


def train_llama(strategy: str, run_dir: str, *, settings: dict[str, Any], resave: bool = False) -> dict[str, Any]:
    """Twenty steps of transformers' Llama as it is; the log, digests, and how megatron-core's layers were called.

    Args:
        resave: As in :func:`train_gpt`.
    """
    import_megatron()
    from megatron.core.tensor_parallel import layers

    calls: list[list[Any]] = []
    lookups: list[int] = []
    compute, look_up = layers.linear_with_grad_accumulation_and_async_allreduce, layers.VocabParallelEmbedding.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append([list(kwargs["weight"].shape), kwargs["allreduce_dgrad"]])
        return compute(*args, **kwargs)

    def noted_with_weight(input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        return noted(*args, input=input, weight=weight, **kwargs)

    def noted_lookup(layer: Any, tokens: Any) -> Any:
        lookups.append(len(layer.weight))
        return look_up(layer, tokens)

    layers.VocabParallelEmbedding.forward = noted_lookup
    layers.linear_with_grad_accumulation_and_async_allreduce = noted_with_weight
    noted_with_weight.warned = True  # type: ignore[attr-defined]  # an attribute of the function that it reads
    try:
        trainer = _trainer(strategy, run_dir, settings)
        net: Any = model_and_run("llama")[0]()
        trained: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
        net, trained, loader = trainer.prepare(net, trained, _loader())
        if resave:
            trainer.save()
            trainer.strategy.close()
            return {"shards": checkpoint_digest(run_dir)}
        for _ in trainer.epochs(5):
            for batch in loader:
                trainer.step(net(input_ids=batch, labels=batch).loss)
        trainer.close()
    finally:
        layers.linear_with_grad_accumulation_and_async_allreduce = compute
        layers.VocabParallelEmbedding.forward = look_up
    return {"log": read_log(run_dir), "shards": checkpoint_digest(run_dir), "calls": calls, "lookups": lookups}


def masks(run_dir: str) -> dict[str, Any]:
    """What dropout leaves of a whole activation and of a split one, and the hidden state behind it all; as digests."""
    from tests.contract.cases import digests

    trainer = _trainer("megatron-zero2", run_dir, {"parallel.tensor": 2, "checkpoint.at_end": False})
    net = gpt_model(2, hidden_dropout=0.2, attention_dropout=0.2)
    trained: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
    seen: dict[str, torch.Tensor] = {}
    layer = net.decoder.layers[0]
    named = {"whole": net.embedding.embedding_dropout, "split": layer.self_attention.core_attention.attention_dropout}
    for name, module in named.items():
        module.register_forward_hook(lambda m, args, out, name=name: seen.update({name: (out == 0) & (args[0] != 0)}))
    layer.register_forward_hook(lambda m, args, out: seen.update(hidden=out[0].detach()))
    net, trained, loader = trainer.prepare(net, trained, _loader())
    batch = next(iter(loader))[:1] * 0 + 1  # the same tokens everywhere
    trainer.step(gpt_loss(net, batch))
    dropped = {name: float(seen[name].float().mean()) for name in named}
    trainer.close()
    return {"digests": digests({name: tensor.float() for name, tensor in seen.items()}), "dropped": dropped}


def groups() -> dict[str, Any]:
    """This rank's groups as megatron-core has them, beside the world's; and the default generator before and after."""
    import_megatron()
    from megatron.core import parallel_state

    from distkit.config import load_config
    from distkit.strategies.registry import make_strategy
    from distkit.world import detect_environment

    torch.manual_seed(5)
    before = torch.get_rng_state()
    config = load_config(arguments={"strategy": "megatron-zero1", "parallel": {"tensor": 2}}).config
    strategy = make_strategy(config)
    world = strategy.connect(detect_environment())
    ranks = torch.distributed.get_process_group_ranks
    found = {
        "tensor": ranks(parallel_state.get_tensor_model_parallel_group()),
        "data": ranks(parallel_state.get_data_parallel_group()),
        "places": [parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank()],
        "world": [world.tensor.rank, world.data.rank],
        "generator": torch.equal(torch.get_rng_state(), before),
    }
    strategy.close()
    return found


def own_groups(run_dir: str, size: int) -> str:
    """The script has made megatron-core's groups before the Trainer."""
    import_megatron()
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(size)
    try:
        trainer = _trainer("megatron-zero1", run_dir, {"parallel.tensor": 2, "checkpoint.at_end": False})
        trainer.close()
        return str(parallel_state.get_tensor_model_parallel_world_size())
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def tensor_size(strategy: str, run_dir: str, settings: dict[str, Any]) -> list[int]:
    """Ranks that share a layer, and data-parallel ones."""
    trainer = _trainer(strategy, run_dir, {"checkpoint.at_end": False, **settings})
    sizes = [trainer.config.parallel.tensor, trainer.world.tensor.size, trainer.world.data.size]
    trainer.close()
    return sizes


def prepare_marked(run_dir: str, settings: dict[str, Any]) -> str:
    """A model whose layers say that they are parts is given to zero2."""
    trainer = _trainer("zero2", run_dir, {"checkpoint.at_end": False, **settings})
    net = torch.nn.Linear(4, 4)
    net.weight.tensor_model_parallel = True  # type: ignore[assignment]
    trainer.prepare(net, torch.optim.AdamW(net.parameters()), _loader())
    return "no error"
