"""The training that is disturbed: small, but with all that a resume must bring back.

Order of the data, dropout (random numbers of each rank), a scheduler and Adam's moments. Most of the parameters are an
embedding, so that a step is quick and a save takes long enough to be struck in the middle.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import distkit

WORDS, WIDTH, CLASSES, LENGTH = 40_000, 64, 16, 8
SAMPLES, BATCH, EPOCHS = 64, 8, 2
STEPS = EPOCHS * SAMPLES // BATCH


class Net(nn.Module):
    """The class of a bag of words."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.words(words)).mean(dim=1)
        x = x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))
        classes: torch.Tensor = self.head(x)
        return classes


class Bags(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Bags of words with random classes."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(11)
        self.words = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=made)
        self.classes = torch.randint(0, CLASSES, (SAMPLES,), generator=made)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.words[index], self.classes[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dropout", type=float, default=0.0)
    dropout = parser.parse_args().dropout
    settings = {"batch": {"per": "global", "size": BATCH}, "optim": {"lr_scaling": "none", "clip_norm": 1.0}}
    with distkit.Trainer(settings) as trainer:
        net = Net(dropout)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
        loader = DataLoader(Bags(), batch_size=BATCH, shuffle=True)
        net, optimizer, scheduler, loader = trainer.prepare(net, optimizer, scheduler, loader)
        for _ in trainer.epochs(EPOCHS):
            for words, classes in loader:
                trainer.step(F.cross_entropy(net(words), classes))


if __name__ == "__main__":
    main()
