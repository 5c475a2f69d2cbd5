"""Runs a server that can't watch its parent itself: `python guard.py SERVER ARGS...`, with the standard library alone.

Guard and server share one process group. When the guard's stdin closes (its parent died), or SIGTERM comes, the group
gets SIGTERM, and SIGKILL if it overstays. The guard leaves with the server's exit status, 128 + n for signal n.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

GRACE_S = 10.0
"""From SIGTERM to SIGKILL."""


def main(command: list[str]) -> int:
    """Run `command` until it ends or has to; answers its exit status."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    group = os.getpgrp()
    orphaned = threading.Event()

    def expire(*_: Any) -> None:
        killer = threading.Timer(GRACE_S, os.killpg, (group, signal.SIGKILL))
        killer.daemon = True
        killer.start()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        orphaned.set()
        os.killpg(group, signal.SIGTERM)

    signal.signal(signal.SIGTERM, expire)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=watch, daemon=True).start()
    status = server.wait()
    if orphaned.is_set():  # nobody else ends what the server left behind
        os.killpg(group, signal.SIGKILL)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
