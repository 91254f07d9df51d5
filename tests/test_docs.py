"""The documentation says what the package does: settings, commands, code and made parts."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

from distkit.config.load import flatten, parse_override
from distkit.config.schema import keys
from tests.pool import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "recipes").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """(page, text) of all fenced blocks in a language."""
    for page in PAGES:
        for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
            if found[1] == language:
                yield str(page.relative_to(ROOT)), found[2]


def commands(program: str) -> Iterator[tuple[str, list[str]]]:
    """(page, words) of all lines in shell blocks that call a program."""
    for page, text in blocks("bash"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and "=" in words[0]:
                words.pop(0)
            if words and words[0] == program:
                yield page, words[1:]


def run_python(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_blocks_are_python() -> None:
    found = list(blocks("python"))
    assert len(found) > 10
    for page, text in found:
        try:
            ast.parse(text)
        except SyntaxError as error:
            pytest.fail(f"{page}: {error}\n{text}")


def test_yaml_blocks_hold_known_settings() -> None:
    found = list(blocks("yaml"))
    assert len(found) > 8
    for page, text in found:
        flatten(yaml.safe_load(text), page)


def test_keys_in_the_text_exist() -> None:
    known = {key.name for key in keys()}
    sections = {name.split(".")[0] for name in known if "." in name}
    mention = re.compile(r"`(" + "|".join(sorted(sections)) + r")\.([a-z_]+)(?:: [^`]+)?`")
    count = 0
    for page in PAGES:
        for found in mention.finditer(page.read_text(encoding="utf-8")):
            name = f"{found[1]}.{found[2]}"
            assert name in known, f"{page}: {found[0]} is no key"
            count += 1
    assert count > 10


def test_launch_lines_use_known_options() -> None:
    from distkit.launch.command import app

    command = typer.main.get_command(app)
    found = list(commands("distkit-run"))
    assert len(found) > 20
    for page, words in found:
        context = command.make_context("distkit-run", list(words))
        for text in context.params["overrides"] or ():
            parse_override(text)
        script = context.params["script"]
        if script.startswith("recipes/"):
            assert (ROOT / script).is_file(), f"{page}: {script}"
        config = context.params["config"]
        if config is not None and config.startswith("recipes/"):
            assert (ROOT / config).is_file(), f"{page}: {config}"


def test_the_strategy_table_of_the_readme_is_current() -> None:
    run_python(ROOT, "scripts/strategy-table", "--check")


def test_the_migration_diff_works(tmp_path: Path) -> None:
    """Both sides of the README's diff run, and the new one on two processes too."""
    ((_, diff),) = list(blocks("diff"))
    (tmp_path / "data.py").write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "torch.manual_seed(0)\n"
        "dataset = TensorDataset(torch.randn(128, 6), torch.randint(3, (128,)))\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self): super().__init__(6, 3)\n"
    )
    for name, left_out in (("before.py", "+"), ("after.py", "-")):
        lines = [line[1:] for line in diff.splitlines() if not line.startswith(left_out)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    run_python(tmp_path, "before.py")
    assert (tmp_path / "model.pt").is_file()
    launches = (
        ["after.py"],
        ["-m", "distkit.launch.command", "-s", "ddp", "--nproc", "2", "--run-dir", "two", "after.py"],
    )
    for arguments in launches:
        run_python(tmp_path, *arguments)
        assert (tmp_path / "model.safetensors").is_file()
        (tmp_path / "model.safetensors").unlink()


def test_every_made_part_is_known() -> None:
    hooks = ast.parse((ROOT / "scripts" / "docs_hooks.py").read_text(encoding="utf-8"))
    tables = [
        node
        for node in ast.walk(hooks)
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "PARTS"
    ]
    known = {
        key.value
        for node in tables
        if isinstance(node.value, ast.Dict)
        for key in node.value.keys
        if isinstance(key, ast.Constant)
    }
    used = {name for page in PAGES for name in re.findall(r"<!-- made: ([a-z-]+)", page.read_text(encoding="utf-8"))}
    assert used == known


def test_scripts_have_help() -> None:
    for name in ("setup", "demo", "test", "compare-losses", "strategy-table"):
        done = subprocess.run(
            [ROOT / "scripts" / name, "--help"], capture_output=True, text=True, timeout=30, check=True
        )
        assert "sage:" in done.stdout, name


SETTING = """
import distkit, torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
x, y, mask = torch.randn(24, 6), torch.randint(3, (24,)), torch.rand(24, 5) > 0.3
Net = lambda: nn.Linear(6, 3)
Generator, Discriminator = lambda: nn.Linear(64, 6), lambda: nn.Linear(6, 1)
bce = F.binary_cross_entropy_with_logits
ones, zeros = torch.ones(8, 1), torch.zeros(8, 1)
tokens = lambda: TensorDataset(torch.randint(7, (24, 5)), torch.randint(7, (24, 5)), mask)
accuracy = lambda model, batch: (model(batch[0]).argmax(dim=1) == batch[1]).float().mean()
loss_fn = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader, val_loader = DataLoader(TensorDataset(x, y), 8), DataLoader(TensorDataset(x, y), 5)
epochs = 2
"""
PREPARED = """
trainer = distkit.Trainer()
model, optimizer, loader, val_loader = trainer.prepare(model, optimizer, loader, val_loader)
"""
RUNNABLE = {
    "docs/index.md": {0: ""},
    "docs/tutorial/from-one-gpu-to-many.md": {2: ""},
    "docs/how-to/several-optimizers.md": {0: "loader = DataLoader(x, 8)"},
    "docs/how-to/callbacks.md": {0: "", 1: ""},
    "docs/how-to/batches.md": {
        0: PREPARED,
        2: """
model = nn.Embedding(7, 7)
trainer = distkit.Trainer()
model, optimizer, loader = trainer.prepare(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(tokens(), 8))
""",
    },
    "docs/how-to/data-and-evaluation.md": {
        0: "trainer = distkit.Trainer()",
        1: PREPARED,
        2: PREPARED + "tokenise = len",
        3: PREPARED,
        4: PREPARED + "f1_score = lambda a, b, average: len(a)",
    },
    "docs/how-to/learning-rates.md": {0: "trainer = distkit.Trainer()"},
    "docs/how-to/checkpoints.md": {0: PREPARED, 1: PREPARED + "trainer.export('model.safetensors')"},
}
"""Blocks by page and number that run as they stand, and what stands before them."""


def test_blocks_run(tmp_path: Path) -> None:
    """Each in a namespace of its own, all in one process."""
    programs = []
    for page, numbers in RUNNABLE.items():
        texts = [text for found, text in blocks("python") if found == page]
        programs += [
            (f"{page} block {number}", SETTING + before + "\n" + texts[number]) for number, before in numbers.items()
        ]
    (tmp_path / "programs.json").write_text(json.dumps(programs))
    output = run_python(
        tmp_path,
        "-c",
        "import json\n"
        "for name, text in json.load(open('programs.json')):\n"
        "    print('running', name, flush=True)\n"
        "    exec(compile(text, name, 'exec'), {'__name__': '__main__'})\n",
    )
    assert output.count("running") == len(programs)
