"""Writes the manifests of a job for Kubernetes; nothing is sent to a cluster."""

from __future__ import annotations

import re
import shlex
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import yaml

from distkit.config.nearest import nearest
from distkit.errors import LaunchError
from distkit.launch.exports import exported, exported_names
from distkit.launch.launchers.base import Commands, Launcher, Request
from distkit.launch.launchers.job import job_settings, whole_number
from distkit.launch.launchers.kubernetes_manifests import MANIFESTS, ROLE, Pods
from distkit.launch.plan import PlannedFile
from distkit.launch.worker import LAUNCH_VARIABLE
from distkit.masking import is_secret, mask_arguments, mask_text

if TYPE_CHECKING:
    from distkit.launch.hosts import Host
    from distkit.launch.machine import Machine
    from distkit.launch.plan import LaunchOptions

__all__ = ["KubernetesLauncher", "dns_label"]

KEYS = (
    *("kind", "image", "name", "namespace", "claim", "directory", "gpus", "cpu", "memory", "shm"),
    *("secret", "service_account"),
)
"""What ``--job`` takes."""

_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
"""A DNS label that begins with a letter (RFC 1035): RFC 1123 allows a digit, but Jobs name their services by it."""

_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
_PLACES = re.compile(
    r"PATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|TERM|CUDA_HOME|CUDA_VISIBLE_DEVICES|LANG|LC_ALL|PYTHON[A-Z_]*"
)
"""Variables that describe this machine; an image has its own."""

_PORT = 29500
_MARGIN_S = 30
"""After the grace time `distkit-run` kills its processes and reports; the pod must live so long."""

_LONGEST = 63


@dataclass(frozen=True)
class _Settings:
    """What ``--job`` says, checked."""

    kinds: tuple[str, ...]
    image: str
    name: str | None
    namespace: str | None
    claim: str | None
    mount: PurePosixPath
    directory: str | None
    limits: Mapping[str, str]
    shared_memory: str | None
    secret: str
    service_account: str | None


class _Dumper(yaml.SafeDumper):
    """What stands twice is written twice, for readers."""

    def ignore_aliases(self, data: object) -> bool:
        return True


class KubernetesLauncher(Launcher):
    """Manifests in the run's folder, for `kubectl apply`."""

    name = "kubernetes"
    takes = frozenset(("job", "export", "interface"))
    instead = "leave it out: the cluster places the pods, and they meet in pod 0"
    elsewhere = True

    def check(self, options: LaunchOptions, hosts: Sequence[Host], machine: Machine) -> None:
        """As the base says; and ``--job`` must describe pods, and no secret stand in what they run."""
        super().check(options, hosts, machine)
        settings = _settings(options)
        gpus = settings.limits.get("nvidia.com/gpu")
        if gpus is not None and options.nproc.isdecimal() and int(options.nproc) > int(gpus):
            raise LaunchError(
                f"--nproc was set to {options.nproc}, but --job gpus={gpus}: each process takes a GPU",
                hint=f"--job gpus={options.nproc}",
            )
        _check_no_secret(options)

    def fill_in(self, options: LaunchOptions, machine: Machine) -> tuple[LaunchOptions, tuple[Host, ...], list[str]]:
        """``--nproc auto`` is a process for each GPU of a pod."""
        gpus = job_settings(options.job, KEYS, self.name).get("gpus", "1")
        if options.nproc == "auto":
            options = replace(options, nproc=str(whole_number("gpus", gpus)))
        return options, (), []

    def commands(self, request: Request) -> Commands:
        """Only files: one for each kind of job."""
        settings = _settings(request.options)
        name = settings.name or dns_label(request.run_dir.name, _room(request.nnodes))
        if len(name) > _room(request.nnodes):
            raise LaunchError(
                f"--job name was set to {name!r}, {len(name)} characters, but there is room for "
                f"{_room(request.nnodes)}: the names of pods are made of it",
                hint=f"--job name={dns_label(name, _room(request.nnodes))}",
            )
        _check_folder(request, settings)
        pods = _pods(request, settings, name)
        folder = request.run_dir / "launch"
        files = tuple(
            PlannedFile(
                str(folder / f"{kind}.yaml"),
                yaml.dump_all(MANIFESTS[kind](pods), Dumper=_Dumper, explicit_start=True, sort_keys=False, width=1000),
            )
            for kind in settings.kinds
        )
        return Commands(files=files, notes=tuple(_notes(request, settings, pods, files)))


