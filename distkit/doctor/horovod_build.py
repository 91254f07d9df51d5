"""Builds and installs Horovod against the torch that is installed, without touching a line of its source.

Horovod 0.28.1 asks its compiler for C++14 and CMake for policies of version 3.5; today's torch headers need C++17 or
newer, and today's CMake refuses so old policies. Both are settled from outside: the compiler is a two-line script that
appends a later ``-std`` (the last one wins), and a variable tells CMake which policies to assume. The build runs in a
virtual environment of its own, with a setuptools that still runs ``setup.py``, and sees the packages of the target
environment, so nothing there is changed but Horovod itself.

The wheel is kept, under a name with all that it depends on: the next installation of the same takes a second.

``python -m distkit.doctor.horovod_build --help``
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from distkit.doctor.horovod_toolchain import HOROVOD, BuildOptions, Toolchain, find_toolchain
from distkit.doctor.long_command import failing_line, run_logged
from distkit.errors import DistkitError, StrategyUnavailable
from distkit.memory import free_on_host

__all__ = ["BuildOptions", "cache_folder", "install_horovod", "main"]

_NEEDS = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi")
"""What Horovod's metadata asks for at run time; its ``setup.py`` wants them during the build, too."""

_BUILD_NEEDS = ("setuptools<80", "wheel")
"""setuptools 80 dropped what Horovod's ``setup.py`` relies on (setup_requires, and distutils for Python 3.12)."""

_BYTES_A_JOB = 2 * 1024**3
"""Memory that one compiler process takes over torch's headers, at most."""

_CHECK = """
import horovod.torch as hvd, torch
hvd.init()
assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="check").tolist() == [1.0, 1.0]
names = [name for name in ("gloo", "mpi", "nccl") if getattr(hvd, name + "_built")()]
print("operations:", ", ".join(names))
hvd.shutdown()
"""

Say = Callable[[str], None]


def cache_folder() -> Path:
    """Where wheels are kept: DISTKIT_CACHE, else ``distkit`` in the user's cache folder."""
    own = os.environ.get("DISTKIT_CACHE")
    base = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distkit"
    return base / "wheels"


