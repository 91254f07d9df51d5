"""Tensor parallelism on modules as they are: which layer is split how, and how the model then runs.

:mod:`.layout` says what is split, :mod:`.detect` finds it out, :mod:`.trial` tries it out, :mod:`.sharded` is the tensor
between two split layers, :mod:`.layers` are the split layers, :mod:`.attention` is torch's own attention, :mod:`.apply` puts
them into a model, and :mod:`.state` gives the pieces their place in the whole for checkpoints.
"""
