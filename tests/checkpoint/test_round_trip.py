"""What was saved is read back bit for bit, whole and in boxes, however it was cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from distkit.checkpoint import CheckpointReader
from distkit.errors import CheckpointError
from distkit.state import OptimizerLayout, Region, Shard
from tests.checkpoint.states import cut, layouts, manager, same, save, whole_state


def merged(tensors: Any, size: int, how: str) -> list[Shard]:
    """The shares of all ranks as one rank's: several regions of one tensor in one file."""
    return [shard for rank in range(size) for shard in cut(tensors, rank, size, how)]


@pytest.mark.parametrize("how", ["whole", "rows", "columns", "flat"])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_every_tensor_comes_back_whole(tmp_path: Path, how: str, size: int) -> None:
    state = whole_state()
    path = save(manager(tmp_path), state=state, shards=lambda: merged(state, size, how))
    reader = CheckpointReader(path)
    for (group, name, kind), tensor in state.items():
        assert same(reader.read(group, name, kind, Region.whole(tensor.shape)), tensor), (group, name, kind)


@pytest.mark.parametrize("how", ["whole", "rows", "flat"])
def test_any_box_is_put_together_from_whatever_was_written(tmp_path: Path, how: str) -> None:
    state = whole_state()
    reader = CheckpointReader(save(manager(tmp_path), state=state, shards=lambda: merged(state, 3, how)))
    for size, other in ((2, "rows"), (5, "columns"), (4, "flat"), (16, "rows")):
        for shard in merged(state, size, other):
            got = reader.read(shard.group, shard.name, shard.kind, shard.region)
            assert same(got, shard.tensor)


def test_what_is_read_is_the_callers_own(tmp_path: Path) -> None:
    """A view of the mapped file would change with it, or kill the process once it is gone."""
    state = whole_state()
    path = save(manager(tmp_path), state=state)
    got = CheckpointReader(path).read("model", "wte.weight", "parameter", Region.whole((11, 6)))
    file = path / "model-00000.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)
    assert same(got, state["model", "wte.weight", "parameter"])


def test_files_are_plain_safetensors_with_the_models_names(tmp_path: Path) -> None:
    state = whole_state()
    path = save(manager(tmp_path), state=state)
    model = safetensors.torch.load_file(path / "model-00000.safetensors")
    assert same(model["wte.weight"], state["model", "wte.weight", "parameter"])
    assert same(model["h.0.bias"], state["model", "h.0.bias", "parameter"])
    assert "wte.weight/exp_avg" in safetensors.torch.load_file(path / "optimizer-00000.safetensors")
    rows = save(manager(tmp_path), 200, state=state, shards=lambda: merged(state, 2, "rows"))
    assert "wte.weight@6,0" in safetensors.torch.load_file(rows / "model-00000.safetensors")


def test_strided_shared_and_conjugated_tensors(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        ("model", "a", "parameter"): base.T,
        ("model", "b", "parameter"): base[1:, ::2],
        ("model", "c", "parameter"): base.expand(2, 3, 4),
        ("model", "d", "buffer"): torch.complex(base, base).conj(),
        ("model", "e", "buffer"): torch.complex(base, base).conj().imag,
        ("model", "__metadata__", "buffer"): torch.ones(2),
        ("model", "f", "parameter"): torch.nn.Parameter(base),
    }
    reader = CheckpointReader(save(manager(tmp_path), state=state, layouts=[]))
    for (group, name, kind), tensor in state.items():
        assert same(reader.read(group, name, kind, Region.whole(tensor.shape)), tensor.detach().resolve_conj())


def test_trainer_state_and_layouts(tmp_path: Path) -> None:
    state = {**whole_state()}
    lbfgs = {"func_evals": 3, "old_dirs": [torch.ones(2), torch.zeros(2)], "prev_loss": float("inf"), "al": [None]}
    layout = layouts(state)[0]
    layout.groups[0]["lr"] = torch.tensor(0.25)
    layout.values["wte.weight"] = lbfgs
    trainer = {"step": 100, "schedulers": [{"milestones": {3: 1}}], "t": torch.arange(3), "best": float("nan")}
    path = save(manager(tmp_path), state=state, layouts=[layout, OptimizerLayout([], {}, {})], trainer_state=trainer)
    reader = CheckpointReader(path)
    first, second = reader.layouts()
    assert first.groups[0]["params"] == ["wte.weight", "scale"]
    assert first.groups[0]["betas"] == (0.9, 0.999)
    assert float(first.groups[0]["lr"]) == 0.25
    assert first.fields == layout.fields
    assert first.values["wte.weight"]["prev_loss"] == float("inf")
    assert torch.equal(first.values["wte.weight"]["old_dirs"][0], torch.ones(2))
    assert (second.groups, second.fields, second.values) == ([], {}, {})
    back = reader.trainer_state()
    assert back["schedulers"] == [{"milestones": {3: 1}}]
    assert torch.equal(back["t"], torch.arange(3))


