"""What a local Ray starts as its worker: has itself forked by `pipeline.forks`, else runs Ray's own worker here.

Run by path, standard library only, so that it costs next to nothing.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

ADDRESS = "SLUICE_FORKS"
"""Environment variable: the fork server's socket."""
READY, GO = b"?", b"!"
"""The fork asks whether it is still wanted; the answer."""
ANSWER_S = 20.0
"""Longest wait for a fork: the server may still be importing."""


def fork(address: str, arguments: list[str]) -> socket.socket | None:
    """The connection to a fork that runs `arguments` with this process's environment; None if there is none.

    It closes when the fork ends. A fork that comes too late finds nobody and ends.
    """
    request = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(ANSWER_S)
        connection.connect(address)
        connection.sendall(json.dumps(request).encode() + b"\n")
        if connection.recv(1) == READY:
            connection.sendall(GO)
            return connection
    except OSError as error:
        print(f"no fork from {address}: {error}", file=sys.stderr, flush=True)
    connection.close()
    return None


def main() -> None:
    """Stay as long as the worker lives, whichever process it is."""
    spec = find_spec("ray")
    assert spec is not None
    ray = Path(spec.origin or "").parent
    arguments = [str(ray / "_private" / "workers" / "default_worker.py"), *sys.argv[1:]]
    connection = fork(os.environ.get(ADDRESS, ""), arguments)
    if connection is None:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
        return
    with connection:
        connection.settimeout(None)
        connection.recv(1)


if __name__ == "__main__":
    main()
