"""What the two commands share: errors of distkit as message and hint with exit status 2, and tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from distkit.errors import DistkitError

if TYPE_CHECKING:
    from typer import Typer

__all__ = ["EXIT_USAGE", "print_json", "print_table", "run_app"]

EXIT_USAGE = 2
"""Exit status of a command that was told something that can't work; click's own for wrong options."""

_PIPE_WIDTH = 1000
"""Wide enough that no cell is broken where programs like grep read it."""


def run_app(app: Typer, program: str, arguments: Sequence[str] | None = None) -> None:
    """Run a typer app; an error of distkit's ends it with message and hint and without a traceback.

    Args:
        app: The commands.
        program: Name of the program, as in its help.
        arguments: The command line; None is this process's.

    Raises:
        SystemExit: In any case, as typer does.
    """
    try:
        app(args=arguments, prog_name=program)
    except DistkitError as error:
        sys.stdout.flush()
        sys.stderr.write(f"{program}: {error}\n")
        raise SystemExit(EXIT_USAGE) from None


def print_json(value: Any) -> None:
    """For programs: indented JSON on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, dim: Iterable[bool] = ()) -> None:
    """For people: a table as wide as the terminal, and without control codes where there is none.

    Args:
        head: Names of the columns.
        rows: Their cells.
        dim: For each row, whether it is shown pale.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(head):
        table.add_column(name, overflow="fold", no_wrap=index == 0)
    pale = iter(dim)
    for row in rows:
        table.add_row(*map(Text, row), style="dim" if next(pale, False) else "")
    console.print(table)