def dns_label(text: str, longest: int = _LONGEST) -> str:
    """A DNS label from a run's name.

    Small letters, digits and dashes are kept, runs of other characters become one dash, and a name that doesn't begin with
    a letter gets ``run-`` before it. What is too long loses its end to eight digits of its CRC-32, so that two long names
    that differ only there stay two.

    Args:
        text: The name.
        longest: Number of characters at most.
    """
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "run"
    if not label[0].isalpha():
        label = f"run-{label}"
    if len(label) > longest:
        label = f"{label[: longest - 9].rstrip('-')}-{zlib.crc32(text.encode()):08x}"
    return label


def _room(nnodes: int) -> int:
    """Characters that a job's name may have: JobSet checks <name>-<role>-0-<pod>-<five random letters>."""
    return _LONGEST - len(f"-{ROLE}-0-{nnodes - 1}-abcde")


def _settings(options: LaunchOptions) -> _Settings:
    said = job_settings(options.job, KEYS, KubernetesLauncher.name)
    kind = said.get("kind")
    if kind is not None and kind not in MANIFESTS:
        near = nearest(kind, MANIFESTS) or "jobset"
        raise LaunchError(f"--job kind was set to {kind!r}; valid: {', '.join(MANIFESTS)}", hint=f"--job kind={near}")
    if "image" not in said:
        raise LaunchError(
            "--launcher kubernetes was set, but not which image the pods run; torch, distkit and the script are in it, or "
            "on the claim",
            hint="--job image=registry/team/train:1",
        )
    _check_names(said)
    claim, _, mount = said.get("claim", "").partition(":")
    for key, path in (("claim", mount or "/data"), ("directory", said.get("directory", "/"))):
        if not PurePosixPath(path).is_absolute():
            raise LaunchError(f"--job {key} names the folder {path!r}; valid: an absolute path", hint=_example(key))
    limits: dict[str, str] = {key: said[key] for key in ("cpu", "memory") if key in said}
    if "gpus" in said:
        limits["nvidia.com/gpu"] = str(whole_number("gpus", said["gpus"]))
    return _Settings(
        kinds=tuple(MANIFESTS) if kind is None else (kind,),
        image=said["image"],
        name=said.get("name"),
        namespace=said.get("namespace"),
        claim=claim or None,
        mount=PurePosixPath(mount or "/data"),
        directory=said.get("directory"),
        limits=limits,
        shared_memory=said.get("shm"),
        secret=said.get("secret", "distkit-secrets"),
        service_account=said.get("service_account"),
    )


def _check_names(said: Mapping[str, str]) -> None:
    for key in ("name", "namespace"):
        if key in said and (not _LABEL.fullmatch(said[key]) or len(said[key]) > _LONGEST):
            raise LaunchError(
                f"--job {key} was set to {said[key]!r}; valid: up to {_LONGEST} small letters, digits and dashes, with a "
                "letter first and no dash last",
                hint=f"--job {key}={dns_label(said[key])}",
            )
    for key in ("secret", "service_account", "claim"):
        name = said.get(key, "x").partition(":")[0]
        if not _SUBDOMAIN.fullmatch(name):
            raise LaunchError(
                f"--job {key} was set to {said[key]!r}; valid: small letters, digits, dashes and dots",
                hint=_example(key),
            )
    for key in ("cpu", "memory", "shm"):
        if key in said and not _QUANTITY.fullmatch(said[key]):
            raise LaunchError(f"--job {key} was set to {said[key]!r}, which is no quantity", hint=_example(key))


def _example(key: str) -> str:
    examples = {
        "claim": "team-data:/data",
        "directory": "/workspace",
        "cpu": "16",
        "memory": "64Gi",
        "shm": "16Gi",
        "secret": "distkit-secrets",
        "service_account": "trainer",
    }
    return f"--job {key}={examples[key]}"


