"""The command `distkit`: settings, strategies, and the tools around a run.

Nothing heavy is imported here, so that ``--help`` answers at once; torch is not needed to look at settings.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distkit.checkpoint_cli import checkpoint_app
from distkit.commandline import print_json, print_table, run_app
from distkit.errors import StrategyUnavailable
from distkit.plan_cli import plan

if TYPE_CHECKING:
    from distkit.config import LoadedConfig
    from distkit.config.schema import Key

__all__ = ["main"]

_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_HELP,
    no_args_is_help=True,
)
config_app = typer.Typer(rich_markup_mode=None, context_settings=_HELP, no_args_is_help=True)
app.add_typer(config_app, name="config", short_help="Settings: merged, and which there are.")
app.add_typer(checkpoint_app, name="checkpoint", short_help="Checkpoints: list, verify, compare, export, import.")
app.command(
    "plan",
    short_help="What a run would be like: how layers would be split.",
    context_settings={"allow_interspersed_args": False, **_HELP},
)(plan)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def main() -> None:
    """The console script."""
    run_app(app, "distkit")


def _version(wanted: bool) -> None:
    if wanted:
        from distkit import __version__

        sys.stdout.write(f"distkit {__version__}\n")
        raise typer.Exit


@app.callback()
def distkit(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Look at settings, strategies, checkpoints and this machine. Training itself is started by distkit-run.

    \b
    Examples:
      distkit strategies
      distkit config show -c config.yaml --set optim.clip_norm=1
      distkit config schema > config.yaml
      distkit doctor
    """


@config_app.callback()
def config() -> None:
    """Settings: what they are after merging, and which keys there are.

    \b
    Examples:
      distkit config show -c config.yaml -s ddp
      distkit config schema
    """


@config_app.command(short_help="The merged settings, and where each comes from.")
def show(
    file: Annotated[str | None, typer.Option("-c", "--config", metavar="FILE", help="YAML file with settings.")] = None,
    strategy: Annotated[
        str | None, typer.Option("-s", "--strategy", metavar="NAME", help="Way of training, as for distkit-run.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting; can be given often.")
    ] = None,
    as_json: AsJson = False,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine", metavar="NAME", help="Print the configuration made for this engine, such as deepspeed."
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", metavar="N", min=1, help="Processes in all, for --engine.")
    ] = None,
) -> None:
    """The settings after merging, and where each value comes from.

    What a script gives to distkit.Trainer(...) is not known here; it stands between the defaults and the file.

    \b
    Examples:
      distkit config show -c config.yaml
      distkit config show -c config.yaml -s ddp --set optim.clip_norm=1 --json
      distkit config show -c config.yaml -s zero3 --engine deepspeed --processes 32
    """
    loaded = _load(file, strategy, overrides or [])
    if engine is not None:
        print_json(_engine_config(loaded, engine, processes))
    elif as_json:
        from distkit.masking import mask_values

        print_json({"config": mask_values(asdict(loaded.config)), "origins": loaded.origins})
    else:
        _print_settings(loaded)


@config_app.command(short_help="Every key: default, choices, what it does.")
def schema(as_json: AsJson = False) -> None:
    """Every key with its default, type, choices and what it does; the output is a config file as it stands.

    \b
    Examples:
      distkit config schema > config.yaml
      distkit config schema --json
    """
    if as_json:
        from distkit.config.schema import keys

        print_json([_key_record(key) for key in keys()])
    else:
        from distkit.config.text import schema_yaml

        sys.stdout.write("# Every setting of distkit with its default. Keep what you change, delete the rest.\n\n")
        sys.stdout.write(schema_yaml())


@app.command(short_help="What each strategy can do, and whether its engine is installed.")
def strategies(as_json: AsJson = False) -> None:
    """What each strategy does, what it can do, and whether its engine is installed.

    \b
    Examples:
      distkit strategies
      distkit strategies --json
    """
    from distkit.strategies.registry import RESOLVED, strategy_names

    records = [_strategy_record(name) for name in strategy_names()]
    if as_json:
        print_json(records)
        return
    head = ("strategy", "what it is", "split over ranks", "precision", "offload", "engine", "best for")
    print_table(head, map(_strategy_row, records), dim=[not record["installed"] for record in records])
    for record in records:
        if not record["installed"]:  # not in the table, which would break the line that is to be copied
            sys.stdout.write(f"{record['name']} is not installed: {record['install']}\n")
    for name, meaning in RESOLVED.items():
        sys.stdout.write(f"{name}: {meaning}\n")


