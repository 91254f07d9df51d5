"""A plan in action: hosts are looked at, files written, and this process becomes the plan's command."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from distkit.errors import LaunchError
from distkit.launch.plan import LaunchPlan
from distkit.launch.preflight import HostNeeds, Problem, check_hosts
from distkit.launch.ssh import SshOptions

__all__ = ["execute"]


def execute(plan: LaunchPlan) -> None:
    """Do what the plan says. Returns only where the plan has nothing but files.

    Raises:
        LaunchError: A host isn't fit for it, or a file can't be written; nothing was started.
    """
    if plan.checks is not None:
        _check(plan)
    for file in plan.files:
        try:
            path = Path(file.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text, encoding="utf-8")
        except OSError as error:
            raise LaunchError(f"{file.path!r} can't be written: {error.strerror}", hint="--run-dir DIR") from error
    if plan.hosts:
        (host,) = plan.hosts  # signals then reach what it starts directly
        os.chdir(host.directory)
        try:
            os.execvpe(host.command[0], list(host.command), {**os.environ, **host.environment})
        except OSError as error:
            raise LaunchError(
                f"{host.command[0]!r} can't be started: {error.strerror}", hint="distkit doctor   says what is missing"
            ) from error


def _check(plan: LaunchPlan) -> None:
    checks = plan.checks
    assert checks is not None
    needs = HostNeeds(
        directory=checks.directory,
        target=checks.target,
        run_dir=plan.run_dir,
        token=f".seen-{secrets.token_hex(4)}",
        nproc=plan.nproc,
        cuda=checks.cuda,
        interface=checks.interface,
        first=plan.places[0],
    )
    ssh = SshOptions(checks.ssh_port, checks.ssh_identity, checks.ssh_options)
    problems = check_hosts(plan.places, needs, ssh, sys.executable)
    if not problems:
        return
    show_problems(problems)
    bad = {problem.host for problem in problems}
    away = {problem.host for problem in problems if problem.away}
    fit = len(plan.places) - len(bad)
    if bad == away and fit >= checks.least and plan.places[0] not in bad:
        sys.stderr.write(f"distkit-run: going on with {fit} of {len(plan.places)} hosts; others may come later\n")
        return
    raise LaunchError(
        f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'} on {len(bad)} of {len(plan.places)} hosts "
        "(the table above); nothing was started",
        hint="mend them" + (f", or leave hosts out: --exclude {'@'.join(sorted(bad))}" if fit > 0 else ""),
    )


def show_problems(problems: Sequence[Problem]) -> None:
    """A table on standard error."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("Host", "Problem", "What to do", box=box.SIMPLE_HEAD, pad_edge=False)
    for problem in problems:
        table.add_row(problem.host, problem.what, problem.hint)
    Console(stderr=True).print(table)
