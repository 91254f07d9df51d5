"""Building Horovod: what is decided before, what is said when it fails, and the cache. No test compiles all of it."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distkit.doctor import horovod_build
from distkit.doctor.horovod_build import BuildOptions, install_horovod, main
from distkit.doctor.horovod_toolchain import Toolchain, find_toolchain
from distkit.doctor.long_command import failing_line, run_logged
from distkit.errors import StrategyUnavailable

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or shutil.which("make") is None, reason="no compiler: apt-get install g++ make"
)


@pytest.fixture
def tools() -> Toolchain:
    return Toolchain(
        compiler=("/usr/bin/g++",),
        standard=17,
        cmake="/usr/bin/cmake",
        torch="2.13.0+cpu",
        cxx11_abi=True,
        mpi=None,
        cuda=None,
        nccl_package=None,
        arch_flags=("-mavx",),
        variables={},
    )


def programs(folder: Path, **scripts: str) -> dict[str, str]:
    """An environment in which only these programs are found."""
    folder.mkdir(exist_ok=True)
    for name, text in scripts.items():
        path = folder / name.replace("gxx", "g++")
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    return {"PATH": str(folder)}


# -- what it is built with ----------------------------------------------------------------------------------------------


def test_the_key_names_all_that_the_wheel_depends_on(tools: Toolchain) -> None:
    assert tools.key.startswith("horovod-0.28.1-cp3") and "-torch2.13.0+cpu-abi1-gloo-" in tools.key
    changes: list[dict[str, object]] = [
        {"torch": "2.14.0+cpu"},
        {"cxx11_abi": False},
        {"mpi": "openmpi4.1.4"},
        {"mpi": "openmpi5.0.1"},
        {"cuda": "12.6"},
        {"standard": 20},
        {"arch_flags": ()},
        {"variables": {"CXXFLAGS": "-O1"}},
    ]
    keys = {dataclasses.replace(tools, **change).key for change in changes}  # type: ignore[arg-type]
    assert len(keys | {tools.key}) == len(changes) + 1
    assert dataclasses.replace(tools, compiler=("clang++",), cmake=None).key == tools.key


def test_the_machine(tmp_path: Path) -> None:
    env = programs(tmp_path / "bin", gxx="exit 0", make="", mpicxx="", mpirun="echo 'mpirun (Open MPI) 4.1.4'")
    found = find_toolchain(BuildOptions(), env)
    import torch

    assert found.torch == torch.__version__ and found.cxx11_abi == torch.compiled_with_cxx11_abi()
    assert found.standard >= 17 and found.mpi == "openmpi4.1.4" and found.cmake is None
    assert find_toolchain(BuildOptions(mpi="no"), env).mpi is None


@pytest.mark.parametrize(
    ("scripts", "options", "message", "hint"),
    [
        ({}, {}, "no C\\+\\+ compiler was found", "install"),
        ({"gxx": "exit 0"}, {}, "make, which was not found", "install"),
        ({"gxx": "echo unknown option -std >&2; exit 1", "make": ""}, {}, "can't compile that: unknown option", "CXX="),
        ({"gxx": "exit 0", "make": ""}, {"mpi": "yes"}, "mpicxx and mpirun are not there", "openmpi"),
        ({"gxx": "exit 0", "make": "", "mpicxx": ""}, {"mpi": "yes"}, "mpirun is not there", "openmpi"),
        ({"gxx": "exit 0", "make": ""}, {"nccl": "yes"}, "(has no CUDA|nvcc is not there)", "--nccl no"),
    ],
)
def test_what_is_missing_is_named_with_the_line_that_installs_it(
    tmp_path: Path, scripts: dict[str, str], options: dict[str, str], message: str, hint: str
) -> None:
    with pytest.raises(StrategyUnavailable, match=message) as raised:
        find_toolchain(BuildOptions(**options), programs(tmp_path / "bin", **scripts))  # type: ignore[arg-type]
    assert raised.value.hint is not None and hint in raised.value.hint


def test_cxx_is_respected(tmp_path: Path) -> None:
    env = {**programs(tmp_path / "bin", make="", ccache="exit 0"), "CXX": "ccache clang++-19"}
    assert find_toolchain(BuildOptions(), env).compiler == (str(tmp_path / "bin/ccache"), "clang++-19")
    with pytest.raises(StrategyUnavailable, match="CXX was set to 'icpx'"):
        find_toolchain(BuildOptions(), {**env, "CXX": "icpx"})


def test_an_old_cmake_is_not_taken(tmp_path: Path) -> None:
    env = programs(tmp_path / "bin", gxx="exit 0", make="", cmake="echo cmake version 3.12.4")
    assert find_toolchain(BuildOptions(), env).cmake is None
    env = programs(tmp_path / "bin", gxx="exit 0", make="", cmake="echo cmake version 4.1.0")
    assert find_toolchain(BuildOptions(), env).cmake == str(tmp_path / "bin/cmake")


@needs_compiler
def test_the_compilers_last_standard_wins(tmp_path: Path, tools: Toolchain) -> None:
    """Horovod's own -std=c++14 stands before; C++17 code must compile."""
    real = dataclasses.replace(tools, compiler=(shutil.which("g++") or "g++",))
    variables = horovod_build._build_variables(real, tmp_path, jobs=3)
    assert variables["MAKEFLAGS"] == "-j3" and variables["HOROVOD_WITHOUT_MPI"] == "1"
    (tmp_path / "x.cc").write_text("#include <optional>\nint main() { std::optional<int> x = 3; return *x - 3; }\n")
    command = [variables["CXX"], "-g", "-std=c++14", str(tmp_path / "x.cc"), "-o", str(tmp_path / "x")]
    subprocess.run(command, check=True)
    assert subprocess.run([tmp_path / "x"], check=False).returncode == 0


