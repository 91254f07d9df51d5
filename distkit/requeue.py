"""Asking the scheduler to run this job again, after a run that it stopped has written its checkpoint."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

__all__ = ["requeue", "requeue_note"]

LIMIT_S = 60.0


def requeue_note(environ: Mapping[str, str] | None = None) -> str | None:
    """What ``checkpoint.requeue`` means here, where it means nothing."""
    environ = os.environ if environ is None else environ
    if "SLURM_JOB_ID" in environ:
        return None
    return "checkpoint.requeue is on, but this is no Slurm job (SLURM_JOB_ID is unset): a signal just ends the run"


def requeue(environ: Mapping[str, str] | None = None) -> str:
    """``scontrol requeue`` for the Slurm job of this process; rank 0 calls it when nothing is left to save.

    Slurm may end the job at once. The job starts again with the same script, which goes on from its newest checkpoint if
    it names its folder.

    Returns:
        A line that says what came of it.
    """
    environ = os.environ if environ is None else environ
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return "not requeued: this is no Slurm job"
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not requeued: {' '.join(command)}: {error}"
    if done.returncode != 0:
        why = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        return f"not requeued: {' '.join(command)}: {why}"
    return f"asked Slurm to run job {job} again"
