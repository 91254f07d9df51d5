"""What a Horovod build on this machine would be made with and for; found in a moment, without importing torch."""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from distkit.errors import StrategyUnavailable
from distkit.launch.hardware import mpi_version

__all__ = ["HOROVOD", "BuildOptions", "Toolchain", "find_toolchain"]

HOROVOD = "0.28.1"
"""The version that is built: the newest, of June 2023."""

_OLDEST_CMAKE = (3, 13)

_ARCH_FLAGS = {"f16c": "-mf16c", "avx": "-mavx", "fma": "-mfma"}
"""CPU features that Horovod's half-precision sums use where the build host has them (its CMakeLists.txt, ARCH_FLAGS)."""

_BUILD_VARIABLES = (
    "HOROVOD_CUDA_HOME",
    "HOROVOD_NCCL_HOME",
    "HOROVOD_NCCL_INCLUDE",
    "HOROVOD_NCCL_LIB",
    "HOROVOD_NCCL_LINK",
    "HOROVOD_BUILD_ARCH_FLAGS",
    "HOROVOD_BUILD_CUDA_CC_LIST",
    "CXXFLAGS",
)
"""Variables of the user that change what is built."""


@dataclass(frozen=True)
class BuildOptions:
    """What was asked for.

    Args:
        mpi: ``yes``, ``no``, or ``auto``: when a compiler wrapper and a launcher are found.
        nccl: ``yes``, ``no``, or ``auto``: when torch is a CUDA build.
        jobs: Compilers that run at the same time; None is one a core, fewer where memory is short.
        constraints: A pip constraints file, or None.
        rebuild: Build even if the wheel is cached.
    """

    mpi: str = "auto"
    nccl: str = "auto"
    jobs: int | None = None
    constraints: Path | None = None
    rebuild: bool = False


@dataclass(frozen=True)
class Toolchain:
    """Everything that a build depends on.

    Args:
        compiler: The C++ compiler and its fixed arguments.
        standard: The C++ standard that torch's headers ask for, such as 17.
        cmake: Path of a CMake that is new enough; None has one installed for the build alone.
        torch: torch's version with its local part, such as ``2.13.0+cpu``.
        cxx11_abi: Whether torch was built with the new ABI of libstdc++.
        mpi: Such as ``openmpi4.1.4``; None builds without MPI.
        cuda: torch's CUDA version when NCCL is built in; None builds for CPU tensors only.
        nccl_package: Folder of pip's NCCL (``include`` and ``lib`` in it), where that is the one to use.
        arch_flags: Compiler flags for CPU features.
        variables: The user's own build variables.
    """

    compiler: tuple[str, ...]
    standard: int
    cmake: str | None
    torch: str
    cxx11_abi: bool
    mpi: str | None
    cuda: str | None
    nccl_package: Path | None
    arch_flags: tuple[str, ...]
    variables: Mapping[str, str]

    @property
    def key(self) -> str:
        """Name of the wheel's folder in the cache: equal keys, equal wheels."""
        python = f"cp{sys.version_info.major}{sys.version_info.minor}"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        parts = [f"horovod-{HOROVOD}", python, platform, f"torch{self.torch}", f"abi{int(self.cxx11_abi)}", "gloo"]
        parts += [part for part in (self.mpi, f"nccl.cuda{self.cuda}" if self.cuda else None) if part]
        own = "".join(f"{name}={value}\n" for name, value in sorted(self.variables.items()))
        details = f"{self.standard} {' '.join(self.arch_flags)}\n{own}"
        return "-".join([*parts, hashlib.sha256(details.encode()).hexdigest()[:8]])

    def describe(self) -> str:
        """One line for people."""
        operations = ["gloo", *([self.mpi] if self.mpi else []), *([f"nccl (CUDA {self.cuda})"] if self.cuda else [])]
        return f"horovod {HOROVOD} for torch {self.torch} with {', '.join(operations)}"


def find_toolchain(options: BuildOptions, environ: Mapping[str, str] | None = None) -> Toolchain:
    """Look at this machine and refuse what can't be built.

    Args:
        options: What was asked for.
        environ: Variables; None is this process's.

    Raises:
        StrategyUnavailable: torch, a compiler, MPI or CUDA is missing; the hint is the line that installs it.
    """
    env = os.environ if environ is None else environ
    folder = _torch_folder()
    version = runpy.run_path(str(folder / "version.py"))
    standard = _standard(folder)
    cuda = _cuda(options.nccl, version.get("cuda"), env)
    return Toolchain(
        compiler=_compiler(standard, env),
        standard=standard,
        cmake=_cmake(env),
        torch=str(version["__version__"]),
        cxx11_abi=_cxx11_abi(folder),
        mpi=_mpi(options.mpi, env),
        cuda=cuda,
        nccl_package=_nccl_package(env) if cuda else None,
        arch_flags=_arch_flags(),
        variables={name: env[name] for name in _BUILD_VARIABLES if env.get(name)},
    )


