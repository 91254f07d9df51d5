"""The plan is decided by pure functions, and refuses what can't work."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest

from distkit.config import load_config
from distkit.config.launchline import VARIABLE, LaunchSettings
from distkit.errors import ConfigError, LaunchError
from distkit.launch.build import build_plan
from distkit.launch.hardware import visible_gpus
from distkit.launch.machine import Machine
from distkit.launch.plan import LaunchOptions, LaunchPlan
from distkit.launch.ports import derive_port


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "gpt").mkdir()
    for name in ("script.py", "gpt/train.py"):
        (tmp_path / name).write_text("")
    return Machine(
        directory=tmp_path,
        environ={},
        python="python",
        host="host0",
        cores=8,
        gpus=lambda: 0,
        system="linux",
        now="20260102-030405",
        claim=lambda folder: not folder.exists(),
    )


def plan(machine: Machine, script: str = "script.py", **options: object) -> LaunchPlan:
    return build_plan(LaunchOptions(script=script, **options), machine)  # type: ignore[arg-type]


def test_command_environment_and_folder(machine: Machine) -> None:
    made = plan(machine, strategy="ddp", nproc="2", arguments=("--lr", "a b"), max_restarts=3, output="all")
    (host,) = made.hosts
    run_dir = str(machine.directory / "runs" / "script-20260102-030405")
    assert made.run_dir == run_dir
    assert host.command == (
        *("python", "-m", "distkit.launch.agent", "--run-dir", run_dir, "--grace-s", "30"),
        *("--step-s", "600", "--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "3"),
        *("--standalone", "--rdzv-id", "script", "--rdzv-conf", "timeout=300"),
        *("-m", "distkit.launch.worker", "--run-dir", run_dir, "--output", "all"),
        *(str(machine.directory / "script.py"), "--lr", "a b"),
    )
    assert {k: v for k, v in host.environment.items() if k != VARIABLE} == {
        "OMP_NUM_THREADS": "4",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    assert made.settings.overrides == ["strategy=ddp", f"run_dir={run_dir}"]
    assert made.summary() == f"ddp, 1 node x 2 processes = 2, run folder {run_dir}"


def test_the_users_variables_win(machine: Machine) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "1,3", "OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth0"}
    made = plan(dataclasses.replace(machine, environ=environ), nproc="2")
    assert set(made.hosts[0].environment) == {VARIABLE, "NCCL_SOCKET_IFNAME"}


def test_shell_line_is_the_same_command(machine: Machine) -> None:
    made = plan(machine, strategy="ddp", arguments=("it's", "$HOME", "a b", "*"))
    words = shlex.split(made.hosts[0].shell())
    assert words[:4] == ["cd", str(machine.directory), "&&", "env"]
    assert tuple(words[4 + len(made.hosts[0].environment) :]) == made.hosts[0].command
    assert f"{VARIABLE}={made.settings.to_json()}" in words


def test_secrets_are_masked_in_what_is_printed(machine: Machine) -> None:
    url, key = "engine.deepspeed.url=https://me:hunter2@host/x", "engine.deepspeed.api_key=sk-123"
    made = plan(machine, overrides=(url, key, "engine.deepspeed.max_tokens=77"), arguments=("--hub-token", "hf-456"))
    for text in (made.hosts[0].shell(), str(made.as_dict())):
        assert "hunter2" not in text and "sk-123" not in text and "hf-456" not in text and "max_tokens=77" in text
    assert "hunter2" in made.hosts[0].environment[VARIABLE]


@pytest.mark.parametrize("folder", ["plain", "with space", "a: b #c", "it's", "tab\tand = sign"])
def test_run_dir_reaches_the_config(machine: Machine, folder: str) -> None:
    made = plan(machine, run_dir=folder, config=None)
    settings = LaunchSettings.from_env(made.hosts[0].environment)
    config = load_config(overrides=settings.overrides).config
    assert config.run_dir == made.run_dir == str(machine.directory / folder)


def test_config_file_decides_too(machine: Machine) -> None:
    text = "strategy: ddp\nname: my run\nrun_dir: out\ntimeouts: {grace_s: 5, start_s: 60}\n"
    (machine.directory / "c.yaml").write_text(text)
    made = plan(machine, config="c.yaml", nproc="2")
    assert made.strategy == "ddp" and made.run_dir == str(machine.directory / "out")
    assert made.settings.config == str(machine.directory / "c.yaml")
    command = " ".join(made.hosts[0].command)
    assert "--grace-s 5 " in command and "timeout=60" in command and "--rdzv-id my-run " in command
    assert plan(machine, config="c.yaml", strategy="single").strategy == "single"


def test_a_script_called_train_has_its_folders_name(machine: Machine) -> None:
    assert Path(plan(machine, "gpt/train.py").run_dir).name.startswith("gpt-")
    assert Path(plan(machine, "gpt.train", module=True).run_dir).name.startswith("gpt-")


def test_two_runs_in_one_second_get_two_folders(machine: Machine) -> None:
    first = plan(machine).run_dir
    Path(first).mkdir(parents=True)
    assert plan(machine).run_dir == f"{first}-2"


def test_nproc_auto(machine: Machine) -> None:
    gpus = dataclasses.replace(machine, gpus=lambda: 4)
    assert plan(machine, strategy="ddp").nproc == 1
    assert plan(gpus, strategy="ddp").nproc == 4
    assert plan(gpus, strategy="ddp", overrides=("device=cpu",)).nproc == 1
    assert plan(gpus, strategy="dp").nproc == 1
    unknown = plan(gpus)
    assert unknown.nproc == 1 and "-s ddp" in unknown.notes[0]
    with pytest.raises(LaunchError, match="4 GPUs are visible"):
        plan(gpus, strategy="ddp", nproc="5")


def test_options_after_the_script_are_noted(machine: Machine) -> None:
    (note,) = plan(machine, arguments=("--lr", "1", "--nproc=2", "-s")).notes
    assert note.startswith("--nproc, -s stands after the script")
    assert plan(machine, arguments=("--lr", "1")).notes == ()


def test_a_mistyped_strategy_of_several_processes(machine: Machine) -> None:
    for nproc, wanted in (("1", "dp"), ("2", "ddp")):
        with pytest.raises(ConfigError) as error:
            plan(machine, strategy="dpp", nproc=nproc)
        assert error.value.hint == f"--strategy {wanted}"


def test_accelerates_file_says_how_many_and_where(machine: Machine) -> None:
    """Unless the launch line does."""
    file = machine.directory / "accelerate.yaml"
    file.write_text(
        "{compute_environment: LOCAL_MACHINE, distributed_type: MULTI_GPU, num_processes: 8, num_machines: 2, "
        "machine_rank: 1, main_process_ip: host0, main_process_port: 1234, gpu_ids: '0,1,2,3'}"
    )
    settings = {"strategy": "accelerate", "overrides": (f"engine.accelerate.config_file={file}",), "run_dir": "run"}
    made = plan(machine, **settings)
    assert (made.strategy, made.nnodes, made.nproc) == ("ddp", 2, 4)
    assert "meeting at host0:1234" in made.notes[-1] and "node 1" in made.notes[-1]
    assert made.hosts[0].environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    mine = plan(machine, **settings, nproc="2", nnodes=3, node_rank=0, master_addr="here")
    assert (mine.nnodes, mine.nproc) == (3, 2) and "meeting at here" in mine.notes[-1]


def test_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distkit.launch.hardware._NVIDIA_DRIVER", tmp_path)
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
    seen = {None: 4, "1,3": 2, "": 0, "-1": 0, "0,-1,1": 1, "GPU-1a,GPU-2b,MIG-3c": 3, "0,1,2,3,4,5": 4}
    for value, count in seen.items():
        assert visible_gpus({} if value is None else {"CUDA_VISIBLE_DEVICES": value}) == count, value


def test_several_nodes(machine: Machine) -> None:
    made = plan(machine, strategy="ddp", nproc="4", nnodes=2, node_rank=1, master_addr="host0", run_dir="r")
    assert made.summary().startswith("ddp, 2 nodes x 4 processes = 8, ")
    port = derive_port("script")
    assert 20000 <= port < 30000
    command = " ".join(made.hosts[0].command)
    assert f"--node-rank 1 --master-addr host0 --master-port {port} " in command
    assert "GLOO_SOCKET_IFNAME" not in made.hosts[0].environment


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"strategy": "dpd"}, ConfigError, "dpd.*\nHint: --strategy dp"),
        ({"overrides": ("optim.clip_nrom=1",)}, ConfigError, "clip_nrom.*\nHint: .*optim.clip_norm"),
        ({"config": "no.yaml"}, ConfigError, "no.yaml"),
        ({"strategy": "single", "nproc": "2"}, ConfigError, "one process"),
        ({"nproc": "0"}, LaunchError, "--nproc was set to '0'"),
        ({"nproc": "two"}, LaunchError, "--nproc was set to 'two'"),
        ({"script": "scrpt.py"}, LaunchError, "scrpt.py.*\nHint: did you mean script.py"),
        ({"script": "nowhere.x", "module": True}, LaunchError, "nowhere"),
        ({"launcher": "torchrn"}, LaunchError, "Hint: --launcher torchrun"),
        ({"nnodes": 2}, LaunchError, "--node-rank 0 --master-addr"),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "h"}, LaunchError, "--node-rank was set to 2"),
        ({"nnodes": 2, "node_rank": 0, "master_addr": "h"}, ConfigError, "--run-dir runs/NAME"),
        ({"run_dir": "script.py"}, LaunchError, "is a file"),
        ({"meet_at": "h", "run_dir": "r"}, LaunchError, "--meet-at was set to 'h'; valid: HOST:PORT"),
        ({"meet_at": "h 0:1", "run_dir": "r"}, LaunchError, "valid: HOST:PORT"),
        (
            {"launcher": "mpirun", "job": ("time=1",)},
            LaunchError,
            "doesn't take it\nHint: --launcher slurm, kubernetes",
        ),
        ({"launcher": "mpirun", "nnodes": 2, "min_nodes": 1}, LaunchError, "--nnodes 1:2 was set, but not which hosts"),
    ],
)
def test_refusals(machine: Machine, options: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        plan(machine, **options)
    assert not (machine.directory / "runs").exists()
