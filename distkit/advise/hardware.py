"""What a run is planned for: nodes, devices in each, and the links inside of a node, between nodes and to the host."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from distkit.config.nearest import nearest
from distkit.errors import PlanError

__all__ = ["Accelerator", "Hardware", "Link", "catalogue", "parse_hardware", "parse_speed"]

_SHAPE = re.compile(r"(?:(?P<nodes>\d+)\s*x\s*)?(?P<each>\d+)\s*x\s*(?P<device>[A-Za-z][\w.-]*)")
_SPEED = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?)(?P<kind>b/s|bit/s|bps|byte/s)", re.IGNORECASE)
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_EXAMPLE = "--hardware 4x8xA100-80G --intra nvlink --inter 200Gbps"


@dataclass(frozen=True)
class Accelerator:
    """One device.

    Args:
        name: As the catalogue has it.
        memory: Bytes.
        bandwidth: Of its memory, bytes per second.
        flops: Dense operations per second, by number format.
        scale_up: To devices of the same node, bytes per second each way; None where they talk over PCIe.
    """

    name: str
    memory: float
    bandwidth: float
    flops: dict[str, float]
    scale_up: float | None

    def format_of(self, precision: str) -> str:
        """The number format of its matrix products for a ``precision`` of the settings; what it lacks is fp32."""
        wanted = {"bf16-pure": "bf16"}.get(precision, precision)
        return wanted if wanted in self.flops else "fp32"

    def speed(self, precision: str) -> float:
        """Operations per second for a ``precision`` of the settings."""
        return self.flops[self.format_of(precision)]


@dataclass(frozen=True)
class Link:
    """A way that bytes take.

    Args:
        each_way: Bytes per second in each direction: of a device inside of a node; of a whole node between nodes.
        latency_s: Of one message, in seconds.
    """

    each_way: float
    latency_s: float


@dataclass(frozen=True)
class Hardware:
    """Where a run is to take place.

    Args:
        nodes: Number of nodes.
        each: Devices in each.
        device: Which.
        intra: Between devices of a node.
        inter: Between nodes.
        host: From a device to its host.
        storage: Bytes per second that all ranks together write to where checkpoints go.
    """

    nodes: int
    each: int
    device: Accelerator
    intra: Link
    inter: Link
    host: Link
    storage: float

    @property
    def devices(self) -> int:
        """In all."""
        return self.nodes * self.each

    @property
    def cpu(self) -> bool:
        """Whether its devices are processors, whose memory is the host's."""
        return self.device.name.startswith("CPU")

    def describe(self) -> str:
        """One line."""
        nodes = "" if self.nodes == 1 else f"{self.nodes} nodes x "
        between = "" if self.nodes == 1 else f", {self.inter.each_way / 1e9:g} GB/s between nodes"
        return f"{nodes}{self.each} x {self.device.name}, {self.intra.each_way / 1e9:g} GB/s inside of a node{between}"


@cache
def catalogue() -> dict[str, Any]:
    """Accelerators, links and assumptions, with their sources (catalogue.yaml)."""
    import yaml

    found: dict[str, Any] = yaml.safe_load(files("distkit.advise").joinpath("catalogue.yaml").read_text("utf-8"))
    return found


def parse_hardware(
    text: str, *, intra: str | None = None, inter: str | None = None, storage: str | None = None
) -> Hardware:
    """``4x8xA100-80G`` is 4 nodes of 8 such devices, ``8xA100-80G`` one node.

    Args:
        text: Nodes, devices in each, and their name in the catalogue; or a YAML file with ``nodes``, ``devices``, ``device``
            (a name, or ``name``, ``memory``, ``bandwidth``, ``flops`` by format and ``scale_up`` of one that the catalogue
            doesn't have), ``intra``, ``inter`` and ``storage``.
        intra: ``nvlink``, ``pcie4`` and so on, or a speed; None is the device's own.
        inter: A speed such as ``200Gbps`` or ``25GB/s``, of a whole node in each direction; None is 100 Gbit/s.
        storage: A speed, of all ranks together to where checkpoints go; None is the catalogue's assumption.

    Raises:
        PlanError: Something in it isn't known, or makes no sense.
    """
    if text.endswith((".yaml", ".yml")):
        return _of_file(Path(text), intra, inter, storage)
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise PlanError(f"--hardware was set to {text!r}, which is no NODESxDEVICESxNAME", hint=_EXAMPLE)
    device = _accelerator(match["device"])
    return _hardware(text, int(match["nodes"] or 1), int(match["each"]), device, intra, inter, storage)


