"""Manifests for Kubernetes: checked against the models of the controllers' own packages, and their pods run for real."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from distkit.errors import DistkitError, LaunchError
from distkit.launch.build import build_plan
from distkit.launch.launchers.kubernetes import dns_label
from distkit.launch.machine import Machine
from distkit.launch.plan import LaunchOptions, LaunchPlan
from tests.launch.support import Launch

IMAGE = "image=registry/team/train:1"

FULL = (IMAGE, "claim=team:/", "gpus=4", "cpu=16", "memory=64Gi", "shm=16Gi", "namespace=team", "service_account=me")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "train.py").write_text("")
    return Machine(
        directory=tmp_path,
        environ={
            "WANDB_API_KEY": "hunter2",
            "NCCL_DEBUG": "INFO",
            "HF_ENDPOINT": "https://me:hunter3@host/",
            "PATH": "/usr/bin",
            "PYTHONPATH": "/home/me",
            "CUDA_VISIBLE_DEVICES": "1",
            "TEAM": "$(vision) $$",
        },
        python="python",
        host="host0",
        cores=8,
        gpus=lambda: 1,
        system="linux",
        now="20260102-030405",
        claim=lambda folder: not folder.exists(),
    )


def plan(machine: Machine, job: tuple[str, ...] = (IMAGE,), **options: Any) -> LaunchPlan:
    settings = {"nnodes": 2, "nproc": "4", "strategy": "zero3", "run_dir": "runs/two", **options}
    return build_plan(LaunchOptions(script="train.py", launcher="kubernetes", job=job, **settings), machine)


def manifests(made: LaunchPlan) -> list[dict[str, Any]]:
    return [document for file in made.files for document in yaml.safe_load_all(file.text)]


def of_kind(made: LaunchPlan, kind: str) -> dict[str, Any]:
    (found,) = [manifest for manifest in manifests(made) if manifest["kind"] == kind]
    return found


def jobset_pod(made: LaunchPlan) -> dict[str, Any]:
    (job,) = of_kind(made, "JobSet")["spec"]["replicatedJobs"]
    pod: dict[str, Any] = job["template"]["spec"]["template"]["spec"]
    return pod


# -- schema -------------------------------------------------------------------------------------------------------------


def read_back(manifest: dict[str, Any]) -> dict[str, Any]:
    """Through the models of the packages that the controllers' projects publish; they drop fields that they don't know."""
    if manifest["kind"] == "PyTorchJob":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from kubeflow.training import ApiClient
        client = ApiClient()
        found = client.deserialize(SimpleNamespace(data=json.dumps(manifest)), "KubeflowOrgV1PyTorchJob")
        again: dict[str, Any] = client.sanitize_for_serialization(found)
        return again
    from kubeflow_trainer_api import models

    kinds = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    }
    read: dict[str, Any] = kinds[manifest["kind"]].from_dict(manifest).to_dict()
    return read


@pytest.mark.parametrize("nnodes", [1, 2])
@pytest.mark.parametrize("job", [(IMAGE,), FULL], ids=["least", "all"])
def test_the_controllers_models_know_every_field(machine: Machine, job: tuple[str, ...], nnodes: int) -> None:
    made = plan(machine, job, nnodes=nnodes, max_restarts=3, export=("HUB_TOKEN", "TEAM"))
    found = manifests(made)
    assert [manifest["kind"] for manifest in found] == ["JobSet", "TrainingRuntime", "TrainJob", "PyTorchJob"]
    for manifest in found:
        assert read_back(manifest) == manifest


@pytest.mark.parametrize(
    "kind, path",
    [
        ("JobSet", "spec failurePolicy maxRestarts"),
        ("JobSet", "spec replicatedJobs 0 template spec template spec containers 0 workingDir"),
        ("JobSet", "spec replicatedJobs 0 template spec template spec containers 0 env 1 value"),
        ("TrainingRuntime", "spec mlPolicy torch"),
        (
            "TrainingRuntime",
            "spec template spec replicatedJobs 0 template spec template spec volumes 0 emptyDir medium",
        ),
        ("TrainJob", "spec trainer resourcesPerNode limits"),
        ("TrainJob", "spec trainer numProcPerNode"),
        ("PyTorchJob", "spec runPolicy backoffLimit"),
        ("PyTorchJob", "spec pytorchReplicaSpecs Worker template spec terminationGracePeriodSeconds"),
    ],
)
def test_a_misspelled_field_is_seen(machine: Machine, kind: str, path: str) -> None:
    manifest = of_kind(plan(machine, FULL, max_restarts=1), kind)
    *above, field = path.split()
    inner: Any = manifest
    for step in above:
        inner = inner[int(step) if step.isdecimal() else step]
    inner[field + "s"] = inner.pop(field)
    try:
        again = read_back(manifest)
    except ValueError:  # a required one is missing
        return
    assert again != manifest


# -- what is in them ----------------------------------------------------------------------------------------------------


def test_pods_run_the_same_launch(machine: Machine) -> None:
    made = plan(machine, FULL, max_restarts=2, overrides=("optim.clip_norm=1",), arguments=("--lr", "a $(b)"))
    assert made.hosts == () and made.nproc == 4
    pod = jobset_pod(made)
    (container,) = pod["containers"]
    assert container["command"] == ["distkit-run"]
    assert container["args"] == [
        *("--launcher", "torchrun", "-s", "zero3", "--set", "optim.clip_norm=1", "--nnodes", "2", "--nproc", "4"),
        *("--run-dir", str(machine.directory / "runs" / "two"), "--output", "main", "train.py", "--lr", "a $$(b)"),
    ]
    assert container["resources"]["limits"] == {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": "4"}
    assert container["workingDir"] == str(machine.directory)
    assert pod["volumes"][0] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    assert pod["terminationGracePeriodSeconds"] >= 30 + 30 and pod["serviceAccountName"] == "me"
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert env["PET_MASTER_ADDR"] == "two-node-0-0.two" and env["PET_NNODES"] == "2"


def test_restarts_are_counted_once(machine: Machine) -> None:
    """By the cluster, which starts all pods again: those that only lost a neighbour, too."""
    made = plan(machine, max_restarts=2)
    assert of_kind(made, "JobSet")["spec"]["failurePolicy"] == {"maxRestarts": 2}
    assert of_kind(made, "TrainingRuntime")["spec"]["template"]["spec"]["failurePolicy"] == {"maxRestarts": 2}
    job = of_kind(made, "PyTorchJob")["spec"]
    assert job["runPolicy"] == {"backoffLimit": 5}
    assert {spec["restartPolicy"] for spec in job["pytorchReplicaSpecs"].values()} == {"OnFailure"}
    assert "--max-restarts" not in jobset_pod(made)["containers"][0]["args"]
    never = of_kind(plan(machine), "PyTorchJob")["spec"]["pytorchReplicaSpecs"]
    assert {spec["restartPolicy"] for spec in never.values()} == {"Never"}


def test_a_long_grace_time_is_the_pods_too(machine: Machine) -> None:
    assert jobset_pod(plan(machine, overrides=("timeouts.grace_s=300",)))["terminationGracePeriodSeconds"] == 330


def test_secrets_are_references(machine: Machine) -> None:
    made = plan(machine, (IMAGE, "secret=mine"), export=("HUB_TOKEN", "TEAM"))
    for file in made.files:
        assert "hunter" not in file.text
    env = {entry["name"]: entry for entry in jobset_pod(made)["containers"][0]["env"]}
    for name in ("WANDB_API_KEY", "HUB_TOKEN", "HF_ENDPOINT"):
        assert env[name] == {"name": name, "valueFrom": {"secretKeyRef": {"name": "mine", "key": name}}}
    assert env["NCCL_DEBUG"]["value"] == "INFO" and env["TEAM"]["value"] == "$$(vision) $$$$"
    assert not env.keys() & {"PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES"}
    assert any("create secret generic mine" in note and "hunter" not in note for note in made.notes)


@pytest.mark.parametrize(
    "options",
    [{"arguments": ("--hub-token", "hunter2")}, {"overrides": ("engine.deepspeed.api_key=hunter2",)}],
)
def test_a_secret_on_the_launch_line_is_refused(machine: Machine, options: dict[str, Any]) -> None:
    with pytest.raises(LaunchError, match="hold a secret") as error:
        plan(machine, **options)
    assert "hunter2" not in str(error.value) and "--export" in str(error.value.hint)


def test_processes_are_those_of_the_pods_gpus_not_of_this_machine(machine: Machine) -> None:
    assert plan(machine, (IMAGE, "gpus=8"), nproc="auto").nproc == 8
    assert plan(machine, nproc="auto").nproc == 1
    assert plan(machine, nproc="4").nproc == 4  # one GPU is visible here


def test_names(machine: Machine) -> None:
    assert dns_label("GPT_2 (small)!") == "gpt-2-small"
    assert dns_label("20260102") == "run-20260102" and dns_label("???") == "run"
    long = [dns_label("x" * 70 + end, 40) for end in "ab"]
    assert all(len(name) == 40 for name in long) and long[0] != long[1]
    made = plan(machine, run_dir="runs/" + "A long_name." * 9, nnodes=11)
    name = of_kind(made, "JobSet")["metadata"]["name"]
    assert len(f"{name}-node-0-10-abcde") <= 63 and name.startswith("a-long-name-a-long")


@pytest.mark.parametrize(
    "job, message, hint",
    [
        ((), "not which image", "--job image="),
        ((IMAGE, "imgae=x"), "imgae was set", "--job image=x"),
        ((IMAGE, "image=y"), "twice", "--job image=y"),
        ((IMAGE, "gpus"), "KEY=VALUE", "--job gpus=VALUE"),
        ((IMAGE, "gpus=two"), "a number from 1 on", "--job gpus=1"),
        ((IMAGE, "gpus=2"), "--nproc was set to 4, but --job gpus=2", "--job gpus=4"),
        ((IMAGE, "kind=jobst"), "valid: jobset, trainjob, pytorchjob", "--job kind=jobset"),
        ((IMAGE, "name=My_Run"), "My_Run", "--job name=my-run"),
        ((IMAGE, "name=" + "x" * 60), "60 characters", "--job name=xxxx"),
        ((IMAGE, "memory=lots"), "no quantity", "--job memory=64Gi"),
        ((IMAGE, "claim=team:data"), "absolute path", "--job claim=team-data:/data"),
        ((IMAGE, "claim=team:/data"), "lost with the pods", "--run-dir /data/runs/"),
        ((IMAGE, "secret=A B"), "A B", "--job secret=distkit-secrets"),
    ],
)
def test_refused(machine: Machine, job: tuple[str, ...], message: str, hint: str) -> None:
    with pytest.raises(LaunchError) as error:
        plan(machine, job)
    assert message in error.value.message and str(error.value.hint).startswith(hint)


@pytest.mark.parametrize("options", [{"hosts": "a,b"}, {"node_rank": 0}, {"min_nodes": 1}, {"export": ("NOWHERE",)}])
def test_options_of_other_launchers_are_refused(machine: Machine, options: dict[str, Any]) -> None:
    with pytest.raises(DistkitError):
        plan(machine, **options)


# -- for real -----------------------------------------------------------------------------------------------------------

TRAIN = """
    import sys, torch, distkit
    from torch.utils.data import DataLoader, TensorDataset
    with distkit.Trainer({"log.every_steps": 1, "device": "cpu"}) as trainer:
        torch.manual_seed(0)
        net, x = torch.nn.Linear(4, 1), torch.randn(32, 4)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)
        net, opt, loader = trainer.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
        for _ in trainer.epochs(1):
            for x, y in loader:
                trainer.step(torch.nn.functional.mse_loss(net(x), y))
        print("ended", trainer.world.size, trainer.global_step, sys.argv[1:], flush=True)
