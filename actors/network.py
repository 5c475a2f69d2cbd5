"""The address that a server binds and announces, from the setting `network.host`, and a port that is free."""

from __future__ import annotations

import socket

ELSEWHERE = ("192.0.2.1", 9)
"""An address for documentation (RFC 5737): a route to it is looked up, and nothing is ever sent."""


def address_of(host: str) -> str:
    """`host` itself; for `auto` this node's address, as other nodes see it: that of the interface which leads out.

    A host name may resolve to loopback on its own node, so it is only asked where no interface leads out. Raises
    OSError if that fails as well.
    """
    if host != "auto":
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ELSEWHERE)
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def free_port() -> int:
    """A port that nobody on loopback uses now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