def _hardware(
    text: str, nodes: int, each: int, device: Accelerator, intra: str | None, inter: str | None, storage: str | None
) -> Hardware:
    if nodes < 1 or each < 1:
        raise PlanError(f"--hardware was set to {text!r}: {nodes} nodes of {each} devices are none", hint=_EXAMPLE)
    assumed = catalogue()["assumed"]
    latency = assumed["latency_s"]
    return Hardware(
        nodes,
        each,
        device,
        Link(_inside(device, intra), float(latency["intra"])),
        Link(parse_speed("--inter", inter or "100Gbps"), float(latency["inter"])),
        Link(float(catalogue()["links"]["pcie4"]["each_way"]), float(latency["intra"])),
        float(assumed["storage"]["bytes_per_s"]) if storage is None else parse_speed("--storage", storage),
    )


def _of_file(path: Path, intra: str | None, inter: str | None, storage: str | None) -> Hardware:
    import yaml

    example = "nodes: 4, devices: 8, device: A100-80G, intra: nvlink, inter: 200Gbps   as lines of the file"
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        unknown = set(found) - {"nodes", "devices", "device", "intra", "inter", "storage"}
        if unknown:
            raise PlanError(f"{path} has {', '.join(sorted(unknown))}, which is no part of hardware", hint=example)
        device = found["device"]
        nodes, each = int(found.get("nodes", 1)), int(found["devices"])
        made = _accelerator(device) if isinstance(device, str) else _of_values(str(device["name"]), device)
    except PlanError:
        raise
    except OSError as error:
        raise PlanError(f"--hardware {path} can't be read: {error.strerror}", hint=example) from error
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"--hardware {path} doesn't describe hardware: {error!r}", hint=example) from error
    links = (intra or found.get("intra"), inter or found.get("inter"), storage or found.get("storage"))
    return _hardware(str(path), nodes, each, made, *links)


def parse_speed(flag: str, text: str) -> float:
    """Bytes per second: ``200Gbps`` and ``200Gbit/s`` are 25e9, ``25GB/s`` too.

    Raises:
        PlanError: It is no speed, or not above 0.
    """
    match = _SPEED.fullmatch(text.strip())
    if match is None or float(match["number"]) <= 0:
        raise PlanError(
            f"{flag} was set to {text!r}, which is no speed above 0", hint=f"{flag} 200Gbps   or {flag} 25GB/s"
        )
    bits = match["kind"].lower() in ("bps", "bit/s") or match["kind"] == "b/s"
    return float(match["number"]) * _FACTORS[match["unit"].lower()] / (8 if bits else 1)


def _accelerator(name: str) -> Accelerator:
    known = catalogue()["accelerators"]
    by_name = {key.lower(): key for key in known}
    family = [key for key in known if key.lower().partition("-")[0] == name.lower()]
    key = by_name.get(name.lower()) or (family[0] if len(family) == 1 else None)
    if key is None:
        near = family[-1] if family else nearest(name, list(known)) or "A100-80G"
        raise PlanError(
            f"--hardware names {name!r}, which the catalogue doesn't have; it has {', '.join(known)}",
            hint=f"--hardware 1x8x{near}",
        )
    return _of_values(key, known[key])


def _of_values(name: str, found: Mapping[str, Any]) -> Accelerator:
    """As in the catalogue, whose figures of links between devices are those of both directions."""
    scale_up = found.get("scale_up")
    return Accelerator(
        name,
        float(found["memory"]),
        float(found["bandwidth"]),
        {name: float(value) for name, value in found["flops"].items()},
        None if scale_up is None else float(scale_up) / 2,
    )


def _inside(device: Accelerator, intra: str | None) -> float:
    links = catalogue()["links"]
    if intra is None:
        return device.scale_up or float(links["pcie4"]["each_way"])
    if intra.lower() in ("nvlink", "xgmi"):
        if device.scale_up is None:
            raise PlanError(f"--intra was set to {intra!r}, but {device.name} has none", hint="--intra pcie4")
        return device.scale_up
    if intra.lower() in links:
        return float(links[intra.lower()]["each_way"])
    if not _SPEED.fullmatch(intra.strip()):
        raise PlanError(
            f"--intra was set to {intra!r}; valid: nvlink, {', '.join(links)}, or a speed",
            hint=f"--intra {nearest(intra, ['nvlink', *links]) or 'nvlink'}",
        )
    return parse_speed("--intra", intra)
