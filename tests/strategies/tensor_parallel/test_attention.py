"""torch's own attention and transformer layers: what is found, and split models against whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distkit.errors import ConfigError, UsageError
from distkit.strategies.tensor_parallel.apply import apply_layout, placed_parameters
from distkit.strategies.tensor_parallel.detect import detect
from distkit.strategies.tensor_parallel.group import TensorGroup
from distkit.strategies.tensor_parallel.layout import Layout, Split
from distkit.strategies.tensor_parallel.report import describe, layout_from_json, layout_to_json
from distkit.strategies.tensor_parallel.wishes import wishes_of
from tests.pool import Pool
from tests.strategies.tensor_parallel.attention_cases import CONSTRUCTED
from tests.strategies.tensor_parallel.attention_models import MODELS, SmallViT, run
from tests.strategies.tensor_parallel.models import BLOCKS, SECOND_INPUTS

CASES = "tests.strategies.tensor_parallel.attention_cases:"
COLUMNS, ROWS = ("attn", "linear1", "mlp.1", "cross", "own", "single"), ("out_proj", "linear2", "mlp.3")


@pytest.mark.parametrize("name", MODELS)
def test_every_attention_and_mlp_is_found(name: str) -> None:
    model = MODELS[name]()
    named = [n for n, _ in model.named_modules()]
    expected = {n: "column" for n in named if n.endswith(COLUMNS)} | {n: "row" for n in named if n.endswith(ROWS)}
    if hasattr(model, "embed"):
        expected |= {n: "vocabulary" for n in ("embed", "keys", "values") if n in named} | {"head": "column"}
    layout = detect(model, run, 2)
    assert {n: split.style for n, split in layout.splits.items()} == expected
    assert layout_from_json(layout_to_json(layout)) == layout


def test_where_the_parts_of_parameters_lie() -> None:
    """q, k and v of a fused weight each for itself, and the features of biases by heads."""
    model = MODELS["everything"]()
    places = placed_parameters(model, detect(model, run, 4))
    for name in ("own.in_proj_weight", "single.in_proj_weight", "single.in_proj_bias", "cross.in_proj_bias"):
        assert (places[name].dim, places[name].runs[1]) == (0, ((8, 8), (40, 8), (72, 8)))
    for name in ("cross.q_proj_weight", "cross.k_proj_weight", "cross.v_proj_weight"):
        assert (places[name].dim, places[name].runs[3]) == (0, ((24, 8),))
    assert (places["cross.bias_k"].dim, places["cross.bias_v"].runs[0]) == (2, ((0, 8),))
    assert (places["cross.out_proj.weight"].dim, places["cross.out_proj.weight"].runs[1]) == (1, ((8, 8),))
    assert "cross.out_proj.bias" not in places


def test_heads_that_do_not_divide_stay_whole_and_are_named() -> None:
    model = MODELS["encoder"]()
    layout = detect(model, run, 8)
    assert {name.split(".")[-1] for name in layout.splits} == {"linear1", "linear2", "embed", "head"}
    whole = "encoder.layers.*.self_attn (2), encoder.layers.*.self_attn.out_proj (2): 8 doesn't divide the 4 heads"
    assert f"  whole: {whole}" in describe(model, layout)


class Around(nn.Module):
    """Takes the weights out of an attention and calls the function itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attn = nn.Embedding(64, 32), nn.MultiheadAttention(32, 4)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x, attn = self.embed(idx), self.attn
        weights = (attn.in_proj_weight, attn.in_proj_bias, None, None, False, 0.0, attn.out_proj.weight)
        return F.multi_head_attention_forward(x, x, x, 32, 4, *weights, attn.out_proj.bias)[0]


