"""Handwritten digits (scikit-learn's 1797 real ones, 8 x 8 pixels) with a small CNN: the whole loop in one call.

python recipes/digits/train.py
distkit-run -s ddp --nproc 2 -c recipes/digits/config.yaml recipes/digits/train.py --epochs 10
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import distkit

Batch = tuple[torch.Tensor, torch.Tensor]


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set, always the same: images (n, 1, 8, 8), float32 from 0 to 1, and labels (n,), int64."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16.0, labels, test_size=0.2, stratify=labels, random_state=0)
    x_train, x_test = (torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) for x in split[:2])
    y_train, y_test = (torch.tensor(y, dtype=torch.long) for y in split[2:])
    return TensorDataset(x_train, y_train), TensorDataset(x_test, y_test)


def make_model(width: int) -> nn.Sequential:
    """Two convolutions and a linear layer: images (n, 1, 8, 8) to logits (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 4, 10),
    )


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross entropy."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Share of right answers."""
    images, labels = batch
    return (model(images).argmax(dim=1) == labels).float().mean()


def main() -> None:
    """Train and evaluate; each test image counts once, on any number of processes."""
    parser = argparse.ArgumentParser(description="Train a small CNN on scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--width", type=int, default=16, help="channels of the first convolution")
    args = parser.parse_args()

    with distkit.Trainer() as trainer:  # seeds, so it comes before the model
        model = make_model(args.width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        train, test = read_digits()
        result = trainer.fit(
            model,
            optimizer,
            DataLoader(train, batch_size=args.batch, shuffle=True),
            loss_fn=loss_fn,
            epochs=args.epochs,
            eval_loader=DataLoader(test, batch_size=args.batch),
            metric_fn=accuracy,
        )
        trainer.print(f"test accuracy {100 * result['accuracy']:.1f} % of {result['samples']:.0f} images")


if __name__ == "__main__":
    main()
