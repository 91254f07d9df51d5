"""`distkit plan --exact`: the real engine, run as one rank of all on tensors without data."""
