"""``python -m tests.launch.ray_start``: `ray start` on the loopback interface, with the patience of a loaded machine.

A cluster of several nodes takes this machine's address for 127.0.0.1, and would listen on all interfaces (ray 2.60.0,
ray/_private/services.py: ``resolve_ip_for_localhost``); here 127.0.0.1 stays what it is.

A node that isn't registered after 30 s gives up (ray 2.60.0, ray/_private/node.py: ``raylet_start_wait_time_s``); here the
question whether it is registered waits for longer.
"""

from __future__ import annotations

import time
from typing import Any

from ray._private import services
from ray.scripts.scripts import main

_WAIT_S = 180.0


def patient(*args: Any, **kwargs: Any) -> Any:
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            return found(*args, **kwargs)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


if __name__ == "__main__":
    found = services.get_node
    services.get_node = patient
    services.resolve_ip_for_localhost = lambda host: host
    main()
