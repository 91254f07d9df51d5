"""Ranks from every launcher's variables."""

from __future__ import annotations

import pytest

from distkit.errors import LaunchError
from distkit.world import Environment, detect_environment

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[003-005,9],other",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_ID": "12345",
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Environment()),
        (TORCHRUN, Environment(5, 8, 1, 4, 1, 2, "torchrun", "a", 29500)),
        (SLURM, Environment(3, 5, 1, 2, 1, 3, "Slurm", "node003", 22345)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            Environment(3, 4, 1, 2, 1, 2, "Open MPI"),
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            Environment(1, 2, 1, 2, 0, 1, "PMI"),
        ),
        (
            {
                "HOROVOD_RANK": "1",
                "HOROVOD_SIZE": "4",
                "HOROVOD_LOCAL_RANK": "1",
                "HOROVOD_LOCAL_SIZE": "2",
                "HOROVOD_CROSS_RANK": "0",
                "HOROVOD_CROSS_SIZE": "2",
            },
            Environment(1, 4, 1, 2, 0, 2, "horovodrun"),
        ),
        ({**SLURM, **TORCHRUN}, Environment(5, 8, 1, 4, 1, 2, "torchrun", "a", 29500)),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, Environment()),
    ],
)
def test_launchers(variables: dict[str, str], expected: Environment) -> None:
    assert detect_environment(variables) == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK was set to 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "rank -1 of 2"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
    ],
)
def test_nonsense_is_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        detect_environment(variables)