def test_only_files_that_hold_something(tmp_path: Path) -> None:
    path = save(manager(tmp_path), shards=lambda: iter(()), layouts=[])
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "trainer.json"]
    assert CheckpointReader(path).rng(0) == {}


def test_the_manifest_is_json_that_people_can_read(tmp_path: Path) -> None:
    path = save(manager(tmp_path), epoch=2, metrics={"loss": 1.5, "odd": float("nan")}, strategy="ddp")
    data = json.loads((path / "manifest.json").read_text())
    assert (data["format"], data["schema"], data["step"], data["epoch"], data["strategy"]) == (
        "distkit-checkpoint", 1, 100, 2, "ddp",
    )  # fmt: skip
    assert set(data["files"]) == {p.name for p in path.iterdir()} - {"manifest.json"}
    assert data["metrics"]["loss"] == 1.5
    entry = data["tensors"]["model"]["wte.weight"]["parameter"]
    region = {"file": "model-00000.safetensors", "key": "wte.weight", "offset": [0, 0], "shape": [11, 6]}
    assert entry == {"dtype": "float32", "shape": [11, 6], "regions": [region]}
    assert CheckpointReader(path).metrics()["loss"] == 1.5


@pytest.mark.parametrize(
    ("shards", "what"),
    [
        ([("model", (4,), (0,), 3)], "1 of 4 elements are in no region"),
        ([("model", (4,), (0,), 3), ("model", (4,), (2,), 2)], "overlap"),
        ([("model", (4,), (2,), 3)], "lies outside"),
        ([("model", (4,), (0,), 4), ("model", (5,), (0,), 4)], "differ in dtype or shape"),
        ([("../model", (4,), (0,), 4)], "its group is not"),
        ([("optimizer", (4,), (0,), 4)], "is not in the optimizer's layout"),
    ],
)
def test_wrong_shards_are_refused_and_leave_nothing(tmp_path: Path, shards: list[Any], what: str) -> None:
    made = [Shard(g, "w", "parameter", shape, Region(offset, (n,)), torch.ones(n)) for g, shape, offset, n in shards]
    with pytest.raises(CheckpointError, match=what):
        save(manager(tmp_path / "c"), shards=lambda: made, layouts=[OptimizerLayout([], {}, {})])
    assert list((tmp_path / "c").iterdir()) == []


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.ones(2, device="meta")], ids=["sparse", "meta"])
def test_tensors_without_plain_values_are_refused_by_name(tmp_path: Path, tensor: torch.Tensor) -> None:
    shape = tuple(tensor.shape)
    shard = Shard("model", "odd.one", "parameter", shape, Region.whole(shape), tensor)
    with pytest.raises(CheckpointError, match=r"'odd\.one'"):
        save(manager(tmp_path), shards=lambda: [shard], layouts=[])


# -- names ------------------------------------------------------------------------------------------------------------

TIED = {
    ("model", "wte.weight", "parameter"): torch.arange(6.0).reshape(3, 2),
    ("model", "b", "parameter"): torch.ones(2),
}


def tied(tmp_path: Path) -> CheckpointReader:
    aliases = {"model": {"head.weight": "wte.weight"}}
    return CheckpointReader(save(manager(tmp_path), state=TIED, layouts=[], aliases=aliases))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module."])
def test_wrappers_prefixes_are_accepted_on_both_sides(tmp_path: Path, prefix: str) -> None:
    reader = tied(tmp_path / "plain")
    assert torch.equal(reader.read("model", prefix + "b", "parameter", Region.whole((2,))), torch.ones(2))
    path = tmp_path / "plain" / "step-00000100"
    # as another program might have written them: prefixes in the manifest itself
    text = (path / "manifest.json").read_bytes().replace(b'"b": {"parameter"', f'"{prefix}b": {{"parameter"'.encode())
    (path / "manifest.json").write_bytes(resealed(text))
    reader = CheckpointReader(path)
    reader.check_model("model", {"wte.weight": (3, 2), "b": (2,)})
    assert torch.equal(reader.read("model", "b", "parameter", Region.whole((2,))), torch.ones(2))
    assert reader.names("model") == ["wte.weight", ("module.b" if prefix.startswith("module.") else "b")]


