"""The machine at hand, as hardware to plan for: devices, their memory, and the links between them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from distkit.advise.hardware import Accelerator, Hardware, Link, catalogue, parse_hardware
from distkit.errors import PlanError
from distkit.launch.hardware import usable_cores, visible_gpus

__all__ = ["this_machine"]


def this_machine(*, nodes: int = 1, each: int | None = None, environ: Mapping[str, str] | None = None) -> Hardware:
    """What can be found out here; nodes are taken to be alike.

    Args:
        nodes: Number of nodes like this one.
        each: Processes on each; None is one for each GPU, or for each core where there is none.
        environ: Variables; None is this process's.

    Raises:
        PlanError: The GPUs can't be asked.
    """
    gpus = visible_gpus(os.environ if environ is None else environ)
    if gpus == 0:
        return _of_cpu(nodes, each or usable_cores())
    device, memory = _gpu()
    each = each or gpus
    known = parse_hardware(f"{nodes}x{each}x{_in_catalogue(device, memory)}", intra=_between_gpus(), inter=_network())
    return replace(known, device=replace(known.device, name=device, memory=memory))


def _of_cpu(nodes: int, each: int) -> Hardware:
    found = catalogue()["cpus"]
    flags, hertz, total = _cpu_flags(), _cpu_hertz(), _memory()
    kind = next((name for name in found if name in flags), "other")
    threads = max(1, usable_cores() // each)
    speed = threads * hertz * float(found[kind]["fp32_per_cycle"])
    flops = {"fp32": speed, "bf16": speed * float(found[kind].get("bf16_factor", 1.0))}
    device = Accelerator(f"CPU ({threads} of {usable_cores()} cores)", total / each, 20e9, flops, None)
    loopback = float(catalogue()["links"]["loopback"]["each_way"])
    base = parse_hardware("1x1xA100-80G", inter=_network())
    link = Link(loopback, base.inter.latency_s)
    return Hardware(nodes, each, device, link, base.inter, Link(device.bandwidth, 1e-6), base.storage)


def _gpu() -> tuple[str, float]:
    """Name and bytes of memory of the first one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise PlanError(
            "this machine has GPUs, but no nvidia-smi to ask them", hint="--hardware 1x8xA100-80G   names them"
        )
    line = _said([program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]).splitlines()
    if not line or "," not in line[0]:
        raise PlanError("nvidia-smi doesn't say which GPUs there are", hint="--hardware 1x8xA100-80G   names them")
    name, _, mebibytes = line[0].rpartition(",")
    return name.strip(), float(mebibytes) * 2**20


def _in_catalogue(name: str, memory: float) -> str:
    """The entry of the same kind whose memory is nearest.

    Raises:
        PlanError: There is none.
    """
    words = re.sub(r"[^A-Z0-9]+", " ", name.upper()).split()
    joined = "".join(words)
    known = {key: float(value["memory"]) for key, value in catalogue()["accelerators"].items()}
    same = [key for key in known if key.partition("-")[0] in words or key.partition("-")[0] in joined]
    longest = max((len(key.partition("-")[0]) for key in same), default=0)
    same = [key for key in same if len(key.partition("-")[0]) == longest]
    if not same:
        raise PlanError(f"the catalogue doesn't have this machine's {name}", hint="--hardware gpus.yaml   describes it")
    nearest: str = min(same, key=lambda key: abs(known[key] - memory))
    return nearest


def _between_gpus() -> str | None:
    """NVLink where nvidia-smi shows it, else PCI Express."""
    program = shutil.which("nvidia-smi")
    matrix = _said([program, "topo", "-m"]) if program else ""
    return None if re.search(r"\bNV\d+\b", matrix) else "pcie4"


def _network(root: Path = Path("/sys/class")) -> str:
    """The fastest way out of this machine: InfiniBand ports together, else the fastest network card; 10 Gbit/s where
    nothing is said (virtual machines)."""
    ports = list(_numbers(root.glob("infiniband/*/ports/*/rate")))
    cards = [speed / 1000 for speed in _numbers(root.glob("net/*/speed"))]
    gigabits = sum(ports) or max(cards, default=0.0)
    return f"{gigabits:g}Gbps" if gigabits >= 0.1 else "10Gbps"


def _numbers(paths: Iterator[Path]) -> Iterator[float]:
    """The number that each file begins with."""
    for path in paths:
        try:
            match = re.match(r"\d+(\.\d+)?", path.read_text(encoding="utf-8"))
        except OSError:  # a card without a cable
            continue
        if match and float(match.group()) > 0:
            yield float(match.group())


def _said(words: list[str]) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return set(match.group(1).split()) if match else set()


def _cpu_hertz() -> float:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^cpu MHz\s*:\s*([\d.]+)$", text, re.MULTILINE)
    return float(match.group(1)) * 1e6 if match else 2.5e9


def _memory() -> float:
    """Bytes of this machine."""
    return float(os.sysconf("SC_PAGE_SIZE")) * float(os.sysconf("SC_PHYS_PAGES"))
