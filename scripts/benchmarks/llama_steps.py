#!/usr/bin/env python3
"""A Llama of transformers with about 30M parameters on random tokens: a script like a user's, for predictions.py.

Examples:
  distkit plan --check -s fsdp --nproc 2 scripts/benchmarks/llama_steps.py
  distkit-run -s zero3 --nproc 2 --set max_steps=20 scripts/benchmarks/llama_steps.py
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import distkit


def main() -> None:
    """Train for an epoch."""
    parser = argparse.ArgumentParser(description="Train a Llama on random tokens.")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=32, help="tokens in a sequence")
    arguments = parser.parse_args()
    with distkit.Trainer() as trainer:
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=arguments.width,
                intermediate_size=arguments.width * 43 // 16,
                num_hidden_layers=arguments.layers,
                num_attention_heads=8,
                vocab_size=8000,
                use_cache=False,
            )
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        tokens = torch.randint(0, 8000, (512, arguments.length))
        loader = DataLoader(TensorDataset(tokens), batch_size=arguments.batch)
        model, optimizer, loader = trainer.prepare(model, optimizer, loader)
        for _ in trainer.epochs(1):
            for (batch,) in loader:
                trainer.step(model(batch, labels=batch).loss)


if __name__ == "__main__":
    main()
