"""What the settings and the model's own plan want, and `distkit plan --layout`, which shows what comes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from distkit.config import load_config
from distkit.config.checks import check_tensor_groups
from distkit.errors import ConfigError
from distkit.strategies.tensor_parallel.detect import detect
from distkit.strategies.tensor_parallel.layout import Layout
from distkit.strategies.tensor_parallel.report import describe, families
from distkit.strategies.tensor_parallel.wishes import plan_of, wishes_of
from tests.pool import ROOT
from tests.strategies.tensor_parallel.models import model_and_run


def layout_of(name: str, patterns: dict[str, str], size: int = 2) -> Layout:
    build, run = model_and_run(name)
    model = build()
    return detect(model, run, size, wishes_of(model, patterns), plan_of(model))


def test_the_first_pattern_that_fits_decides_and_the_rest_is_found() -> None:
    layout = layout_of("small-gpt", {"h.0.c_fc": "column", "h.0.c_out": "row", "h.0": "replicate"})
    assert {name for name in layout.splits if name.startswith("h.0.")} == {"h.0.c_fc", "h.0.c_out"}
    assert layout.style_of("h.1.c_attn") == layout.style_of("lm_head") == "column"


def test_only_what_is_named_is_split() -> None:
    layout = layout_of("small-gpt", {"*.c_attn": "column", "*.c_proj": "row", "*": "replicate"})
    assert {name.split(".")[-1] for name in layout.splits} == {"c_attn", "c_proj"}
    assert {split.source for split in layout.splits.values()} == {"settings"}
    assert layout.notes["lm_head"] == layout.notes["wte"] == "the settings say so"


def test_a_name_stands_for_all_inside_of_it() -> None:
    assert not any(name.startswith("h.0.") for name in layout_of("small-gpt", {"h.0": "replicate"}).splits)


@pytest.mark.parametrize(
    ("patterns", "size", "message"),
    [
        ({"h.0.c_proj": "row"}, 8, r"row for h\.0\.c_proj, .* over 8 ranks: .* heads that 8 doesn't divide"),
        (
            {"h.0.c_proj": "row", "h.0.c_attn": "replicate"},
            2,
            r"row for h\.0\.c_proj, .*says replicate for h\.0\.c_attn",
        ),
        ({"h.0.c_attn": "row"}, 2, r"row for h\.0\.c_attn, .*each part of its input depends on all of"),
        ({"h.1.c_out": "column"}, 2, r"column for h\.1\.c_out, .*no layer that is split by row takes what it gives"),
        ({"lm_head": "vocabulary"}, 2, r"vocabulary for lm_head, .*"),
        ({"wte": "vocabulary"}, 3, r"vocabulary for wte, .*its vocabulary of 64 doesn't divide by 3"),
        ({"ln_f": "row"}, 2, r"ln_f was set to row, but ln_f is a LayerNorm; linear layers, embeddings and"),
        ({"nothing.*": "row"}, 2, r"no module of SmallGPT has such a name"),
    ],
)
def test_wrong_layouts_are_refused_with_the_name_of_the_module(
    patterns: dict[str, str], size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        layout_of("small-gpt", patterns, size)
    assert caught.value.hint is not None
    assert "parallel.tensor_layout" in caught.value.hint


def test_a_model_s_own_plan_is_followed_where_it_fits() -> None:
    build, _ = model_and_run("llama")
    model = build()
    plan = plan_of(model)
    assert plan["model.layers.0.self_attn.q_proj"] == "column"
    assert plan["model.layers.1.mlp.down_proj"] == "row"
    layout = layout_of("llama", {})
    assert {name: layout.style_of(name) for name in plan} == plan
    assert {layout.splits[name].source for name in plan} == {"plan"}
    assert any(family.why.endswith("by the model's own plan") for family in families(model, layout))
    build, run = model_and_run("gpt2")
    assert plan_of(build()) == {}


def test_a_plan_that_is_wrong_is_not_followed() -> None:
    build, run = model_and_run("small-gpt")
    model = build()
    free = detect(model, run, 2)
    wrong = detect(model, run, 2, plan={"h.0.c_attn": "row", "h.0.c_proj": "column"})
    assert wrong.splits.keys() == free.splits.keys()
    assert {split.source for split in wrong.splits.values()} == {"found"}


class Classifier(nn.Module):
    """A head over classes, no vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.a(x)))
        return out