def install_line(apt: str, dnf: str) -> str:
    """The line that installs system packages here, as far as it can be told."""
    root = "" if hasattr(os, "geteuid") and os.geteuid() == 0 else "sudo "
    if shutil.which("apt-get"):
        return f"{root}apt-get install -y {apt}"
    if shutil.which("dnf"):
        return f"{root}dnf install -y {dnf}"
    return f"install {apt} (Debian's names) with this system's package manager"


def _torch_folder() -> Path:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise StrategyUnavailable(
            f"Horovod is compiled against torch, which is not installed for {sys.executable}",
            hint=f"{sys.executable} -m pip install torch",
        )
    return Path(spec.origin).parent


def _standard(torch: Path) -> int:
    """The C++ standard that torch's headers insist on: they compare ``__cplusplus`` with 201703L, 202002L ..."""
    header = torch / "include/torch/csrc/api/include/torch/all.h"
    found = re.search(r"__cplusplus < (20\d\d)\d\dL", header.read_text()) if header.is_file() else None
    return int(found.group(1)) % 100 if found else 17


def _compiler(standard: int, env: Mapping[str, str]) -> tuple[str, ...]:
    """CXX where it is set, else what is found; it must know the standard."""
    line = install_line("g++ make", "gcc-c++ make")
    if env.get("CXX"):
        words = shlex.split(env["CXX"])
    else:
        words = [next((name for name in ("g++", "clang++", "c++") if shutil.which(name, path=env.get("PATH"))), "")]
    program = shutil.which(words[0], path=env.get("PATH")) if words and words[0] else None
    if program is None:
        was = f"CXX was set to {env['CXX']!r}, which is not there" if env.get("CXX") else "no C++ compiler was found"
        raise StrategyUnavailable(f"Horovod is compiled on this machine, but {was}", hint=line)
    compiler = (program, *words[1:])
    test = [*compiler, f"-std=gnu++{standard}", "-fsyntax-only", "-x", "c++", os.devnull]
    done = subprocess.run(test, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["it ended with an error"])[0]
        raise StrategyUnavailable(
            f"torch's headers need C++{standard}, but {' '.join(compiler)} can't compile that: {said}",
            hint=f"CXX=/path/to/a/newer/g++   or {line}",
        )
    if shutil.which("make", path=env.get("PATH")) is None:
        raise StrategyUnavailable("Horovod is built with make, which was not found", hint=line)
    return compiler


def _cmake(env: Mapping[str, str]) -> str | None:
    for program in (env.get("HOROVOD_CMAKE"), shutil.which("cmake", path=env.get("PATH"))):
        if not program:
            continue
        try:
            said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            continue
        found = re.search(r"version (\d+)\.(\d+)", said)
        if found and (int(found.group(1)), int(found.group(2))) >= _OLDEST_CMAKE:
            return program
    return None


def _cxx11_abi(torch: Path) -> bool:
    """torch tells by a function, after an import of seconds; its smallest library shows it by its symbols' names."""
    library = torch / "lib" / "libc10.so"
    return not library.is_file() or b"__cxx1112basic_string" in library.read_bytes()


def _mpi(wanted: str, env: Mapping[str, str]) -> str | None:
    """Name and version of the MPI that is found first in PATH."""
    if wanted == "no":
        return None
    path = env.get("PATH")
    missing = [name for name in ("mpicxx", "mpirun") if shutil.which(name, path=path) is None]
    if missing:
        if wanted == "auto":
            return None
        raise StrategyUnavailable(
            f"MPI was asked for, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not there",
            hint=install_line("libopenmpi-dev openmpi-bin", "openmpi-devel")
            + "   (and where a module system is used: module load openmpi)",
        )
    return mpi_version(shutil.which("mpirun", path=path) or "mpirun") or "mpi"


def _cuda(wanted: str, version: str | None, env: Mapping[str, str]) -> str | None:
    """torch's CUDA version if NCCL is to be built in."""
    if wanted == "no" or (version is None and wanted == "auto"):
        return None
    if version is None:
        raise StrategyUnavailable("NCCL was asked for, but the installed torch has no CUDA", hint="--nccl no")
    homes = [env.get("HOROVOD_CUDA_HOME"), env.get("CUDA_HOME"), env.get("CUDA_PATH"), "/usr/local/cuda"]
    if shutil.which("nvcc", path=env.get("PATH")) is None and not any(
        home and (Path(home) / "bin/nvcc").is_file() for home in homes
    ):
        raise StrategyUnavailable(
            f"torch is built for CUDA {version}, so Horovod needs the CUDA toolkit to handle its tensors, but nvcc is not there",
            hint=f"install the CUDA {version} toolkit and set CUDA_HOME   or --nccl no   for CPU training only",
        )
    return version


def _nccl_package(env: Mapping[str, str]) -> Path | None:
    """pip's NCCL, which torch itself uses; None leaves it to CMake to find one."""
    if any(env.get(name) for name in ("HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB")):
        return None
    spec = find_spec("nvidia.nccl") if find_spec("nvidia") else None
    places: Sequence[str] = list(spec.submodule_search_locations or []) if spec is not None else []
    found = (Path(place) for place in places if (Path(place) / "include/nccl.h").is_file())
    return next(found, None)


def _arch_flags() -> tuple[str, ...]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return tuple(flag for feature, flag in _ARCH_FLAGS.items() if feature in line.split())