@app.command(short_help="What this machine has for training; --install builds what pip can't.")
def doctor(
    install: Annotated[
        str | None, typer.Option("--install", metavar="ENGINE", help="Build and install it here: horovod.")
    ] = None,
    mpi: Annotated[str, typer.Option("--mpi", metavar="auto|yes|no", help="Horovod with MPI beside Gloo.")] = "auto",
    nccl: Annotated[str, typer.Option("--nccl", metavar="auto|yes|no", help="Horovod for GPU tensors.")] = "auto",
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Build even if a wheel is kept from before.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look at what this machine has for training, and how to get what is missing.

    \b
    Examples:
      distkit doctor
      distkit doctor --install horovod
      distkit doctor --install horovod --mpi no --rebuild
    """
    if install is not None:
        _install(install, mpi, nccl, rebuild)
        return
    from distkit.doctor.report import examine

    findings = list(examine())
    if as_json:
        print_json([finding.as_dict() for finding in findings])
        return
    rows = [(finding.what, finding.found or "not found") for finding in findings]
    print_table(("what", "found"), rows, dim=[not finding.found for finding in findings])
    for finding in findings:
        if not finding.found:
            sys.stdout.write(f"{finding.what} is missing: {finding.mend}\n")


def _install(engine: str, mpi: str, nccl: str, rebuild: bool) -> None:
    from distkit.doctor.horovod_build import BuildOptions, install_horovod
    from distkit.errors import ConfigError

    if engine != "horovod":
        raise ConfigError(
            f"--install was given {engine!r}; what is built here is horovod, other engines come by pip",
            hint="distkit doctor --install horovod   or pip install 'distkit[deepspeed]'",
        )
    for option, value in (("--mpi", mpi), ("--nccl", nccl)):
        if value not in ("auto", "yes", "no"):
            raise ConfigError(f"{option} was set to {value!r}; valid: auto, yes, no", hint=f"{option} auto")

    def say(line: str) -> None:
        sys.stderr.write(f"distkit doctor: {line}\n")
        sys.stderr.flush()

    say(install_horovod(BuildOptions(mpi=mpi, nccl=nccl, rebuild=rebuild), say))


def _engine_config(loaded: LoadedConfig, engine: str, processes: int | None) -> dict[str, Any]:
    """What the strategy would hand to its engine."""
    from distkit.errors import ConfigError
    from distkit.strategies.registry import strategy_class, strategy_names

    chosen = strategy_class(loaded.config.strategy)
    made = chosen.engine_config(loaded.config, processes)
    if made is not None and chosen.capabilities.engine == engine:
        return made
    known = {name: strategy_class(name).capabilities for name in strategy_names()}
    fitting = [name for name, can in known.items() if can.engine == engine and not can.layers]
    raise ConfigError(
        f"--engine {engine} was given, but strategy {loaded.config.strategy!r} makes no configuration for it",
        hint=f"-s {fitting[-1]} --engine {engine}" if fitting else "-s zero3 --engine deepspeed",
    )


def _load(file: str | None, strategy: str | None, overrides: list[str]) -> LoadedConfig:
    """Merge as distkit-run does, and let the strategy have its say."""
    import json

    from distkit.config import load_config
    from distkit.strategies.registry import strategy_class

    chosen = [] if strategy is None else [f"strategy={json.dumps(strategy)}"]
    loaded = load_config(file=file, overrides=[*overrides, *chosen])
    try:
        strategy_class(loaded.config.strategy).check(loaded.config, processes=None)
    except StrategyUnavailable as error:  # settings can be looked at where they can't be run
        sys.stderr.write(f"distkit: {error}\n")
    return loaded


def _print_settings(loaded: LoadedConfig) -> None:
    from distkit.config.text import yaml_value
    from distkit.masking import mask_values

    flat = mask_values(loaded.flat())
    rows = [(name, yaml_value(value), loaded.origins[name]) for name, value in flat.items()]
    print_table(("key", "value", "from"), rows, dim=[origin == "default" for _, _, origin in rows])


def _key_record(key: Key) -> dict[str, Any]:
    return {
        "name": key.name,
        "type": key.type,
        "default": key.default,
        "choices": list(key.choices),
        "minimum": key.minimum,
        "above": key.above,
        "help": key.help,
    }


def _strategy_record(name: str) -> dict[str, Any]:
    from distkit.strategies.checks import engine_installed
    from distkit.strategies.registry import strategy_class

    try:
        found = strategy_class(name)
    except StrategyUnavailable as error:  # another package's, and it can't be imported
        return {"name": name, "summary": error.message, "installed": False, "install": error.hint or ""}
    can = found.capabilities
    return {
        "name": name,
        "summary": can.summary,
        "processes": can.processes,
        "shards": sorted(can.shards),
        "precisions": _in_order(can.precisions, "precision"),
        "offload": _in_order(can.offload - {"none"}, "memory.offload"),
        "tensor_parallel": can.tensor_parallel,
        "compress": _in_order(can.compress - {"none"}, "compress.method"),
        "lr_scaling": can.lr_scaling,
        "engine": ", ".join(filter(None, (can.engine, can.layers))) or "torch",
        "installed": engine_installed(found),
        "install": can.install,
        "best_for": can.best_for,
    }


def _in_order(values: Collection[str], key: str) -> list[str]:
    """In the order in which the schema lists a key's choices."""
    from distkit.config.schema import keys

    choices = next(found.choices for found in keys() if found.name == key)
    return sorted(values, key=lambda value: choices.index(value) if value in choices else len(choices))


def _strategy_row(record: dict[str, Any]) -> tuple[str, ...]:
    return (
        record["name"],
        record["summary"],
        ", ".join(record.get("shards", ())) or "nothing",
        ", ".join(record.get("precisions", ())),
        ", ".join(record.get("offload", ())) or "none",
        record.get("engine", "?") if record["installed"] else "not installed",
        record.get("best_for", ""),
    )


if __name__ == "__main__":
    main()
