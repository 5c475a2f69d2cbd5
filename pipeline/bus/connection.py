"""Connections that pack commands in C: a commit of fifty arguments costs a tenth of what it costs in Python."""

from __future__ import annotations

from typing import Any

import hiredis
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.sentinel import SentinelManagedConnection


class Packed(AbstractConnection):
    """Every connection of this package is one."""

    def pack_command(self, *args: Any) -> list[bytes]:
        """Strings as UTF-8; the client's own commands may come as two words in one string."""
        if isinstance(args[0], str) and " " in args[0]:
            args = (*args[0].split(), *args[1:])
        return [hiredis.pack_command(args)]


class PackedUnix(Packed, UnixDomainSocketConnection):
    """Over a Unix socket."""


class PackedTCP(Packed, Connection):
    """Over TCP."""


class PackedTLS(Packed, SSLConnection):
    """Over TLS."""


class PackedSentinel(Packed, SentinelManagedConnection):
    """Over TCP to whichever server the sentinels name."""