def test_a_head_without_vocabulary_is_split_where_the_settings_want_it() -> None:
    model = Classifier()
    run = lambda m: m(torch.rand(4, 8, generator=torch.Generator().manual_seed(0)))  # noqa: E731
    assert detect(model, run, 2).splits == {}
    layout = detect(model, run, 2, {"head": "column"})
    assert layout.splits["head"].leaves
    assert layout.splits.keys() == {"head"}


def test_the_report_has_every_layer_and_the_shares() -> None:
    build, _ = model_and_run("small-gpt")
    first, *rest = describe(build(), layout_of("small-gpt", {"h.*.c_fc": "replicate"}))
    assert first.startswith("tensor parallel 2: 6 layers of SmallGPT are split, ")
    share = (6336 + 2112 + 2048) / sum(p.numel() for p in build().parameters())
    assert f"{share:.0%} of its parameters" in first
    text = "\n".join(rest)
    assert "  column: h.*.c_attn (2), lm_head" in text
    assert "  row: h.*.c_proj (2)" in text
    assert "  vocabulary: wte" in text
    assert "  whole: h.*.c_fc (2): the settings say so" in text


SCRIPT = """
import sys, torch, distkit
from torch import nn
from torch.utils.data import DataLoader
trainer = distkit.Trainer()
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, int(sys.argv[1])))
if sys.argv[-1] == "never":
    sys.exit(0)
model, optimizer, loader = trainer.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.rand(4, 8)))
raise SystemExit("training was started")
"""


def plan(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-c", "from distkit.cli import main; main()", "plan", *arguments]
    return subprocess.run(
        [x.replace("SCRIPT", str(script)) for x in command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def test_plan_shows_the_layout_and_starts_nothing(tmp_path: Path) -> None:
    done = plan(tmp_path, "--layout", "--set", "parallel.tensor=2", "SCRIPT", "5")
    assert done.returncode == 0, done.stderr
    assert "tensor parallel 2: 2 layers of Sequential are split" in done.stdout
    assert "feeds 2" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py"]
    done = plan(tmp_path, "--layout", "--json", "-s", "zero2", "--set", "parallel.tensor=2", "SCRIPT", "5")
    assert json.loads(done.stdout)["splits"]["2"]["style"] == "row"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layout", "SCRIPT", "5"), "parallel.tensor is 1: no layer would be split\nHint: --set parallel.tensor=2"),
        (("SCRIPT", "5"), "where it is to run was not said"),
        (("--layout", "--set", "parallel.tensor=2", "none.py"), "none.py is no file"),
        (("--layout", "--set", "parallel.tensr=2", "SCRIPT", "5"), "unknown key 'parallel.tensr'"),
        (("--layout", "--set", "parallel.tensor=2", "-s", "dp", "SCRIPT", "5"), "strategy 'dp' splits no layers"),
        (
            (
                "--layout",
                "--set",
                "parallel.tensor=2",
                "--set",
                'parallel.tensor_layout={"2": column, "0": row}',
                "SCRIPT",
                "4",
            ),
            "parallel.tensor_layout says row for 0, but it can't be split so over 2 ranks: no layer feeds it",
        ),
        (("--layout", "--set", "parallel.tensor=2", "SCRIPT", "5", "never"), "ended without preparing a model"),
    ],
)
def test_plan_says_what_is_wrong(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = plan(tmp_path, *arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_groups_over_several_nodes_are_refused_unless_they_are_wanted() -> None:
    config = load_config(overrides=["parallel.tensor=4", "strategy=ddp"]).config
    check_tensor_groups(config, nodes=2, each=4)
    check_tensor_groups(config, nodes=1, each=2)
    with pytest.raises(ConfigError, match="each of the 2 nodes has 6 processes") as caught:
        check_tensor_groups(config, nodes=2, each=6)
    assert "--set parallel.tensor=3" in str(caught.value.hint)
    config.parallel.allow_tensor_across_nodes = True
    check_tensor_groups(config, nodes=2, each=6)
