"""Runs that a configuration of Accelerate drives: as with one process, and under `accelerate launch` itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pool import Pool
from tests.strategies.test_fsdp import same_training

CASES = "tests.strategies.accelerate_cases:"
BASE = {"compute_environment": "LOCAL_MACHINE", "use_cpu": True, "mixed_precision": "no", "num_processes": 2}

FILES: dict[str, dict[str, Any]] = {
    "ddp": {"distributed_type": "MULTI_CPU"},
    "fsdp": {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "Block",
            "fsdp_activation_checkpointing": True,
        },
    },
    "zero2": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, "gradient_clipping": 0.5}},
    "zero3": {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu", "gradient_accumulation_steps": 2},
    },
}

SCRIPT = """
import sys, torch, distkit
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
trainer = distkit.Trainer(strategy=sys.argv[1], run_dir=sys.argv[2], **{"log.every_steps": 1, "batch.per": "global"})
net = torch.nn.Linear(4, 1)
net, optimizer, loader = trainer.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1), DataLoader(data, batch_size=12))
for epoch in trainer.epochs(1):
    for x, y in loader:
        trainer.step(torch.nn.functional.mse_loss(net(x), y))
if sys.argv[1] == "accelerate":
    from accelerate import Accelerator  # what a script still has of it goes on beside the Trainer

    accelerator = Accelerator(cpu=True)
    assert (accelerator.num_processes, accelerator.process_index) == (trainer.world.size, trainer.world.rank)
    assert accelerator.gather(torch.tensor([trainer.world.rank])).tolist() == list(range(trainer.world.size))
trainer.close()
"""


@pytest.mark.parametrize("name", FILES)
def test_a_file_drives_the_run(pool: Pool, tmp_path: Path, name: str) -> None:
    """The strategy that it means, with the numbers of one process."""
    file = {**BASE, **FILES[name]}
    result = pool.run(CASES + "from_file", 2, run_dir=str(tmp_path / "many"), file=file, settings={})[0]
    clip = file.get("deepspeed_config", {}).get("gradient_clipping")
    settings = {"optim.clip_norm": clip} if clip else {}
    single = pool.run(
        "tests.contract.cases:train", 1, strategy="single", run_dir=str(tmp_path / "one"), settings=settings
    )[0]
    same_training(result, single)
    found = yaml.safe_load((tmp_path / "many" / "config.yaml").read_text())
    assert found["strategy"] == name
    assert found["batch"]["accumulate"] == (2 if name == "zero3" else None)
    assert found["memory"]["offload"] == ("optimizer" if name == "zero3" else "none")


def launched(words: list[str], folder: Path) -> list[float]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DISTKIT_", "ACCELERATE_"))}
    environ |= {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / words[-1] / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.timeout(900)  # several starts of several processes
def test_under_accelerate_launch_and_distkit_run(tmp_path: Path) -> None:
    """The same script, by both launchers on two processes and by python alone: the same losses."""
    (tmp_path / "train.py").write_text(SCRIPT)
    # Of what it starts without a GPU, `accelerate launch` takes several processes for DeepSpeed only.
    file = {**BASE, **FILES["zero2"], "use_cpu": False, "deepspeed_config": {"zero_stage": 2}}
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(file))
    one = launched([sys.executable, "train.py", "single", "one"], tmp_path)
    theirs = ["accelerate.commands.launch", "--config_file", "accelerate.yaml", "--main_process_port", "0"]
    ours = [
        "distkit.launch.command",
        "--set",
        "engine.accelerate.config_file=accelerate.yaml",
        "-s",
        "accelerate",
        "--run-dir",
        "ours",
    ]
    for name, words in (("theirs", theirs), ("ours", ours)):
        losses = launched([sys.executable, "-m", *words, "train.py", "accelerate", name], tmp_path)
        assert losses == pytest.approx(one, abs=1e-6)
        assert len(list((tmp_path / name / "checkpoints").glob("*/rng-*"))) == 2, "two ranks"
        assert yaml.safe_load((tmp_path / name / "config.yaml").read_text())["strategy"] == "zero2"
