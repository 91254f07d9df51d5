"""Which variables of this host processes on other hosts get: a list, and never all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from distkit.launch.worker import LAUNCH_VARIABLE

__all__ = ["exported", "exported_names"]

_DEFAULT = re.compile(
    r"(PATH|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|LANG|LC_ALL|TERM"
    r"|CUDA_HOME|CUDA_VISIBLE_DEVICES|PYTHON[A-Z_]*"
    r"|(NCCL|GLOO|TORCH|OMP|MKL|UCX|FI|HF|WANDB|MLFLOW|HOROVOD|DS|TRITON|TENSORBOARD|TOKENIZERS|CUBLAS)_[A-Z0-9_]+)"
)
"""The programs' places, and the settings of libraries that take part in training."""

_NEVER = re.compile(r"(?i)((http|https|ftp|all|no)_proxy|HOROVOD_(RANK|SIZE|LOCAL_\w+|CROSS_\w+|GLOO_RENDEZVOUS_\w+))")
"""A proxy of the host that launches would stand between the hosts; ranks are the launcher's to give."""


def exported_names(environ: Mapping[str, str], added: Iterable[str], asked: Iterable[str]) -> list[str]:
    """Names of the variables that processes on other hosts get.

    Args:
        environ: This process's variables.
        added: Names of those that the launch adds.
        asked: Names that the user gave with ``--export``; those are taken in any case.
    """
    found = [name for name in sorted(environ) if _DEFAULT.fullmatch(name) and not _NEVER.fullmatch(name)]
    return list(dict.fromkeys([*added, *found, *asked, LAUNCH_VARIABLE, "TERM"]))


def exported(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Their values, of those that are set."""
    return {name: environ[name] for name in names if name in environ}
