"""Checkpoints of other frameworks as checkpoints of distkit, with optimizer state.

One file for each format reads it into :class:`distkit.checkpoint.foreign.origin.Origin`; :mod:`~.converting` gives every
tensor its name and writes the result. Nothing in such a folder is trusted: :mod:`~.pickles` is the only place that
unpickles, and it builds no class but its own.
"""

from distkit.checkpoint.foreign.converting import Imported, import_checkpoint

__all__ = ["Imported", "import_checkpoint"]