def _words(options: LaunchOptions, nproc: str, run_dir: str) -> tuple[str, ...]:
    """The arguments of `distkit-run` in a pod: those of this one, without what is for the cluster.

    ``--max-restarts`` is not among them: the cluster starts all pods again, and two that count would multiply.
    """
    return (
        *("--launcher", "torchrun"),
        *(() if options.strategy is None else ("-s", options.strategy)),
        *(() if options.config is None else ("-c", options.config)),
        *(word for text in options.overrides for word in ("--set", text)),
        *("--nnodes", str(options.nnodes), "--nproc", nproc, "--run-dir", run_dir, "--output", options.output),
        *(("-m",) if options.module else ()),
        *(options.script, *options.arguments),
    )


def _check_no_secret(options: LaunchOptions) -> None:
    words = _words(options, options.nproc, "")
    for word, masked in zip(words, mask_arguments(words), strict=True):
        if word != masked:
            raise LaunchError(
                f"the script's arguments or --set hold a secret ({mask_text(masked)}), which would stand in the manifest",
                hint="--export NAME   takes a variable from a Kubernetes secret; the script or the file reads it",
            )


def _check_folder(request: Request, settings: _Settings) -> None:
    if settings.claim is not None and not PurePosixPath(request.run_dir).is_relative_to(settings.mount):
        raise LaunchError(
            f"the run's folder is {str(request.run_dir)!r}, but the claim {settings.claim!r} is mounted at "
            f"{str(settings.mount)!r}: checkpoints and logs would be lost with the pods",
            hint=f"--run-dir {settings.mount}/runs/{request.name}   or --job claim={settings.claim}:FOLDER",
        )


def _pods(request: Request, settings: _Settings, name: str) -> Pods:
    options, machine = request.options, request.machine
    directory = settings.directory
    if directory is None and settings.claim is not None and machine.directory.is_relative_to(settings.mount):
        directory = str(machine.directory)
    return Pods(
        name=name,
        namespace=settings.namespace,
        image=settings.image,
        words=_words(options, str(request.nproc), str(request.run_dir)),
        nnodes=request.nnodes,
        nproc=request.nproc,
        port=options.master_port or _PORT,
        max_restarts=options.max_restarts,
        end_s=round(request.grace_s + 0.5) + _MARGIN_S,
        variables=_variables(request),
        secret=settings.secret,
        limits=settings.limits,
        directory=directory,
        claim=settings.claim,
        mount=str(settings.mount),
        shared_memory=settings.shared_memory,
        service_account=settings.service_account,
    )


def _variables(request: Request) -> dict[str, str | None]:
    """The exported ones; None for a secret, in name or in value (``https://user:password@host``)."""
    asked = request.options.export
    names = [
        name
        for name in exported_names(request.machine.environ, (), asked)
        if name != LAUNCH_VARIABLE and (name in asked or not _PLACES.fullmatch(name))
    ]
    there = {**exported(request.machine.environ, names), **request.network()}
    missing = [name for name in asked if name not in there and not is_secret(name)]
    if missing:
        raise LaunchError(f"--export {missing[0]} was set, but there is no such variable", hint=f"{missing[0]}=... ")
    secrets = [name for name in asked if is_secret(name)]
    return {
        name: None if is_secret(name) or mask_text(there[name]) != there[name] else there[name]
        for name in sorted({*there, *secrets})
    }


def _notes(request: Request, settings: _Settings, pods: Pods, files: Sequence[PlannedFile]) -> list[str]:
    space = ("-n", settings.namespace) if settings.namespace is not None else ()
    lines = [shlex.join(("kubectl", "apply", "-f", file.path)) for file in files]
    notes = ["manifests for Kubernetes; to start the job: " + "   or ".join(lines)]
    secrets = [name for name, value in pods.variables.items() if value is None]
    if secrets:
        line = shlex.join(("kubectl", *space, "create", "secret", "generic", pods.secret))
        values = " ".join(f'--from-literal={name}="${name}"' for name in secrets)
        notes.append(f"{', '.join(secrets)}: from the secret {pods.secret}, once by: {line} {values}")
    if settings.claim is None:
        notes.append(
            "no --job claim=NAME:FOLDER is set: the run's folder is lost with the pods unless the image has it"
        )
    if "nvidia.com/gpu" not in settings.limits:
        notes.append("no --job gpus=N is set: the pods run on CPUs")
    return notes
