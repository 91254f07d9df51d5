"""Which modules become units of fully_shard, and models that are built without memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from distkit.errors import ConfigError, UsageError
from distkit.strategies.fsdp_meta import DeferredInit, View
from distkit.strategies.fsdp_settings import FsdpSettings
from distkit.strategies.fsdp_units import choose_units
from tests.contract.models import Block, TinyGPT


def names(model: nn.Module, **settings: object) -> list[str]:
    return [name for name, _ in choose_units(model, FsdpSettings.parse(settings))]


def test_repeated_blocks_are_the_default() -> None:
    assert names(TinyGPT()) == ["blocks.0", "blocks.1"]
    assert names(nn.Linear(3, 3)) == []


def test_classes_by_name() -> None:
    assert names(TinyGPT(), wrap=["Block", "LayerNorm"])[:3] == ["blocks.0", "blocks.0.ln_1", "blocks.0.ln_2"]
    with pytest.raises(ConfigError, match=r"wrap=\[Block\]"):
        names(TinyGPT(), wrap=["Blok"])
    with pytest.raises(ConfigError, match="never called itself"):
        names(TinyGPT(), wrap=["ModuleList"])


def test_by_size() -> None:
    """Bottom up; what is smaller stays with the module around it."""
    assert names(TinyGPT(tied=False), min_params=1000) == [
        "blocks.0",
        "blocks.0.up",
        "blocks.0.down",
        "blocks.1",
        "blocks.1.up",
        "blocks.1.down",
    ]
    assert names(nn.Sequential(nn.Sequential(nn.MultiheadAttention(8, 2)), nn.ReLU()), min_params=100) == ["0.0"]


def test_shared_weights_belong_to_one_unit() -> None:
    """Between a block and the outside, between blocks, and a block that has two names (which is no conflict)."""
    tied = TinyGPT()
    tied.blocks[1].c_proj.weight = tied.wpe.weight
    assert names(tied) == ["blocks.0"]
    crossed = TinyGPT()
    crossed.blocks[1].c_proj.weight = crossed.blocks[0].c_proj.weight
    assert names(crossed) == []
    alias = TinyGPT()
    alias.first = alias.blocks[0]
    assert names(alias) == ["blocks.0", "blocks.1"]
    assert names(TinyGPT(tied=True), wrap=["Embedding", "Block"]) == ["wpe", "blocks.0", "blocks.1"]


class Varied(nn.Module):
    """Initialised in all the ways there are."""

    def __init__(self) -> None:
        super().__init__()
        self.padded = nn.Embedding(7, 6, padding_idx=2)
        self.turned, self.cut = nn.Linear(6, 6), nn.Linear(6, 6)
        nn.init.orthogonal_(self.turned.weight)
        nn.init.trunc_normal_(self.cut.weight, std=0.02)
        self.made = nn.Parameter(torch.randn(3, 4) * 0.1 + 1)
        self.copied = nn.Parameter(self.turned.weight.detach()[:2].clone() * 2)
        self.number = nn.Parameter(torch.tensor(2.5))
        self.register_buffer("angles", 1.0 / (100 ** (torch.arange(0, 8, 2).float() / 8)))
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)).view(1, 1, 5, 5), persistent=False)
        with torch.no_grad():
            self.cut.weight[1:3].mul_(3)
            self.padded.weight[0] = 7.0
            self.cut.bias.copy_(torch.tensor([1.0, 2, 3, 4, 5, 6]))
        self.recurrent, self.attention = nn.LSTM(3, 4), nn.MultiheadAttention(6, 2)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.padded.weight
        torch.manual_seed(9)
        self.reseeded = nn.Linear(2, 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.apply(self._late)

    def _late(self, module: nn.Module) -> None:
        if isinstance(module, nn.LSTM):
            for parameter in module.parameters():
                parameter.data.uniform_(-0.3, 0.3)


def values(models: list[nn.Module], deferred: DeferredInit) -> list[dict[str, torch.Tensor]]:
    """What a replay gives, by name."""
    found: list[dict[str, torch.Tensor]] = [{} for _ in models]
    wanted: dict[int, list[tuple[int, str, View]]] = {}
    for number, model in enumerate(models):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_meta:
                view = View.of(tensor)
                wanted.setdefault(view.storage, []).append((number, name, view))
            else:
                found[number][name] = tensor

    def keep(places: list[tuple[int, str, View]]) -> Callable[[torch.UntypedStorage], None]:
        def fill(storage: torch.UntypedStorage) -> None:
            for number, name, view in places:
                found[number][name] = view.on(storage).clone()

        return fill

    deferred.replay({key: keep(places) for key, places in wanted.items()}, lambda state: state)
    return found


def test_replayed_construction_gives_the_same_bits() -> None:
    torch.manual_seed(3)
    expected = Varied()
    torch.manual_seed(3)
    deferred = DeferredInit()
    with deferred.recording():
        model = Varied()
    assert all(p.is_meta for n, p in model.named_parameters() if n != "number")
    assert model.head.weight is model.padded.weight
    before = torch.get_rng_state()
    (found,) = values([model], deferred)
    assert torch.equal(torch.get_rng_state(), before)
    for name, tensor in [*expected.named_parameters(), *expected.named_buffers()]:
        assert torch.equal(found[name], tensor), name


def test_constructions_one_after_the_other_draw_on() -> None:
    """Two models under init_model(), in one block or two, are the two that an ordinary script would build."""
    torch.manual_seed(3)
    expected = [nn.Linear(4, 4), nn.Linear(4, 4)]
    torch.manual_seed(3)
    deferred = DeferredInit()
    models: list[nn.Module] = []
    for _ in range(2):
        with deferred.recording():
            models.append(nn.Linear(4, 4))
    both = values(models, deferred)
    (second,) = values(models[1:], deferred)
    for plain, found in zip(expected, both, strict=True):
        assert torch.equal(found["weight"], plain.weight)
    assert torch.equal(second["weight"], expected[1].weight)


def test_one_tensor_at_a_time() -> None:
    """Each storage is freed when it is done; a model that is initialised twice over is never there as a whole."""
    deferred = DeferredInit()
    with deferred.recording():
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
        for layer in model:
            nn.init.normal_(layer.weight)
            layer.weight.data.mul_(2)
    alive: list[int] = []
    run = deferred._run

    def watch(note: object, real: dict[int, torch.UntypedStorage]) -> None:
        run(note, real)  # type: ignore[arg-type]
        alive.append(sum(storage.nbytes() for storage in real.values()))

    deferred._run = watch  # type: ignore[method-assign]
    values([model], deferred)
    assert max(alive) <= 2 * 32 * 32 * 4


def test_constructors_that_need_values() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rates = [x.item() for x in torch.linspace(0, 1, 3)]

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("real", torch.tensor([1.0, 2.0]))
            self.real.copy_(torch.ones(2))

    for kind in (Looks, Writes):
        with pytest.raises(UsageError, match="outside of trainer.init_model"), DeferredInit().recording():
            kind()


def test_blocks_are_found_in_a_dressed_model() -> None:
    """Activation checkpointing changes classes, not their names."""
    from distkit.strategies.blocks import apply_activation_checkpointing

    model = TinyGPT()
    apply_activation_checkpointing(model, "full")
    assert names(model, wrap=["Block"]) == ["blocks.0", "blocks.1"]
    assert isinstance(model.blocks[0], Block)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_blocks_that_are_recomputed_are_still_units(mode: str) -> None:
    """Else the whole model would be gathered at once."""
    from distkit.strategies.blocks import apply_activation_checkpointing

    model = TinyGPT()
    before = names(model)
    assert len(before) > 1
    apply_activation_checkpointing(model, mode)
    assert names(model) == before
