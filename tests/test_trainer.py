"""The Trainer in one process: verbs, lines, errors. Over several processes: tests/contract."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import distkit
from distkit.config.launchline import VARIABLE, LaunchSettings
from distkit.errors import CheckpointError, ConfigError, UsageError


def data(n: int = 24) -> TensorDataset:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 4, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def make(
    tmp_path: Path, *, lr: float = 0.1, callbacks: Any = (), batch: int = 6, **settings: Any
) -> tuple[Any, Any, Any, Any]:
    trainer = distkit.Trainer({"run_dir": str(tmp_path), "log.every_steps": 1, **settings}, callbacks=callbacks)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return trainer, *trainer.prepare(model, optimizer, DataLoader(data(), batch_size=batch, shuffle=True))


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def steps(tmp_path: Path) -> list[dict[str, Any]]:
    return [line for line in lines(tmp_path) if "loss" in line]


def train(trainer: Any, model: Any, loader: Any, epochs: int = 1) -> None:
    for _ in trainer.epochs(epochs):
        for batch in loader:
            trainer.step(loss_fn(model, batch))


def test_the_log_has_the_documented_keys(tmp_path: Path) -> None:
    trainer, model, _, loader = make(tmp_path)
    train(trainer, model, loader, 2)
    trainer.close()
    found = steps(tmp_path)
    assert [line["step"] for line in found] == list(range(1, 9))
    keys = {
        "time",
        "step",
        "epoch",
        "samples",
        "loss",
        "lr",
        "grad_norm",
        "step_time_s",
        "samples_per_s",
        "skipped_steps",
    }
    assert all(keys <= set(line) for line in found)
    assert [line["samples"] for line in found] == [6 * i for i in range(1, 9)]
    assert [line["epoch"] for line in found] == [0] * 4 + [1] * 4


def test_the_same_as_plain_torch(tmp_path: Path) -> None:
    """What the Trainer does to one device is nothing: the same numbers, bit for bit."""
    trainer, model, optimizer, loader = make(tmp_path)
    import copy

    twin = copy.deepcopy(model)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for batch in loader:
        trainer.step(loss_fn(model, batch))
        plain.zero_grad()
        loss_fn(twin, batch).backward()
        plain.step()
    trainer.close()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_max_steps_ends_a_loop_and_a_rerun_goes_on(tmp_path: Path) -> None:
    trainer, model, _, loader = make(tmp_path, max_steps=3)
    train(trainer, model, loader, 5)
    assert trainer.global_step == 3
    trainer.close()
    trainer, model, _, loader = make(tmp_path, max_steps=7)
    train(trainer, model, loader, 5)
    trainer.close()
    assert [line["step"] for line in steps(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    whole = tmp_path / "whole"
    trainer, model, _, loader = make(whole, max_steps=7)
    train(trainer, model, loader, 5)
    trainer.close()
    assert [line["loss"] for line in steps(whole)] == [line["loss"] for line in steps(tmp_path)]


def test_a_finished_run_has_nothing_to_do(tmp_path: Path) -> None:
    for _ in range(2):
        trainer, model, _, loader = make(tmp_path)
        train(trainer, model, loader, 2)
        trainer.close()
    assert len(steps(tmp_path)) == 8


def test_launch_line_wins_over_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, LaunchSettings(overrides=["max_steps=2", "seed=5"]).to_json())
    trainer, model, _, loader = make(tmp_path, max_steps=9, seed=1)
    assert trainer.config.seed == 5
    train(trainer, model, loader, 9)
    trainer.close()
    assert len(steps(tmp_path)) == 2


def test_start_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R3, R4, D8: batch arithmetic, the rate before and after with the reason, the plan."""
    settings = {"optim.lr_scaling": "linear", "optim.reference_batch": 3, "batch.accumulate": 2, "log.to": ["console"]}
    trainer, model, _, loader = make(tmp_path, **settings)
    train(trainer, model, loader, 2)
    trainer.close()
    out = capsys.readouterr().out
    assert "single: 1 process on 1 node" in out
    assert "micro batch 6 x accumulate 2 x data-parallel 1 = global batch 12" in out
    assert "learning rate 0.1 -> 0.4: linear scaling, global batch 12 against the reference batch 3" in out
    assert "planned learning rate: 0.4 at step 1, 0.4 halfway, 0.4 at step 4" in out
    assert [line["lr"] for line in steps(tmp_path)] == pytest.approx([0.4] * 4)


