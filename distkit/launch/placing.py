"""Where a run's processes go: which hosts were named, how many of them, and how many processes on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distkit.errors import LaunchError
from distkit.launch.hosts import Host, chosen, common_slots, parse_hosts, read_hostfile

if TYPE_CHECKING:
    from distkit.launch.machine import Machine
    from distkit.launch.plan import LaunchOptions

__all__ = ["hosts_of", "nodes_of", "processes_on_each"]


def hosts_of(options: LaunchOptions, machine: Machine) -> tuple[Host, ...]:
    """The hosts that were named; empty where the run is on this one.

    Raises:
        LaunchError: They can't be read, are named twice, or their number isn't ``--nnodes``.
    """
    given = {"--hosts": options.hosts, "--hostfile": options.hostfile, "--host-discovery": options.host_discovery}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise LaunchError(f"{' and '.join(named)} were set, and each names the hosts", hint="leave one out")
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    elif options.hostfile is not None:
        hosts = read_hostfile(machine.directory / options.hostfile)
    else:
        for name, value in (("--include", options.include), ("--exclude", options.exclude)):
            if value is not None:
                raise LaunchError(
                    f"{name} was set, but no hosts to choose from", hint="--hostfile F   or --hosts H0,H1"
                )
        return ()
    hosts = chosen(hosts, options.include, options.exclude)
    if options.min_nodes is not None and options.min_nodes > len(hosts):
        raise LaunchError(
            f"--nnodes asks for {options.min_nodes} hosts at least, but {len(hosts)} are named",
            hint=f"--nnodes {len(hosts)}",
        )
    if options.min_nodes is None and options.nnodes not in (1, len(hosts)):
        raise LaunchError(
            f"--nnodes was set to {options.nnodes}, but {len(hosts)} hosts are named", hint=f"--nnodes {len(hosts)}"
        )
    return hosts


def nodes_of(options: LaunchOptions, hosts: Sequence[Host]) -> int:
    """Number of hosts, the most of an elastic run."""
    if not hosts:
        return options.nnodes
    return min(options.nnodes, len(hosts)) if options.min_nodes is not None else len(hosts)


def processes_on_each(options: LaunchOptions, hosts: Sequence[Host]) -> str:
    """``--nproc`` for hosts that say how much room they have.

    Raises:
        LaunchError: More were asked for than one has room for.
    """
    slots = common_slots(hosts)
    if slots is None:
        return options.nproc
    if options.nproc == "auto":
        return str(slots)
    if options.nproc.isdecimal() and int(options.nproc) > slots:
        least = next(host for host in hosts if host.slots == slots)
        raise LaunchError(
            f"--nproc was set to {options.nproc}, but {least.name} has room for {slots}", hint=f"--nproc {slots}"
        )
    return options.nproc