def test_a_submodule_of_the_users_own_may_be_called_module(tmp_path: Path) -> None:
    state = {("model", "module.b", "parameter"): torch.ones(2), ("model", "b", "parameter"): torch.zeros(2)}
    reader = CheckpointReader(save(manager(tmp_path), state=state, layouts=[]))
    reader.check_model("model", {"module.b": (2,), "b": (2,)})
    assert torch.equal(reader.read("model", "module.b", "parameter", Region.whole((2,))), torch.ones(2))
    assert torch.equal(reader.read("model", "b", "parameter", Region.whole((2,))), torch.zeros(2))


def resealed(text: bytes) -> bytes:
    """With a checksum that fits what was changed."""
    import hashlib

    head, _, _ = text.rpartition(b',\n"checksum": "')
    return head + b',\n"checksum": "' + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n'


def test_tied_names_lead_to_the_same_values(tmp_path: Path) -> None:
    reader = tied(tmp_path)
    whole = Region.whole((3, 2))
    assert torch.equal(
        reader.read("model", "head.weight", "parameter", whole), TIED["model", "wte.weight", "parameter"]
    )
    reader.check_model("model", {"wte.weight": (3, 2), "b": (2,)}, {"head.weight": "wte.weight"})
    reader.check_model("model", {"head.weight": (3, 2), "b": (2,)}, {"wte.weight": "head.weight"})  # tied the other way
    reader.check_model("model", {"head.weight": (3, 2), "wte.weight": (3, 2), "b": (2,)})  # no longer tied


def test_a_file_may_have_the_tied_weight_under_its_other_name_only(tmp_path: Path) -> None:
    reader = CheckpointReader(save(manager(tmp_path), state=TIED, layouts=[]))
    reader.check_model("model", {"head.weight": (3, 2), "b": (2,)}, {"wte.weight": "head.weight"})
    got = reader.read("model", "head.weight", "parameter", Region.whole((3, 2)))
    assert torch.equal(got, TIED["model", "wte.weight", "parameter"])


def test_optimizers_find_tied_parameters_of_every_model(tmp_path: Path) -> None:
    state = {("optimizer", "wte.weight", "m"): torch.ones(2), ("optimizer", "model_1.wte.weight", "m"): torch.zeros(2)}
    aliases = {"model": {"head.weight": "wte.weight"}, "model_1": {"head.weight": "wte.weight"}}
    layout = OptimizerLayout([], {name: {"m": (2,)} for _, name, _ in state}, {})
    reader = CheckpointReader(save(manager(tmp_path), state=state, layouts=[layout], aliases=aliases))
    assert torch.equal(reader.read("optimizer", "head.weight", "m", Region.whole((2,))), torch.ones(2))
    assert torch.equal(reader.read("optimizer", "model_1.head.weight", "m", Region.whole((2,))), torch.zeros(2))


def test_a_model_that_does_not_fit_is_described(tmp_path: Path) -> None:
    """K12."""
    state = {("model", f"layer.{i}", "parameter"): torch.ones(2) for i in range(30)}
    reader = CheckpointReader(save(manager(tmp_path), state=state, layouts=[]))
    shapes = {f"layer.{i}": (2,) for i in range(15)}
    shapes |= {"layer.0": (3,), "new.weight": (1,)}
    with pytest.raises(CheckpointError) as caught:
        reader.check_model("model", shapes)
    text = str(caught.value)
    assert "missing in the checkpoint (1): new.weight" in text
    assert "unexpected in the checkpoint (15): layer.15" in text
    assert "and 5 more" in text
    assert "of another shape (1): layer.0 [2] in the checkpoint, [3] in the model" in text
    assert "Hint:" in text


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    reader = CheckpointReader(save(manager(tmp_path)))
    with pytest.raises(CheckpointError, match=r"no exp_avg_sq of 'wte\.weight' in 'optimizer'"):
        reader.read("optimizer", "wte.weight", "exp_avg_sq", Region.whole((11, 6)))
    with pytest.raises(CheckpointError, match="has shape"):
        reader.read("model", "wte.weight", "parameter", Region((5, 0), (11, 6)))
