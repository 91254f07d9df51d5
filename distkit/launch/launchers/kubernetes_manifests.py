"""Manifests for Kubernetes as data: a JobSet, a TrainJob with its runtime, a PyTorchJob, all around the same pod.

Each pod runs `distkit-run`, which finds number, place and meeting point of the pods in torchrun's variables PET_*. The
controllers of Kubeflow set them; in a JobSet they are written here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["MANIFESTS", "ROLE", "Pods", "jobset", "pytorchjob", "trainjob"]

Manifest = dict[str, Any]

ROLE = "node"
"""Name of the pods' role and container; Kubeflow Trainer requires this one (pkg/constants/constants.go: Node)."""

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
"""Place of a pod in an indexed Job, as Kubernetes writes it on the pod."""


@dataclass(frozen=True)
class Pods:
    """What the manifests depend on.

    Args:
        name: Of the job; a DNS label with room for what controllers append.
        namespace: Where; None leaves it to kubectl.
        image: The container's image.
        words: Arguments of `distkit-run` in each pod.
        nnodes: Number of pods.
        nproc: Processes in each.
        port: Port of pod 0 at which they meet.
        max_restarts: How often all pods are started again after a failure.
        end_s: Between SIGTERM to a pod and its death, in whole seconds.
        variables: Values of the container's variables; None is taken from the secret, whose key is the variable's name.
        secret: Name of the secret.
        limits: Resources of a container.
        directory: Working directory; None is the image's own.
        claim: Name of a persistent volume claim to mount.
        mount: Where.
        shared_memory: Size limit of /dev/shm; None is that of the pod's memory.
        service_account: The pods' service account.
    """

    name: str
    namespace: str | None
    image: str
    words: tuple[str, ...]
    nnodes: int
    nproc: int
    port: int
    max_restarts: int
    end_s: int
    variables: Mapping[str, str | None]
    secret: str
    limits: Mapping[str, str]
    directory: str | None = None
    claim: str | None = None
    mount: str = "/data"
    shared_memory: str | None = None
    service_account: str | None = None


def jobset(pods: Pods) -> list[Manifest]:
    """One indexed Job with a pod for each node, in a JobSet, which gives them names in DNS."""
    meeting = {
        "PET_NNODES": str(pods.nnodes),
        "PET_NPROC_PER_NODE": str(pods.nproc),
        # <jobset>-<replicated job>-<job index>-<pod index>.<subdomain>, where the subdomain is the JobSet's name
        "PET_MASTER_ADDR": f"{pods.name}-{ROLE}-0-0.{pods.name}",
        "PET_MASTER_PORT": str(pods.port),
    }
    place = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    container = {
        **_container(pods, ROLE),
        **_command(pods),
        "env": [*_env(pods), *({"name": name, "value": value} for name, value in meeting.items()), place],
        **_resources(pods),
    }
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(pods),
            "spec": _set_of_jobs(pods, _template(pods, container, "Never"), {}),
        }
    ]


def trainjob(pods: Pods) -> list[Manifest]:
    """A runtime of Kubeflow Trainer v2, which says how pods look, and the TrainJob that says what they run."""
    label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {**_metadata(pods), "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": pods.nnodes, "torch": {}},
            "template": {
                "spec": _set_of_jobs(pods, _template(pods, _container(pods, ROLE), "Never"), {"labels": label})
            },
        },
    }
    trainer: Manifest = {"numNodes": pods.nnodes, "numProcPerNode": pods.nproc, **_command(pods)}
    if pods.variables:
        trainer["env"] = _env(pods)
    if pods.limits:
        trainer["resourcesPerNode"] = {"limits": dict(pods.limits)}
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(pods),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": pods.name,
            },
            "trainer": trainer,
        },
    }
    return [runtime, job]


