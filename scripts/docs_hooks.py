"""Parts of the documentation that are made from the code, so that they can't differ from it.

mkdocs calls :func:`on_page_markdown` for each page; a comment like ``<!-- made: config-keys -->`` in a page is replaced
by what the function of that name in ``PARTS`` returns. `scripts/strategy-table` uses :func:`strategy_table` for README.md.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-pure")
MARK = re.compile(r"<!-- made: ([a-z-]+)((?: [\w-]+)*) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs's hook: put the made parts into a page."""
    return MARK.sub(lambda found: PARTS[found[1]](*found[2].split()), markdown)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def strategy_table() -> str:
    """What each built-in strategy can do, from its capabilities."""
    from distkit.strategies.registry import BUILT_IN, strategy_class

    rows = []
    for name in BUILT_IN:
        can = strategy_class(name).capabilities
        rows.append(
            (
                f"`{name}`",
                can.summary,
                can.processes,
                ", ".join(sorted(can.shards)) or "nothing",
                ", ".join(sorted(can.precisions, key=PRECISIONS.index)),
                can.best_for,
            )
        )
    return table(("strategy", "what it is", "processes", "split over ranks", "precision", "choose it for"), rows)


def config_keys() -> str:
    """A table of keys for each section of the config."""
    from distkit.config.schema import keys

    sections: dict[str, list[Sequence[str]]] = {}
    for key in keys():
        section = key.name.rpartition(".")[0] or "top level"
        allowed = ", ".join(f"`{choice}`" for choice in key.choices) or key.type
        allowed += f", from {key.minimum:g} on" if key.minimum is not None else ""
        allowed += f", above {key.above:g}" if key.above is not None else ""
        default = json.dumps(key.default) if not isinstance(key.default, str) else key.default
        sections.setdefault(section, []).append(
            (f"`{key.name}`", f"`{default}`", allowed, key.help.replace("<", "&lt;"))
        )
    return "\n\n".join(
        f"## {section}\n\n" + table(("key", "default", "values", "what it does"), rows)
        for section, rows in sections.items()
    )


def command_help(*command: str) -> str:
    """The --help text of a command."""
    module = {"distkit": "distkit.cli", "distkit-run": "distkit.launch.command"}[command[0]]
    code = f"import sys; sys.argv[0] = {command[0]!r}; from {module} import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command[1:], "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"},
        check=True,
    )
    return f"```text\n{done.stdout.strip()}\n```"


PARTS: dict[str, Callable[..., str]] = {
    "strategies": strategy_table,
    "config-keys": config_keys,
    "help": command_help,
}