def test_fp16_overflow_skips_the_schedule_too(tmp_path: Path) -> None:
    """R2: a loss of 1e30 overflows at step 2; the rate doesn't move and the skip is counted."""
    trainer = distkit.Trainer({"run_dir": str(tmp_path), "log.every_steps": 1, "precision": "fp16"})
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, loader, schedule = trainer.prepare(model, optimizer, DataLoader(data(), batch_size=6), schedule)
    for step, batch in enumerate(loader):
        before = [p.detach().clone() for p in model.parameters()]
        trainer.step(loss_fn(model, batch) * (1e30 if step == 1 else 1.0))
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert same == (step == 1)
    trainer.close()
    found = steps(tmp_path)
    assert [line["lr"] for line in found] == pytest.approx([0.1, 0.05, 0.05, 0.025])
    assert [line["skipped_steps"] for line in found] == [0, 1, 1, 1]


class Syncs(TorchDispatchMode):
    """Counts reads of device values by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_local_scalar_dense" in str(func) or "aten.item" in str(func):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("weighted", [False, True])
def test_no_host_sync_between_log_points(tmp_path: Path, weighted: bool) -> None:
    trainer, model, _, loader = make(tmp_path, **{"log.every_steps": 100, "optim.clip_norm": 1.0})
    counts = []
    for _ in trainer.epochs(2):
        for batch in loader:
            loss = loss_fn(model, batch)
            weight = batch[1].sum() + 1.0 if weighted else None
            with Syncs() as syncs:
                trainer.step(loss, weight=weight)
            counts.append(syncs.count)
    trainer.close()
    assert len(counts) == 8
    assert counts[1:] == [0] * 7  # the first step looks at names of unused parameters and agrees on a reference


def test_fit_and_callbacks(tmp_path: Path) -> None:
    told: list[str] = []

    class Note(distkit.Callback):
        def on_start(self, trainer: Any) -> None:
            told.append("start")

        def on_step_end(self, trainer: Any, step: int) -> None:
            told.append(f"step {step}")

        def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
            told.append("evaluate")

        def on_epoch_end(self, trainer: Any, epoch: int) -> None:
            told.append(f"epoch {epoch}")

        def on_save(self, trainer: Any, path: Path) -> None:
            told.append(f"save {path.name}")

        def on_end(self, trainer: Any) -> None:
            told.append("end")

    with distkit.Trainer(run_dir=str(tmp_path), callbacks=[Note()]) as trainer:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        metrics = trainer.fit(
            model,
            optimizer,
            DataLoader(data(), batch_size=12, shuffle=True),
            loss_fn=loss_fn,
            epochs=2,
            eval_loader=DataLoader(data(), batch_size=7),
            metric_fn=accuracy,
        )
    assert metrics["samples"] == 24
    assert metrics["accuracy"] > 0.7
    assert told == [
        "start",
        *("step 1", "step 2", "evaluate", "epoch 0"),
        *("step 3", "step 4", "evaluate", "epoch 1"),
        "save step-00000004",
        "end",
    ]
    assert [line["eval/samples"] for line in lines(tmp_path) if "eval/samples" in line] == [24, 24]


def test_request_stop(tmp_path: Path) -> None:
    trainer, model, _, loader = make(tmp_path)
    seen = 0
    for _ in trainer.epochs(5):
        for batch in loader:
            seen += 1
            trainer.step(loss_fn(model, batch))
            if seen == 2:
                trainer.request_stop("enough")
    assert trainer.should_stop
    assert seen == 3
    trainer.close()


def test_early_stopping_stops_where_the_epoch_ends_and_keeps_its_state(tmp_path: Path) -> None:
    """Two evaluations without improvement; the second after a restart."""
    values = iter([1.0, 2.0, 3.0])

    def epoch(trainer: Any, model: Any, loader: Any) -> None:
        for batch in loader:
            trainer.step(loss_fn(model, batch))
        value = next(values)
        trainer.evaluate(model, DataLoader(data(), batch_size=8), metric_fn=lambda m, b: {"value": value})

    for planned, done in ((2, 2), (9, 3)):
        stopping = distkit.EarlyStopping("value", patience=2)
        trainer, model, _, loader = make(tmp_path, callbacks=[stopping])
        for _ in trainer.epochs(planned):
            epoch(trainer, model, loader)
        assert trainer.global_step == 4 * done
        trainer.close()
    assert (stopping.best, stopping.waited) == (1.0, 2)


def test_keep_best(tmp_path: Path) -> None:
    """K3: the checkpoint of the best evaluation survives the retention of the newest."""
    settings = {
        "checkpoint.keep": 1,
        "checkpoint.keep_best": 1,
        "checkpoint.best_metric": "score",
        "checkpoint.best_mode": "max",
    }
    trainer, model, _, loader = make(tmp_path, **settings)
    scores = iter([1.0, 9.0, 3.0])
    for _ in trainer.epochs(3):
        for batch in loader:
            trainer.step(loss_fn(model, batch))
        score = next(scores)
        trainer.evaluate(model, DataLoader(data(), batch_size=8), metric_fn=lambda m, b: {"score": score})  # noqa: B023
    trainer.close()
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*")) == ["step-00000008", "step-00000012"]


def test_sigterm_saves_and_exits(tmp_path: Path) -> None:
    """X8: at the end of the step that begins next, with the documented status."""
    trainer, model, _, loader = make(tmp_path)
    with pytest.raises(SystemExit) as end:
        for _ in trainer.epochs(5):
            for batch in loader:
                if trainer.global_step == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                trainer.step(loss_fn(model, batch))
    assert end.value.code == 143
    assert (tmp_path / "checkpoints" / "step-00000004" / "manifest.json").exists()
    trainer, model, _, loader = make(tmp_path, max_steps=5)
    train(trainer, model, loader, 5)
    trainer.close()
    assert [line["step"] for line in steps(tmp_path)] == [1, 2, 3, 4, 5]


def test_sigterm_during_evaluation(tmp_path: Path) -> None:
    trainer, model, _, loader = make(tmp_path)
    train(trainer, model, loader, 1)

    def metric(model: Any, batch: Any) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return torch.zeros(())

    with pytest.raises(SystemExit) as end:
        trainer.evaluate(model, DataLoader(data(), batch_size=2), metric_fn=metric)
    assert end.value.code == 143
    assert (tmp_path / "checkpoints" / "step-00000004" / "manifest.json").exists()


def test_a_model_that_changed_is_refused(tmp_path: Path) -> None:
    """K12: before anything is loaded, with names and shapes."""
    trainer, model, _, loader = make(tmp_path)
    train(trainer, model, loader)
    trainer.close()
    trainer = distkit.Trainer(run_dir=str(tmp_path))
    other = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2), nn.Linear(2, 2))
    before = [p.detach().clone() for p in other.parameters()]
    other, _ = trainer.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match=r"(?s)missing.*3\.weight.*shape.*0\.weight \[8, 4\].*\[9, 4\]"):
        trainer.save()
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    trainer.strategy.close()


def test_export_loads_without_distkit(tmp_path: Path) -> None:
    from safetensors.torch import load_model

    trainer = distkit.Trainer(run_dir=str(tmp_path), **{"checkpoint.at_end": False})
    from tests.contract.models import TinyGPT

    model = trainer.prepare(TinyGPT())
    trainer.export(tmp_path / "weights.safetensors")
    trainer.close()
    twin = TinyGPT()
    load_model(twin, str(tmp_path / "weights.safetensors"))
    assert twin.head.weight is twin.wte.weight
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda t, m, o, l: t.prepare("model"), "was given a str"),
        (lambda t, m, o, l: t.prepare(torch.optim.SGD(nn.Linear(1, 1).parameters())), "belong to no prepared model"),
        (lambda t, m, o, l: t.prepare(m, torch.optim.LBFGS(m.parameters())), "LBFGS computes the loss several times"),
        (lambda t, m, o, l: t.step(torch.ones(2, requires_grad=True)), r"trainer\.step\(loss\.mean\(\)\)"),
        (lambda t, m, o, l: t.optimizer_step(), "no loss came in"),
        (
            lambda t, m, o, l: t.backward(
                torch.ones((), requires_grad=True) * 1, optimizer=torch.optim.SGD(m.parameters())
            ),
            "was not prepared",
        ),
        (lambda t, m, o, l: t.export("x", nn.Linear(1, 1)), "was not prepared"),
    ],
)
def test_wrong_use_is_told(tmp_path: Path, use: Any, message: str) -> None:
    trainer, *objects = make(tmp_path)
    with pytest.raises(UsageError, match=message):
        use(trainer, *objects)
    trainer.strategy.close()


def test_wrong_settings_stop_before_a_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        distkit.Trainer(run_dir=str(tmp_path / "new"), sead=3)
    assert not (tmp_path / "new").exists()


def test_no_unnoticed_half_window(tmp_path: Path) -> None:
    trainer, model, _, loader = make(tmp_path, **{"batch.accumulate": 2})
    with pytest.raises(UsageError, match="left open"):
        for i, batch in enumerate(loader):
            loss = loss_fn(model, batch)
            if i != 1:
                trainer.step(loss)
    trainer.strategy.close()


def test_mps_is_for_one_process_only() -> None:
    from distkit.world.device import choose_device

    with pytest.raises(ConfigError, match="serves one process"):
        choose_device("mps", 0, 2)
    assert choose_device("cpu", 0, 2) == torch.device("cpu")