def pytorchjob(pods: Pods) -> list[Manifest]:
    """A PyTorchJob of Kubeflow's training operator (v1): pod 0 is its master, the others are workers."""
    container = {**_container(pods, "pytorch"), **_command(pods), "env": _env(pods), **_resources(pods)}
    container["ports"] = [{"name": "pytorchjob-port", "containerPort": pods.port}]
    restart = "OnFailure" if pods.max_restarts else "Never"

    def replicas(number: int) -> Manifest:
        template = {"spec": _pod(pods, container, None)}
        return {"replicas": number, "restartPolicy": restart, "template": template}

    specs = {"Master": replicas(1)}
    if pods.nnodes > 1:
        specs["Worker"] = replicas(pods.nnodes - 1)
    policy: Manifest = {}
    if pods.max_restarts:
        # The operator adds up the restarts of all containers, and each attempt restarts every one; it gives up when the
        # sum reaches the limit (pkg/core/job.go: PastBackoffLimit).
        policy = {"runPolicy": {"backoffLimit": pods.max_restarts * pods.nnodes + 1}}
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": _metadata(pods),
            "spec": {**policy, "nprocPerNode": str(pods.nproc), "pytorchReplicaSpecs": specs},
        }
    ]


MANIFESTS: dict[str, Callable[[Pods], list[Manifest]]] = {
    "jobset": jobset,
    "trainjob": trainjob,
    "pytorchjob": pytorchjob,
}
"""By the name that ``--job kind`` takes."""


def _metadata(pods: Pods) -> Manifest:
    return {"name": pods.name, **({} if pods.namespace is None else {"namespace": pods.namespace})}


def _set_of_jobs(pods: Pods, template: Manifest, metadata: Manifest) -> Manifest:
    """The inside of a JobSet: one Job whose pods fail together, and start again together."""
    job = {
        "parallelism": pods.nnodes,
        "completions": pods.nnodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # a pod alone can't go on: the JobSet starts all of them again
        "template": template,
    }
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": pods.max_restarts},
        "replicatedJobs": [
            {"name": ROLE, "replicas": 1, "template": {**({"metadata": metadata} if metadata else {}), "spec": job}}
        ],
    }


def _template(pods: Pods, container: Manifest, restart: str) -> Manifest:
    return {"spec": _pod(pods, container, restart)}


def _pod(pods: Pods, container: Manifest, restart: str | None) -> Manifest:
    """A pod. Its /dev/shm would be 64 MiB, too little for the workers of a DataLoader and for NCCL."""
    memory = {"medium": "Memory", **({} if pods.shared_memory is None else {"sizeLimit": pods.shared_memory})}
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": memory}]
    if pods.claim is not None:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": pods.claim}})
    return {
        **({} if restart is None else {"restartPolicy": restart}),
        **({} if pods.service_account is None else {"serviceAccountName": pods.service_account}),
        "terminationGracePeriodSeconds": pods.end_s,
        "containers": [container],
        "volumes": volumes,
    }


def _container(pods: Pods, name: str) -> Manifest:
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if pods.claim is not None:
        mounts.append({"name": "data", "mountPath": pods.mount})
    return {
        "name": name,
        "image": pods.image,
        **({} if pods.directory is None else {"workingDir": pods.directory}),
        "volumeMounts": mounts,
    }


def _command(pods: Pods) -> Manifest:
    return {"command": ["distkit-run"], "args": [_literal(word) for word in pods.words]}


def _resources(pods: Pods) -> Manifest:
    return {"resources": {"limits": dict(pods.limits)}} if pods.limits else {}


def _env(pods: Pods) -> list[Manifest]:
    found: list[Manifest] = []
    for name, value in pods.variables.items():
        if value is None:
            found.append({"name": name, "valueFrom": {"secretKeyRef": {"name": pods.secret, "key": name}}})
        else:
            found.append({"name": name, "value": _literal(value)})
    return found


def _literal(text: str) -> str:
    """Kubernetes replaces ``$(NAME)`` in arguments and values, and makes one dollar of two."""
    return text.replace("$", "$$")
