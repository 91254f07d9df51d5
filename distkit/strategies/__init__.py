"""Strategies: one file for what an engine does differently, and the registry that finds them by name."""
