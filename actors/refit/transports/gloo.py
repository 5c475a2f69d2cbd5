"""Sends weights over gloo, from host memory.

gloo has no abort, and torch's is empty for it: a join is broken by closing the store, a broadcast by shutting its
connections down.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo

from actors.refit.transports.collective import CollectiveSender, broadcast_options
from actors.refit.transports.staging import Staging
from actors.refit.transports.tensors import as_bytes

SOCKADDR_BYTES = 28
"""Of the larger kind, that of IPv6."""

_Gloo: Any = ProcessGroupGloo
"""torch's type stubs leave out most of it."""


class GlooSender(CollectiveSender):
    """`CollectiveSender` over gloo."""

    def __init__(
        self,
        host: str,
        bucket_bytes: int | None,
        apart: bool = False,
        staging: Staging = Staging(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(host, bucket_bytes, GlooWire, apart, staging)


class GlooWire:
    """`collective.Wire` over TCP from `host`."""

    device = "cpu"

    def __init__(self, host: str) -> None:
        self._host = host

    def connect(self, store: Any, world_size: int, timeout: timedelta) -> GlooCommunicator:
        """Blocks until all ranks are there."""
        options = _Gloo._Options()
        options._devices = [_Gloo.create_device(hostname=self._host)]
        options._timeout = timeout
        options._threads = 1
        group = _Gloo(store, 0, world_size, options)
        return GlooCommunicator(group, [_announced(store.get(_key(rank))) for rank in range(world_size)])

    def absent(self, store: Any, offset: int) -> bool:
        """A rank that comes announces its address."""
        return not store.check([_key(offset)])

    def flatten(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """In host memory; one tensor is not copied there again."""
        return as_bytes(tensors[0]) if len(tensors) == 1 else torch.cat([as_bytes(tensor) for tensor in tensors])


class GlooCommunicator:
    """A process group and the socket addresses that its ranks announced to each other."""

    def __init__(self, group: Any, addresses: list[bytes]) -> None:
        self._group = group
        self._addresses = addresses

    def warm(self, timeout: timedelta) -> None:
        """See `Communicator.warm`. All are connected already."""

    def broadcast(self, flats: Sequence[torch.Tensor], timeout: timedelta) -> Callable[[], None]:
        """See `Communicator.broadcast`."""
        works = [self._group.broadcast([flat], broadcast_options(timeout)) for flat in flats]

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def abort(self) -> None:
        """Shut the connections down: a broadcast under way ends in an error, here and at every receiver."""
        for connection in _connections():
            with connection:
                ends = _ends(connection)
                if any(address.startswith(end) for end in ends for address in self._addresses):
                    connection.shutdown(socket.SHUT_RDWR)


def _key(rank: int) -> str:
    """Under which a rank announces its address in gloo's first context."""
    return f"0/{rank}"


def _connections() -> Iterator[socket.socket]:
    """Every TCP connection of this process, as a duplicate to be closed by the caller."""
    for name in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            # The descriptor was closed since it was listed.
            continue
        if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
            yield connection
        else:
            connection.close()


def _ends(connection: socket.socket) -> list[bytes]:
    """Both ends of a connection as they stand in a socket address; none of a socket that is not connected."""
    try:
        ends = [connection.getsockname(), connection.getpeername()]
    except OSError:
        return []
    family = struct.pack("=H", connection.family)
    flow = bytes(4) if connection.family == socket.AF_INET6 else b""
    return [family + struct.pack("!H", end[1]) + flow + socket.inet_pton(connection.family, end[0]) for end in ends]


def _announced(value: bytes) -> bytes:
    """The socket address in what a rank tells the others: host name and address, each behind its length, and more."""
    (host,) = struct.unpack_from("=Q", value)
    begin = 8 + host + 8
    return value[begin : begin + SOCKADDR_BYTES]