def install_horovod(options: BuildOptions, say: Say) -> str:
    """Build Horovod unless the wheel is cached, install it for this interpreter unless it is there, and try it.

    Args:
        options: What it is to be built with.
        say: Is told in short lines what happens.

    Returns:
        One line: what is installed now.

    Raises:
        StrategyUnavailable: Something is missing, or the build failed; the message names the failing line and the log.
    """
    tools = find_toolchain(options)
    folder = cache_folder() / tools.key
    if not options.rebuild and _installed_from() == folder:
        return f"{tools.describe()} is installed"
    with _locked(folder, say):
        wheel = None if options.rebuild else _cached_wheel(folder)
        if wheel is None:
            wheel = _build(tools, options, folder, say)
        else:
            say(f"{tools.describe()}: the wheel is cached in {folder}")
    _install(wheel, options)
    return f"{tools.describe()} is installed; {_try_it()}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of ``scripts/install-horovod``.

    Returns:
        0, or 1 when it can't be built.
    """
    parsed = _parse(argv)
    options = BuildOptions(parsed.mpi, parsed.nccl, parsed.jobs, parsed.constraints, parsed.rebuild)
    try:
        if parsed.optional:
            try:
                find_toolchain(options)
            except StrategyUnavailable as error:
                _say(f"left out: {error.message}")
                return 0
        _say(install_horovod(options, _say))
    except DistkitError as error:
        _say(str(error))
        return 1
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"install-horovod: {line}\n")
    sys.stderr.flush()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/install-horovod",
        description="Builds Horovod for the torch that is installed and installs it. The wheel is kept in "
        "~/.cache/distkit/wheels (or DISTKIT_CACHE), so it is built once.",
        epilog="Example: scripts/install-horovod --mpi yes --jobs 4",
    )
    choices = ("auto", "yes", "no")
    parser.add_argument("--mpi", choices=choices, default="auto", help="MPI beside Gloo; auto: when it is found")
    parser.add_argument("--nccl", choices=choices, default="auto", help="GPU tensors; auto: when torch has CUDA")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at the same time (default: one a core)")
    parser.add_argument("--constraints", type=Path, metavar="FILE", help="pip constraints to keep to")
    parser.add_argument("--rebuild", action="store_true", help="build even if the wheel is cached")
    parser.add_argument(
        "--optional", action="store_true", help="succeed with one line where a compiler or the like is missing"
    )
    return parser.parse_args(argv)


# -- the build ----------------------------------------------------------------------------------------------------------


def _build(tools: Toolchain, options: BuildOptions, folder: Path, say: Say) -> Path:
    """Build in a temporary folder beside the cache, and move the wheel there in one step."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.parent / f"{tools.key}.log"
    log.write_text(f"{tools.describe()}\n{tools}\n", encoding="utf-8")
    jobs = options.jobs or _jobs()
    say(f"building {tools.describe()}; {jobs} compiler{'s' if jobs > 1 else ''} at a time, log: {log}")
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder.parent) as name:
        work = Path(name)
        python = _build_environment(tools, options, work, log)
        command = [str(python), "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "--no-cache-dir"]
        command += ["--no-binary", "horovod", "--wheel-dir", str(work / "wheel"), f"horovod=={HOROVOD}"]
        environ = {**os.environ, **_build_variables(tools, work, jobs)}
        _run("horovod: compiling (some minutes)", command, log, environ)
        (work / "wheel").chmod(0o755)
        shutil.copy(log, work / "wheel" / "build.log")
        shutil.rmtree(folder, ignore_errors=True)
        (work / "wheel").replace(folder)
    log.unlink()
    wheel = _cached_wheel(folder)
    assert wheel is not None
    return wheel


def _build_environment(tools: Toolchain, options: BuildOptions, work: Path, log: Path) -> Path:
    """A virtual environment with the build's own tools in front of the target's packages; its interpreter."""
    place = work / "venv"
    _run("horovod: build environment", [sys.executable, "-m", "venv", str(place)], log)
    python = place / "bin" / "python"
    needs = [*_BUILD_NEEDS, *_NEEDS, *(["cmake"] if tools.cmake is None else [])]
    _run("horovod: build tools", [str(python), "-m", "pip", "install", *_constraints(options), *needs], log)
    # Only now the target's packages, so that pip left them alone. A .pth file puts them behind the build's own.
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    others = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    (own / "zz_target.pth").write_text("\n".join(others) + "\n")
    return python


def _build_variables(tools: Toolchain, work: Path, jobs: int) -> dict[str, str]:
    compiler = work / "c++"
    compiler.write_text(
        "#!/bin/sh\n"
        "# Horovod 0.28.1 sets C++14 (its CMakeLists.txt); torch's headers need more, and the last -std wins.\n"
        "# -g0: debug information would make the wheel fifteen times as large.\n"
        f'exec {shlex.join(tools.compiler)} "$@" -std=gnu++{tools.standard} -g0\n'
    )
    compiler.chmod(0o755)
    variables = {
        "CXX": str(compiler),
        "MAKEFLAGS": f"-j{jobs}",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses the bundled Gloo's cmake_minimum_required otherwise
        "HOROVOD_CMAKE": tools.cmake or str(work / "venv" / "bin" / "cmake"),
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if tools.mpi else "HOROVOD_WITHOUT_MPI": "1",
        "PATH": f"{work / 'venv' / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    if tools.arch_flags:
        variables["HOROVOD_BUILD_ARCH_FLAGS"] = " ".join(tools.arch_flags)
    if tools.cuda:
        variables["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    if tools.nccl_package is not None:
        variables.update(_nccl_variables(tools.nccl_package, work))
    return {**variables, **tools.variables, "CXX": str(compiler)}


def _nccl_variables(package: Path, work: Path) -> dict[str, str]:
    """pip's NCCL has no ``libnccl.so`` to link with, only ``libnccl.so.2``."""
    links = work / "nccl"
    links.mkdir()
    (links / "libnccl.so").symlink_to(package / "lib" / "libnccl.so.2")
    return {
        "HOROVOD_NCCL_INCLUDE": str(package / "include"),
        "HOROVOD_NCCL_LIB": str(links),
        "HOROVOD_NCCL_LINK": "SHARED",
    }


def _run(what: str, command: Sequence[str], log: Path, environ: dict[str, str] | None = None) -> None:
    """One step of the build.

    Raises:
        StrategyUnavailable: It failed; names the line of the log.
    """
    # English messages, whatever the user reads: the failing line is found by its words.
    if run_logged(what, command, log=log, environ={**(environ or os.environ), "LC_ALL": "C"}) == 0:
        return
    found = failing_line(log)
    where = f"{log}:{found.number}: {found.text[:300]}" if found else f"{log} is empty"
    if found and "Killed" in found.text:
        hint = "the compiler ran out of memory: scripts/install-horovod --jobs 1"
    elif found and ("No matching distribution" in found.text or "Could not find" in found.text):
        hint = "is the package index reachable? pip download --no-deps --no-binary horovod horovod==" + HOROVOD
    else:
        hint = f"less {log}   shows what came before; scripts/install-horovod builds again"
    raise StrategyUnavailable(f"Horovod couldn't be built: {where}", hint=hint)


def _jobs() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = free_on_host()
    return cores if free is None else max(1, min(cores, free // _BYTES_A_JOB))


# -- the cache and the installation -------------------------------------------------------------------------------------


@contextmanager
def _locked(folder: Path, say: Say) -> Iterator[None]:
    """One build of a kind at a time; a second one waits and finds the wheel."""
    import fcntl

    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("the same is being built already; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cached_wheel(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("horovod-*.whl"))), None)


def _installed_from() -> Path | None:
    """The cache folder whose wheel is installed for this interpreter, by what pip noted about it (PEP 610)."""
    try:
        text = distribution("horovod").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    address = json.loads(text).get("url", "") if text else ""
    if not address.startswith("file://"):
        return None
    from urllib.request import url2pathname

    return Path(url2pathname(address.removeprefix("file://"))).parent


def _install(wheel: Path, options: BuildOptions) -> None:
    """Without dependencies, so that pip can't exchange torch; what Horovod imports is added where it is missing.

    Raises:
        StrategyUnavailable: pip failed.
    """
    if find_spec("pip") is None:
        raise StrategyUnavailable(
            f"{sys.executable} has no pip", hint=f"{sys.executable} -m ensurepip   or uv pip install --no-deps {wheel}"
        )
    missing = [name for name in _NEEDS if not _has(name)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *_constraints(options)]
    steps = [[*pip, *missing]] if missing else []
    for command in [*steps, [*pip, "--no-deps", "--force-reinstall", str(wheel)]]:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = next((line for line in done.stderr.splitlines() if "ERROR" in line), done.stderr.strip()[-300:])
            raise StrategyUnavailable(f"pip couldn't install {command[-1]}: {said}", hint=shlex.join(command))


def _has(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _constraints(options: BuildOptions) -> list[str]:
    return ["-c", str(options.constraints)] if options.constraints is not None else []


def _try_it() -> str:
    """Load it in a process of its own and reduce a tensor.

    Raises:
        StrategyUnavailable: It can't be loaded, for example because an MPI library is gone.
    """
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "OMPI_", "PMI"))}
    environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")
    done = subprocess.run([sys.executable, "-c", _CHECK], capture_output=True, text=True, env=environ, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise StrategyUnavailable(
            f"Horovod was installed, but doesn't run: {said}", hint="scripts/install-horovod --rebuild"
        )
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())
