"""A byte-level GPT on the source text of Python's standard library: the training loop, written out.

The same file runs on one device and on many:

    python recipes/gpt/train.py
    distkit-run -s ddp --nproc 2 recipes/gpt/train.py
    distkit-run -s ddp --nproc 2 -c recipes/gpt/config.yaml recipes/gpt/train.py --layers 6 --width 192
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import distkit

from data import Blocks, read_text
from model import GPT, GPTConfig


def parse_arguments() -> argparse.Namespace:
    """The recipe's own arguments; how to distribute is said on the launch line."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on Python's own source text.")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--block", type=int, default=64, help="bytes of context")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--untied", action="store_true", help="give the output layer weights of its own")
    parser.add_argument("--bytes", type=int, default=500_000, help="training text at most")
    parser.add_argument("--batch", type=int, default=16, help="blocks in a batch")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=50, help="optimizer steps")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    return parser.parse_args()


def warmup_cosine(warmup: int, total: int, floor: float = 0.1) -> Callable[[int], float]:
    """The share of the learning rate at a step: a linear rise, then a cosine down to ``floor``."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy of the next byte, in nats."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def main() -> None:
    """Train, then say how well unseen files are predicted."""
    args = parse_arguments()
    with distkit.Trainer() as trainer:  # seeds, so it comes before the model
        model = GPT(GPTConfig(256, args.block, args.layers, args.heads, args.width, args.dropout, not args.untied))
        optimizer = torch.optim.AdamW(model.decay_groups(args.weight_decay), lr=args.lr, betas=(0.9, 0.95))
        train, validation = (Blocks(text, args.block) for text in read_text(args.bytes))
        train_loader = DataLoader(train, batch_size=args.batch, shuffle=True)
        validation_loader = DataLoader(validation, batch_size=args.batch)
        model, optimizer, train_loader, validation_loader = trainer.prepare(
            model, optimizer, train_loader, validation_loader
        )
        total = args.epochs * train_loader.steps_per_epoch
        trainer.prepare(LambdaLR(optimizer, warmup_cosine(args.warmup, total)))

        for _ in trainer.epochs(args.epochs):
            for batch in train_loader:
                trainer.step(loss_fn(model, batch))

        loss = trainer.evaluate(model, validation_loader, loss_fn=loss_fn)["loss"]
        trainer.print(f"validation loss {loss:.4f} nats a byte, perplexity {math.exp(loss):.3f}")


if __name__ == "__main__":
    main()
