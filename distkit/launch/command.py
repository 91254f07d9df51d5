"""The command `distkit-run`: reads the command line, builds the plan, prints or executes it.

Nothing heavy is imported here, so that ``--help`` answers at once.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from distkit.errors import DistkitError

if TYPE_CHECKING:
    from distkit.launch.plan import LaunchPlan

__all__ = ["main"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(
    no_args_is_help=True,
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
)
def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="The script's own, passed on untouched.")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option("-s", "--strategy", metavar="NAME", help="Way of training: single, dp, ddp, ...")
    ] = None,
    config: Annotated[
        str | None, typer.Option("-c", "--config", metavar="FILE", help="YAML file with settings.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting; can be given often.")
    ] = None,
    nproc: Annotated[
        str, typer.Option("--nproc", metavar="N|auto", help="Processes on each node; auto is one for each GPU.")
    ] = "auto",
    nnodes: Annotated[
        str, typer.Option("--nnodes", metavar="N|MIN:MAX", help="Number of nodes; an elastic run has a range.")
    ] = "1",
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", metavar="N", help="Place of this node, from 0 on.")
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option("--master-addr", metavar="HOST", help="Node 0, as the other nodes reach it.")
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(
            "--master-port", metavar="PORT", min=1, max=65535, help="Port there; else derived from the run's name."
        ),
    ] = None,
    launcher: Annotated[
        str,
        typer.Option(
            "--launcher",
            metavar="NAME",
            help="What starts the processes: auto, torchrun, deepspeed, horovodrun, mpirun, slurm, kubernetes, ray.",
        ),
    ] = "auto",
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", metavar="N", min=0, help="Start all ranks again after a failure, so often.")
    ] = 0,
    run_dir: Annotated[
        str | None, typer.Option("--run-dir", metavar="DIR", help="The run's folder; else runs/NAME-TIME.")
    ] = None,
    output: Annotated[
        str, typer.Option("--output", metavar="main|all", help="Whose output is shown; each rank has its log anyway.")
    ] = "main",
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", metavar="H0:N,H1:N", help="Hosts to start over ssh, with their room."),
    ] = None,
    hostfile: Annotated[
        str | None,
        typer.Option("--hostfile", metavar="FILE", help="Or a file, a host a line: host0 slots=4, or host0:4."),
    ] = None,
    include: Annotated[
        str | None, typer.Option("--include", metavar="H0@H1:0,1", help="Only these of them, and of their devices.")
    ] = None,
    exclude: Annotated[str | None, typer.Option("--exclude", metavar="H0@H1:0,1", help="All but these.")] = None,
    meet_at: Annotated[
        str | None,
        typer.Option(
            "--meet-at", metavar="HOST:PORT", help="Where hosts meet that you start yourself, in any order and number."
        ),
    ] = None,
    interface: Annotated[
        str | None, typer.Option("--interface", metavar="NAME", help="Network interface between the hosts.")
    ] = None,
    ssh_port: Annotated[
        int | None, typer.Option("--ssh-port", metavar="PORT", min=1, max=65535, help="Port of ssh there.")
    ] = None,
    ssh_identity: Annotated[
        str | None, typer.Option("--ssh-identity", metavar="FILE", help="Private key for ssh.")
    ] = None,
    ssh_options: Annotated[
        list[str] | None, typer.Option("--ssh-option", metavar="KEY=VALUE", help="Another option of ssh (its -o).")
    ] = None,
    export: Annotated[
        list[str] | None, typer.Option("--export", metavar="NAME", help="A variable for processes on other hosts.")
    ] = None,
    host_discovery: Annotated[
        str | None,
        typer.Option(
            "--host-discovery", metavar="PROGRAM", help="Prints the hosts that are there now, asked again and again."
        ),
    ] = None,
    job: Annotated[
        list[str] | None,
        typer.Option(
            "--job", metavar="KEY=VALUE", help="For the scheduler: time=2:00:00, partition=gpu, image=..., ..."
        ),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command that would run, for a shell.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print the whole plan as JSON.")] = False,
) -> None:
    """Run a training script on many devices.

    Options stand before the script; what follows it is the script's own.

    \b
    Examples:
      distkit-run -s ddp --nproc 2 train.py --epochs 3
      distkit-run -s ddp -c config.yaml --set optim.clip_norm=1 --run-dir runs/first train.py
      distkit-run -s zero3 --hosts host0:4,host1:4 train.py
      distkit-run -s zero3 --launcher slurm --nnodes 4 --nproc 8 --job time=2:00:00 train.py
      distkit-run -s ddp --nproc 4 --nnodes 2 --node-rank 0 --master-addr host0 --run-dir runs/two train.py
    """
    from distkit.launch.build import build_plan
    from distkit.launch.execute import execute
    from distkit.launch.machine import Machine
    from distkit.launch.plan import LaunchOptions

    try:
        _check_choices(output, dry_run, as_json)
        least, most = _nodes(nnodes)
        options = LaunchOptions(
            script=script,
            arguments=tuple(arguments or ()),
            module=module,
            strategy=strategy,
            config=config,
            overrides=tuple(overrides or ()),
            nproc=nproc,
            nnodes=most,
            min_nodes=least,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
            launcher=launcher,
            max_restarts=max_restarts,
            run_dir=run_dir,
            output=output,
            hosts=hosts,
            hostfile=hostfile,
            include=include,
            exclude=exclude,
            meet_at=meet_at,
            ssh_options=tuple(ssh_options or ()),
            job=tuple(job or ()),
            interface=interface,
            ssh_port=ssh_port,
            ssh_identity=ssh_identity,
            export=tuple(export or ()),
            host_discovery=host_discovery,
        )
        plan = build_plan(options, Machine.here(claim=not dry_run))
        if dry_run:
            _print(plan, as_json)
        else:
            _say(plan)
            execute(plan)
    except DistkitError as error:
        sys.stderr.write(f"distkit-run: {error}\n")
        raise typer.Exit(2) from error


def main() -> None:
    """The console script."""
    app()


def _nodes(text: str) -> tuple[int | None, int]:
    """``2`` is (None, 2), ``1:4`` is (1, 4)."""
    from distkit.errors import LaunchError

    least, colon, most = text.partition(":")
    numbers = [int(part) if part.isdecimal() else 0 for part in ([least, most] if colon else [least])]
    if min(numbers) < 1 or numbers != sorted(numbers):
        raise LaunchError(
            f"--nnodes was set to {text!r}; valid: a number from 1 on, or MIN:MAX", hint="--nnodes 2   or --nnodes 1:4"
        )
    return (numbers[0], numbers[1]) if colon else (None, numbers[0])


def _check_choices(output: str, dry_run: bool, as_json: bool) -> None:
    from distkit.errors import LaunchError

    if output not in ("main", "all"):
        raise LaunchError(f"--output was set to {output!r}; valid: main, all", hint="--output all")
    if as_json and not dry_run:
        raise LaunchError("--json was set, but it prints the plan of a dry run", hint="--dry-run --json")


def _print(plan: LaunchPlan, as_json: bool) -> None:
    """The plan: on standard output only what a program or a shell reads."""
    from distkit.masking import mask_environment

    if as_json:
        import json

        sys.stdout.write(json.dumps(plan.as_dict(), indent=2) + "\n")
        return
    _say(plan)
    if plan.exports:
        shown = " ".join(f"{name}={value}" for name, value in mask_environment(plan.exports).items())
        sys.stderr.write(f"distkit-run: exported to the hosts: {shown}\n")
    for file in plan.files:
        sys.stdout.write(f"# {file.path}\n{file.text}\n")
    for host in plan.hosts:
        line = host.shell()
        sys.stdout.write(line + "\n")
        if "***" in line:
            sys.stderr.write("distkit-run: secrets are masked as ***; fill them in before you run the line\n")


def _say(plan: LaunchPlan) -> None:
    for line in (plan.summary(), *plan.notes):
        sys.stderr.write(f"distkit-run: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
