"""The advisor."""