class Subclass(nn.MultiheadAttention):
    """Computes anything."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        return output + self.in_proj_weight.sum(), weights


def test_an_attention_that_is_not_torchs_own_or_not_called_stays_whole() -> None:
    around = detect(Around(), run, 2)
    assert not any(name.startswith("attn") for name in around.splits)
    assert around.notes["attn.out_proj"] == "nothing calls it on the example"
    model = SmallViT()
    model.blocks[0]["attn"] = Subclass(32, 4, batch_first=True)
    replaced = model.blocks[1]["attn"]
    replaced.forward = lambda *args, **kwargs: nn.MultiheadAttention.forward(replaced, *args, **kwargs)
    layout = detect(model, run, 2)
    assert {name.split(".", 2)[-1] for name in layout.splits} == {"mlp.1", "mlp.3"}
    assert not any(name.endswith("out_proj") for name in layout.notes)


def test_an_attention_that_differs_step_by_step_stays_whole() -> None:
    """torch doesn't call the layer inside of it, so a hook there does nothing."""
    model = SmallViT()
    model.blocks[0]["attn"].out_proj.register_forward_hook(lambda module, args, output: 2 * output)
    layout = detect(model, run, 2)
    assert "blocks.0.attn" not in layout.splits and "blocks.1.attn" in layout.splits
    assert layout.notes["blocks.0.attn.out_proj"] == "it gives something else step by step"


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3, 2, 8), {"is_causal": True}, "attn was called with is_causal=True and without attn_mask"),
        ((3, 2, 8), {"attn_mask": torch.zeros(2, 3)}, r"attn_mask of attn has the shape \(2, 3\)"),
        ((3, 2, 8), {"key_padding_mask": torch.zeros(3, 2)}, r"key_padding_mask of attn has the shape \(3, 2\)"),
        (None, {}, "attn is split by heads, and can't take nested tensors"),
    ],
)
def test_wrong_arguments_are_named(shape: Any, options: dict[str, Any], message: str) -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2)})
    apply_layout(model, Layout(2, {"attn": Split("column", (((0, 4),), ((4, 4),)), (8,))}), TensorGroup(0, 2, None))
    x = torch.rand(shape) if shape else torch.nested.nested_tensor([torch.rand(2, 8), torch.rand(3, 8)])
    with pytest.raises(UsageError, match=message):
        model["attn"](x, x, x, **options)


def test_the_settings_can_keep_it_whole_and_ask_for_it() -> None:
    model = MODELS["encoder"]()
    first = "encoder.layers.0.self_attn"
    layout = detect(model, run, 2, wishes_of(model, {first: "replicate"}))
    assert first not in layout.splits and f"{first}.out_proj" not in layout.splits
    assert "encoder.layers.1.self_attn" in layout.splits
    wishes = wishes_of(model, {first: "column"})
    assert wishes == {first: "column"}
    assert detect(model, run, 2, wishes).splits[first].source == "settings"
    layout = detect(model, run, 2, wishes_of(model, {f"{first}.out_proj": "row", first: "column", "*": "replicate"}))
    assert set(layout.splits) == {first, f"{first}.out_proj"}
    with pytest.raises(
        ConfigError, match=f"row for {first}.out_proj, but .* over 8 ranks: 8 doesn't divide the 4 heads"
    ):
        detect(model, run, 8, wishes_of(model, {f"{first}.out_proj": "row"}))


def test_work_inside_of_it_is_counted() -> None:
    """Projections of 4 x 8 tokens."""
    layout = detect(MODELS["everything"](), run, 2)
    assert layout.work["cross"] == 4 * 8 * (32 + 24 + 16) * 32
    assert layout.work["cross.out_proj"] == 4 * 8 * 32 * 32


def test_the_users_model_stays_as_it_was() -> None:
    model = MODELS["encoder"]()
    detect(model, run, 2)
    assert model.encoder.use_nested_tensor and model.encoder.layers[0].activation_relu_or_gelu
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("model", MODELS)
def test_twenty_steps_equal_the_whole_model(pool: Pool, model: str) -> None:
    """Losses within 1e-5 and each gradient within 1e-5 of the largest; masks of dropout are one process's."""
    for result in pool.run("tests.strategies.tensor_parallel.cases:against_whole", 2, model=model):
        assert result["loss"] <= 1e-5
        assert result["gradients"] and max(result["gradients"].values()) <= 1e-5
        if model in BLOCKS:
            weights = 2 if model == "small-vit" else 0  # nobody looks at them, but who calls it doesn't say so
            assert result["forward"]["all_reduce"] == BLOCKS[model] + result["lookups"] + weights
            assert result["backward"]["all_reduce"] == BLOCKS[model] + result["heads"] + SECOND_INPUTS.get(model, 0)


