"""What the agents of several hosts tell each other: a failure, and that the workers of a host are done."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from distkit.launch.failure import Failure, first_failure

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Nodes"]

_ASK_EVERY_S = 1.0
_HEARD_WITHIN_S = 10.0


class Nodes:
    """The other hosts of a run, through the store in which they met.

    torchrun's static rendezvous has no such exchange: a host whose workers wait for a rank that failed elsewhere
    would wait until a collective times out.

    Args:
        store: The store of the agents, with keys of this attempt only.
        rank: Place of this host.
        count: Number of hosts.
    """

    def __init__(self, store: Store, rank: int, count: int) -> None:
        self._store = store
        self.rank, self.count = rank, count
        self._failed, self._late, self._heard, self._done = "failed", "late", "failure-heard", "done"
        self._asked = time.monotonic()
        self._said_done = False

    def tell(self, failure: Failure) -> None:
        """Say that a rank of this host failed."""
        if self.count > 1:
            self._store.set(f"{self._failed}/{self.rank}", failure.to_json())
            self._store.set(self._failed, "yes")

    def add_late(self, failure: Failure) -> None:
        """Say that a rank of this host was late, before :meth:`hear`."""
        if self.count > 1:
            self._store.set(f"{self._late}/{self.rank}", failure.to_json())

    def failure(self, *, now: bool = False) -> Failure | None:
        """The first of the failures that hosts told of; asks the store once a second at most.

        Args:
            now: Ask in any case.

        Raises:
            RuntimeError: The host of the store, node 0, can't be reached any more.
        """
        if self.count == 1 or (not now and time.monotonic() - self._asked < _ASK_EVERY_S):
            return None
        self._asked = time.monotonic()
        if not self._store.check([self._failed]):
            return None
        keys = (f"{what}/{node}" for what in (self._late, self._failed) for node in range(self.count))
        told = [key for key in keys if self._store.check([key])]
        return first_failure(Failure.from_json(self._store.get(key).decode()) for key in told)

    def hear(self) -> None:
        """Say that this host knows of the failure; node 0, which holds the store, waits until all hosts do."""
        if self.count == 1:
            return
        self._store.add(self._heard, 1)
        deadline = time.monotonic() + _HEARD_WITHIN_S
        while self.rank == 0 and self._store.add(self._heard, 0) < self.count and time.monotonic() < deadline:
            time.sleep(0.1)

    def all_done(self) -> bool:
        """Whether the workers of every host ended well; to be asked when those of this host did.

        Raises:
            RuntimeError: The host of the store, node 0, can't be reached any more.
        """
        if self.count == 1:
            return True
        done = self._store.add(self._done, 0 if self._said_done else 1)
        self._said_done = True
        return done >= self.count