# -- failures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number", "line"),
    [
        (
            "g++ -c a.cc\na.cc:3:9: warning: unused\na.cc:4:1: error: 'foo' was not declared\nmake: *** [a.o] Error 1\n"
            "RuntimeError: CMake failed\nerror: subprocess-exited-with-error\n",
            3,
            "'foo' was not declared",
        ),
        (
            "CMake Error at CMakeLists.txt:1 (x):\n\n  Compatibility with CMake < 3.5 has been removed\n",
            1,
            "Compatibility",
        ),
        ("x\nc++: fatal error: Killed signal terminated program cc1plus\nb.cc:1: error: no\n", 2, "Killed"),
        ("a.o: undefined reference to `f'\ncollect2: error: ld returned 1 exit status\n", 2, "ld returned"),
        ("ERROR: No matching distribution found for horovod==0.28.1\n", 1, "No matching distribution"),
        ("something\nwent wrong\n\n", 2, "went wrong"),
    ],
)
def test_the_failing_line(tmp_path: Path, text: str, number: int, line: str) -> None:
    (tmp_path / "log").write_text(text)
    found = failing_line(tmp_path / "log")
    assert found is not None and found.number == number and line in found.text


@needs_compiler
def test_a_build_that_fails_names_the_line_of_its_log(
    tmp_path: Path, tools: Toolchain, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real compiler's error, by a pip that compiles one broken file."""
    monkeypatch.setenv("DISTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(horovod_build, "find_toolchain", lambda options: tools)
    (tmp_path / "broken.cc").write_text("int main() { return nothing; }\n")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec g++ {tmp_path}/broken.cc -o {tmp_path}/broken\n")
    python.chmod(0o755)
    monkeypatch.setattr(horovod_build, "_build_environment", lambda *arguments: python)
    assert main(["--rebuild"]) == 1
    said = capsys.readouterr().err
    log = tmp_path / "cache" / "wheels" / f"{tools.key}.log"
    number = next(i for i, line in enumerate(log.read_text().splitlines(), 1) if "error:" in line)
    assert f"{log}:{number}: {tmp_path}/broken.cc:1:" in said and "'nothing' was not declared" in said
    assert "failed (exit status 1)" in said and f"Hint: less {log}" in said
    assert not list((tmp_path / "cache" / "wheels").glob("building-*"))


def test_optional_leaves_it_out_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(programs(tmp_path / "bin")["PATH"]))
    monkeypatch.delenv("CXX", raising=False)
    assert main(["--optional"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "install-horovod: left out: Horovod is compiled on this machine, but no C++ compiler was found"
    ]
    assert main([]) == 1
    assert "Hint: " in capsys.readouterr().err


# -- the cache ----------------------------------------------------------------------------------------------------------


def test_a_cached_wheel_is_installed_and_not_built(
    tmp_path: Path, tools: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(horovod_build, "find_toolchain", lambda options: tools)
    monkeypatch.setattr(horovod_build, "_try_it", lambda: "operations: gloo")
    installed: list[Path] = []
    monkeypatch.setattr(horovod_build, "_install", lambda wheel, options: installed.append(wheel))
    wheel = tmp_path / "wheels" / tools.key / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    wheel.parent.mkdir(parents=True)
    wheel.write_text("")
    said: list[str] = []
    assert "is installed; operations: gloo" in install_horovod(BuildOptions(), said.append)
    assert installed == [wheel] and "the wheel is cached" in said[0]
    monkeypatch.setattr(horovod_build, "_installed_from", lambda: wheel.parent)
    assert install_horovod(BuildOptions(), said.append).endswith("is installed")
    assert installed == [wheel]


# -- progress -----------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def __init__(self) -> None:
        super().__init__()
        import pty

        _, self._fd = pty.openpty()


def test_progress_shows_time_percentage_and_the_last_line(tmp_path: Path) -> None:
    screen = Terminal()
    code = "import time; print('[ 45%] Building CXX a.o', flush=True); print('g++ long', flush=True); time.sleep(1.2)"
    status = run_logged("build", [sys.executable, "-c", code], log=tmp_path / "log", screen=screen)
    assert status == 0
    assert "build  0:01  45 %  Building CXX a.o" in screen.getvalue()
    assert screen.getvalue().endswith("build: done after 0:01\n")
    assert "g++ long" in (tmp_path / "log").read_text() and "$ " in (tmp_path / "log").read_text()
    os.close(screen.fileno())


def test_no_escapes_where_there_is_no_terminal(tmp_path: Path) -> None:
    screen = io.StringIO()
    assert run_logged("build", ["sh", "-c", "echo x; exit 3"], log=tmp_path / "log", screen=screen) == 3
    assert screen.getvalue() == "build: failed (exit status 3) after 0:00\n"
