"""Adasum, which Horovod has over MPI only."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod isn't installed: scripts/install-horovod"),
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: apt-get install openmpi-bin"),
]

SCRIPT = """
import json
import torch
from torch.utils.data import DataLoader
import distkit

data = [(torch.full((3,), i % 2 + 1.0), torch.tensor([float(i)])) for i in range(8)]
with distkit.Trainer({"strategy": "horovod", "engine.horovod": {"op": "adasum"}, "device": "cpu"}) as trainer:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = {}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.register_step_pre_hook(lambda *_: seen.update({n: p.grad.tolist() for n, p in model.named_parameters()}))
    model, optimizer, loader = trainer.prepare(model, optimizer, DataLoader(data, batch_size=1))
    x, y = next(iter(loader))
    own = torch.autograd.grad((model(x) - y).square().mean(), list(model.parameters()))
    trainer.step((model(x) - y).square().mean())
    found = {"own": [g.tolist() for g in own], "combined": list(seen.values()), "lr": optimizer.param_groups[0]["lr"]}
    print("FOUND", json.dumps(trainer.world.all_gather_objects(found)), flush=True)
"""


def test_it_is_the_papers_formula(tmp_path: Path) -> None:
    """Maleki et al. 2020, equation 4, for each parameter: (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "distkit.launch.command", "--launcher", "mpirun", "--nproc", "2"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run"), "script.py"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "combined by Adasum" in done.stdout + done.stderr
    ranks = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))[6:])
    assert ranks[0]["combined"] == ranks[1]["combined"]
    assert [rank["lr"] for rank in ranks] == [0.01, 0.01]
    for index in range(2):
        a, b = (torch.tensor(rank["own"][index]) for rank in ranks)
        dot = (a * b).sum()
        expected = (1 - dot / (2 * a.square().sum())) * a + (1 - dot / (2 * b.square().sum())) * b
        assert torch.tensor(ranks[0]["combined"][index]) == pytest.approx(expected, rel=1e-5)
