"""What the launched processes of this folder's tests run: a small model, 16 steps in two epochs, and notes on the way."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch.utils.data import DataLoader

import distkit
from tests.contract.models import TinyGPT, Tokens, groups, sample_losses

parser = argparse.ArgumentParser()
parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
parser.add_argument("--fail", type=int, default=-1, help="the rank that raises in step 4")
options = parser.parse_args()

with distkit.Trainer() as trainer:
    net = TinyGPT()
    loader = DataLoader(Tokens(64), batch_size=8, shuffle=True)
    model, optimizer, loader = trainer.prepare(net, torch.optim.AdamW(groups(net), lr=1e-2), loader)
    with (trainer.run_dir / f"starts-{trainer.world.rank}").open("a") as starts:
        starts.write(f"{trainer.world.size}\n")
    for _ in trainer.epochs(2):
        for batch in loader:
            trainer.step(sample_losses(model, batch).mean())
            if trainer.world.rank == options.fail and trainer.global_step == 4:
                raise RuntimeError(f"the number {options.fail} was drawn")
            time.sleep(options.pause)
    if trainer.strategy.name in ("single", "ddp"):  # each rank has all weights
        weights = b"".join(value.detach().numpy().tobytes() for value in net.parameters())
        (trainer.run_dir / f"weights-{trainer.world.rank}").write_text(hashlib.sha256(weights).hexdigest())
