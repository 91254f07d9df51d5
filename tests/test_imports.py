"""What importing costs, and which way imports point."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

HEAVY = ("torch", "numpy", "accelerate", "deepspeed", "horovod", "megatron", "tensorflow", "keras", "transformers")

LAYERS: list[set[str]] = [
    {"errors"},
    {"config", "masking"},
    {
        "window",
        "optim",
        "precision",
        "forward",
        "world",
        "state",
        "signals",
        "heartbeat",
        "requeue",
        "seeds",
        "callbacks",
        "commandline",
        "memory",
        "traffic",
    },
    {"strategies", "data", "checkpoint", "logs"},
    {"evaluation", "held", "measuring", "pace", "preparing", "progress", "resuming", "starting", "stepping", "trainer"},
    {"verify", "bench", "migrate", "doctor", "advise", "launch", "keras"},
    {"cli", "checkpoint_cli", "plan_cli", "launch.command"},
]
"""From the bottom to the top. A module imports from lower layers, and from its own."""

TOP = "distkit"


def layer(module: str) -> int:
    """The layer of a module, by the longest name that is listed."""
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        for index, names in enumerate(LAYERS):
            if name in names:
                return index
    raise AssertionError(f"{module} has no place yet: add it to LAYERS in {__file__}, and to docs/architecture.md")


class Imports(ast.NodeVisitor):
    """Modules of distkit that a file imports when it runs, also inside functions."""

    def __init__(self, package: list[str], modules: set[str]) -> None:
        self.package, self.modules = package, modules
        self.found: list[tuple[int, str]] = []

    def visit_If(self, node: ast.If) -> None:
        test = node.test
        name = test.id if isinstance(test, ast.Name) else test.attr if isinstance(test, ast.Attribute) else ""
        for child in node.orelse if name == "TYPE_CHECKING" else [test, *node.body, *node.orelse]:
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [(node.lineno, alias.name) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        above = self.package[: len(self.package) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            self.found.append((node.lineno, inner if inner in self.modules else base))

    def visit_Call(self, node: ast.Call) -> None:
        """``import_module("distkit.trainer")`` is an import too."""
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
            self.found.append((node.lineno, str(node.args[0].value)))
        self.generic_visit(node)


def wrong_imports(folder: Path) -> list[str]:
    """Imports that point upwards, in the package that lies in ``folder``."""
    files = {".".join(p.relative_to(folder.parent).with_suffix("").parts): p for p in folder.rglob("*.py")}
    modules = {name.removesuffix(".__init__") for name in files}
    wrong = []
    for name, path in sorted(files.items()):
        module = name.removesuffix(".__init__")
        if module == TOP:  # the public names: resolved lazily, so it stands above all and imports errors only
            continue
        imports = Imports(name.split(".")[:-1], modules)
        imports.visit(ast.parse(path.read_text()))
        for line, target in imports.found:
            below = target.startswith(f"{TOP}.") and layer(target) > layer(module)
            if below:
                wrong.append(f"{path}:{line}: {module} imports {target}, which is above it")
    return wrong


def test_imports_point_downwards() -> None:
    assert wrong_imports(ROOT / TOP) == []


@pytest.mark.parametrize(
    "line",
    [
        "from distkit.trainer import Trainer",
        "from distkit import trainer",
        "import distkit.trainer",
        "from ..trainer import Trainer",
        "from .. import trainer",
        "def f():\n    import distkit.trainer as t",
        "importlib.import_module('distkit.trainer')",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import distkit.trainer",
    ],
)
def test_an_import_of_the_trainer_in_strategies_is_found(tmp_path: Path, line: str) -> None:
    package = tmp_path / TOP
    for name in ("trainer.py", "strategies/mine.py", "errors.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("from distkit.errors import ConfigError\n")
    assert wrong_imports(package) == []
    (package / "strategies/mine.py").write_text(f"{line}\n")
    assert [text.partition(": ")[2] for text in wrong_imports(package)] == [
        "distkit.strategies.mine imports distkit.trainer, which is above it"
    ]


def test_imports_for_types_only_are_free(tmp_path: Path) -> None:
    package = tmp_path / TOP
    (package / "strategies").mkdir(parents=True)
    text = (
        "if TYPE_CHECKING:\n    from distkit.trainer import A\nif typing.TYPE_CHECKING:\n    import distkit.trainer\n"
    )
    (package / "strategies" / "mine.py").write_text(text)
    (package / "trainer.py").write_text("")
    assert wrong_imports(package) == []


def test_every_module_has_a_place(tmp_path: Path) -> None:
    (tmp_path / TOP).mkdir()
    (tmp_path / TOP / "novelty.py").write_text("import distkit.errors")
    with pytest.raises(AssertionError, match="novelty has no place yet"):
        wrong_imports(tmp_path / TOP)


def loaded_after(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after running the code."""
    report = (
        "\nimport json, sys\nsys.stderr.write('\\n' + json.dumps(sorted({n.partition('.')[0] for n in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def run_command(module: str, *arguments: str) -> str:
    """Code that runs a command's main in this process."""
    return (
        f"import sys\nsys.argv = ['command', *{list(arguments)!r}]\nfrom {module} import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code"
    )


def commands() -> Iterator[tuple[str, ...]]:
    """Command lines that must answer at once."""
    yield ("distkit.launch.command", "--help")
    for line in (
        "--help",
        "--version",
        "config --help",
        "config show --help",
        "config show --json",
        "strategies --help",
    ):
        yield ("distkit.cli", *line.split())
    for line in ("config show -s ddp", "config schema", "config schema --json", "strategies", "strategies --json"):
        yield ("distkit.cli", *line.split())


def test_import_distkit_loads_nothing_else() -> None:
    assert (
        loaded_after("import distkit") & {*HEAVY, "omegaconf", "typer", "rich", "click", "yaml", "safetensors"} == set()
    )


def test_what_is_loaded_is_seen() -> None:
    """The other tests would be worth nothing if it weren't."""
    assert loaded_after("import distkit, numpy\ndistkit.Config") & {"numpy", "distkit"} == {"numpy", "distkit"}


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_commands_load_no_engine(command: tuple[str, ...]) -> None:
    assert loaded_after(run_command(*command)) & set(HEAVY) == set()