@pytest.mark.parametrize("model", MODELS)
def test_twenty_steps_with_shared_tokens_equal_the_whole_model(pool: Pool, model: str) -> None:
    """What reaches an attention may be some tokens on each rank, and so is what it gives; masks of dropout as before."""
    for result in pool.run("tests.strategies.tensor_parallel.cases:against_whole", 2, model=model, sequence=True):
        assert result["loss"] <= 1e-5
        assert result["gradients"] and max(result["gradients"].values()) <= 1e-5


@pytest.mark.parametrize("constructed", CONSTRUCTED)
def test_every_way_of_calling_it(pool: Pool, constructed: str) -> None:
    """Masks, padding, weights of heads, unbatched inputs, in training and evaluation: outputs, weights and gradients."""
    for differences in pool.run(CASES + "calls", 2, constructed=constructed):
        assert differences == {}


@pytest.mark.parametrize("kept", [None, "*.self_attn", "*.linear1"])
@pytest.mark.parametrize("model", ["encoder", "encoder-causal-padded", "transformer"])
def test_evaluation_does_not_take_torchs_fast_path(pool: Pool, model: str, kept: str | None) -> None:
    """It would read parts of weights as if they were whole; also where only some layers inside are split."""
    for difference in pool.run(CASES + "evaluated", 2, model=model, kept=kept):
        assert difference <= 1e-5


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_training_and_checkpoints_of_two_by_two(pool: Pool, tmp_path: Path, strategy: str) -> None:
    """Losses and norms are those of one process; from 2 x 2 to one process and back, the same bits."""
    for model in ("everything", "transformer"):
        path = tmp_path / model
        case, split = CASES + "train", {"parallel.tensor": 2}
        expected = pool.run(case, 1, strategy="single", run_dir=str(path / "s"), model=model)[0]
        found = pool.run(case, 4, strategy=strategy, run_dir=str(path / "t"), model=model, settings=split)[0]
        assert len(found["log"]) == 6
        for losses, wanted in zip(found["log"], expected["log"], strict=True):
            assert losses == pytest.approx(wanted, rel=1e-5)
        assert found["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-5)
        assert found["model"].keys() == expected["model"].keys()
        in_order = {name: found["shards"][f"model/{name}/parameter"] for name in found["model"]}
        assert in_order == found["model"]  # fused weights lie in the checkpoint as in the whole model

        source = {"checkpoint.resume": str(path / "t" / "checkpoints" / "step-00000006")}
        one = {"strategy": "single", "run_dir": str(path / "one"), "save_at_once": True, "settings": source}
        assert pool.run(case, 1, model=model, **one)[0]["shards"] == found["shards"]
        source = {"checkpoint.resume": str(path / "one" / "checkpoints" / "step-00000006")}
        back = {"strategy": strategy, "run_dir": str(path / "back"), "save_at_once": True, "settings": source | split}
        assert pool.run(case, 4, model=model, **back)[0]["shards"] == found["shards"]


def test_dropout_under_the_trainer_is_that_of_one_process(pool: Pool, tmp_path: Path) -> None:
    case, model = CASES + "train", "transformer-dropout"
    expected = pool.run(case, 1, strategy="single", run_dir=str(tmp_path / "s"), model=model)[0]
    split = {"strategy": "ddp", "settings": {"parallel.tensor": 2}}
    found = pool.run(case, 2, run_dir=str(tmp_path / "t"), model=model, **split)[0]
    for losses, wanted in zip(found["log"], expected["log"], strict=True):
        assert losses == pytest.approx(wanted, rel=1e-5)