"""


def test_files_and_dry_run(launch: Launch) -> None:
    launch.script(TRAIN)
    words = ("--launcher", "kubernetes", "--job", IMAGE, "--nnodes", "2", "--nproc", "2", "-s", "ddp")
    dry = launch.run("--dry-run", *words, "script.py")
    assert dry.returncode == 0 and not launch.run_dir.exists()
    done = launch.run(*words, "--job", "kind=jobset", "script.py")
    path = launch.run_dir / "launch" / "jobset.yaml"
    assert done.returncode == 0 and f"kubectl apply -f {path}" in done.stderr and done.stdout == ""
    assert [item.name for item in path.parent.iterdir()] == ["jobset.yaml"]
    documents = list(yaml.safe_load_all(dry.stdout))
    assert [document["kind"] for document in documents] == ["JobSet", "TrainingRuntime", "TrainJob", "PyTorchJob"]
    assert documents[0] == yaml.safe_load(path.read_text()) and f"# {path}\n---\n" in dry.stdout


def start_pod(launch: Launch, pod: dict[str, Any], index: int) -> subprocess.Popen[str]:
    """What kubelet does with a container, on this machine: the name of pod 0 is the loopback address."""
    (container,) = pod["containers"]
    environ = {**launch.environ, "GLOO_SOCKET_IFNAME": "lo"}
    for entry in container["env"]:
        field = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        assert field in (None, "metadata.annotations['batch.kubernetes.io/job-completion-index']")
        environ[entry["name"]] = str(index) if field else entry["value"].replace("$$", "$")
    assert environ["PET_MASTER_ADDR"] == "run-node-0-0.run"
    environ["PET_MASTER_ADDR"] = "127.0.0.1"
    program = shutil.which(
        container["command"][0], path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    assert program is not None
    return launch.popen([program, *(word.replace("$$", "$") for word in container["args"])], env=environ)


@pytest.mark.slow
def test_the_pods_of_a_jobset_train_together(launch: Launch) -> None:
    launch.script(TRAIN)
    port = 20000 + os.getpid() % 10000
    words = ("--launcher", "kubernetes", "--job", IMAGE, "--nnodes", "2", "--nproc", "1", "-s", "ddp")
    launch.environ = {name: value for name, value in launch.environ.items() if not name.startswith("PET_")}
    done = launch.run(*words, "--master-port", str(port), "script.py", "--lr", "$(x)")
    assert done.returncode == 0, done.stderr
    manifest = yaml.safe_load((launch.run_dir / "launch" / "jobset.yaml").read_text())
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    started = [start_pod(launch, pod, index) for index in (1, 0)]
    ends = [process.communicate(timeout=200) for process in started]
    assert [process.returncode for process in started] == [0, 0], ends
    assert "ended 2 8 ['--lr', '$(x)']" in ends[1][0], ends
    assert "node 1 of 2" in ends[0][1] and "PET_*" in ends[0][1]
