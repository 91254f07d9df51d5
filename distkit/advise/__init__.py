"""The advisor behind `distkit plan`: memory, traffic and time of every strategy for a model on some hardware, and a choice."""
