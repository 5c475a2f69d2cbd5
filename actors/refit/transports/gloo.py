"""Sends weights over gloo, to receivers that join the way SGLang does.

A receiver meets rank 0 at a TCP store, under the prefix of the group's name, and lets torch build a process group from
it. Rank 0 builds the same communicator by hand: it neither has nor registers a default group, so nothing of a training
group (bound device, name, sequence) leaks into it. gloo has no abort, and torch's is empty for it: a join is broken by
closing the store, a broadcast by shutting its connections down. Each transfer runs on a thread of its own, so that
whoever asked for it never waits longer than the deadline.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from actors.refit.transports import Offer, Sent, TransferError
from actors.refit.transports.plan import plan
from actors.refit.transports.tensors import as_bytes, checksum, spec_of
from contracts.events import Bucket, TransferStarted
from contracts.weights import digest

TIMEOUT_FLOOR_S = 0.1
"""gloo refuses a timeout of zero."""
SOCKADDR_BYTES = 28
"""Of the larger kind, that of IPv6."""
LEAVE_S = 1.0
"""Longest wait for an aborted transfer's thread to come out of gloo."""

_Gloo: Any = ProcessGroupGloo
"""torch's type stubs leave out most of it."""


class GlooSender:
    """`actors.refit.transports.Sender` over gloo. `host`: where to listen, and what to announce; `auto`: this node."""

    def __init__(self, host: str, bucket_bytes: int) -> None:
        self._host = socket.gethostbyname(socket.gethostname()) if host == "auto" else host
        self._bucket_bytes = bucket_bytes
        self._lock = threading.Lock()
        self._offered: _Offered | None = None
        self._group: _Group | None = None
        self._attempt: _Attempt | None = None

    def offer(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Offer:
        """See `Sender.offer`."""
        self.abandon()
        held = {name: tensor.detach() for name, tensor in tensors}
        try:
            buckets = plan([spec_of(name, tensor) for name, tensor in held.items()], self._bucket_bytes)
            meeting = _Meeting(self._host)
        except (OSError, ValueError, RuntimeError) as error:
            raise TransferError("offer", f"can't offer weights at {self._host}: {error}") from error
        whole = digest({name: checksum(tensor) for name, tensor in held.items()})
        with self._lock:
            self._offered = _Offered(held, buckets, meeting)
        return Offer(self._host, meeting.port, buckets, sum(b.size for b in buckets), whole)

    def send(self, started: TransferStarted, timeout: float) -> Sent:
        """See `Sender.send`."""
        with self._lock:
            offered, self._offered = self._offered, None
            group, self._group = self._group, None
            if offered is None:
                raise TransferError("join", f"nothing is offered for epoch {started.epoch}")
            attempt = self._attempt = _Attempt(started, offered, group, self._host, timeout)
        thread = threading.Thread(target=attempt.run, name=f"refit-{started.epoch}", daemon=True)
        thread.start()
        if not attempt.ended.wait(timeout):
            attempt.abort(f"not done in {timeout:.3g} s{attempt.absent()}")
        # A thread that comes out of gloo while the interpreter ends would abort the process.
        thread.join(LEAVE_S)
        with self._lock:
            self._attempt = None
            if attempt.error is None:
                self._group = attempt.group
        return attempt.result()

    def abandon(self, epoch: int | None = None) -> None:
        """See `Sender.abandon`."""
        with self._lock:
            attempt = self._attempt
        if attempt is not None and (epoch is None or attempt.started.epoch <= epoch):
            attempt.abort(f"epoch {attempt.started.epoch} was abandoned")

    def close(self) -> None:
        """See `Sender.close`."""
        self.abandon()
        with self._lock:
            self._offered = None
            group, self._group = self._group, None
        if group is not None:
            group.abort()


class _Meeting:
    """The store where receivers meet. The server is held here alone, so that closing it ends every wait on it.

    `joining` is the connection that rank 0 waits on, `watching` one that answers meanwhile.
    """

    def __init__(self, host: str) -> None:
        self._server: TCPStore | None = _listen(host)
        self.port = self._server.port
        self.joining, self.watching = (TCPStore(host, self.port, wait_for_workers=False) for _ in range(2))

    def close(self) -> None:
        """Disconnect everybody."""
        self._server = None


class _Offered:
    """Tensors by name, how they are bucketed, and where receivers meet."""

    def __init__(self, tensors: dict[str, torch.Tensor], buckets: tuple[Bucket, ...], meeting: _Meeting) -> None:
        self.tensors = tensors
        self.buckets = buckets
        self.meeting = meeting

    def flattened(self) -> Iterator[torch.Tensor]:
        """Each bucket as one uint8 vector in host memory; one at a time."""
        for bucket in self.buckets:
            yield torch.cat([as_bytes(self.tensors[spec.name]) for spec in bucket.tensors])


class _Group:
    """A communicator, the socket addresses its ranks announced to each other, and the store they met at."""

    def __init__(self, name: str, communicator: Any, addresses: list[bytes], meeting: _Meeting) -> None:
        self.name = name
        self.communicator = communicator
        self.meeting = meeting
        self._addresses = addresses

    def abort(self) -> None:
        """Shut the connections down: a broadcast under way ends in an error, here and at every receiver."""
        for connection in _connections():
            with connection:
                ends = _ends(connection)
                if any(address.startswith(end) for end in ends for address in self._addresses):
                    connection.shutdown(socket.SHUT_RDWR)
        self.meeting.close()


class _Attempt:
    """One transfer. It ends once: with a result, with its own error, or by `abort` from another thread."""

    def __init__(
        self, started: TransferStarted, offered: _Offered, group: _Group | None, host: str, timeout: float
    ) -> None:
        self.started = started
        self.ended = threading.Event()
        self.group = group
        self.error: TransferError | None = None
        self._offered = offered
        self._host = host
        self._deadline = time.monotonic() + timeout
        self._phase = "join"
        self._sent: Sent | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        """Join and broadcast; every outcome ends the attempt."""
        try:
            group = self._join()
            self._end(sent=self._broadcast(group))
        except TransferError as error:
            self._end(error=error)
        except (OSError, RuntimeError) as error:
            failure = TransferError(self._phase, f"{_first_line(error)}{self.absent()}")
            # A traceback would keep the communicator, and with it every receiver's connection, open.
            failure.__cause__ = error.with_traceback(None)
            self._end(error=failure)

    def abort(self, reason: str) -> None:
        """End the attempt from outside. Its thread may stay in gloo until gloo's own timeout."""
        self._end(error=TransferError(self._phase, reason))

    def result(self) -> Sent:
        """What came of it."""
        if self.error is not None:
            raise self.error
        assert self._sent is not None
        return self._sent

    def absent(self) -> str:
        """Who has not come to the meeting, for the message of a failed join."""
        if self._phase != "join" or self.ended.is_set():
            return ""
        try:
            store = _within(self.started.group, self._offered.meeting.watching)
            names = [m.engine for m in self.started.members if not store.check([_key(m.offset)])]
        except RuntimeError:
            # The meeting was closed meanwhile, by whoever ended the attempt.
            return ""
        return f"; never joined: {', '.join(names)}" if names else ""

    def _end(self, sent: Sent | None = None, error: TransferError | None = None) -> None:
        with self._lock:
            if self.ended.is_set():
                return
            self._sent, self.error = sent, error
            group = self.group
            if error is not None:
                self.group = None
            self.ended.set()
        if error is not None:
            self._offered.meeting.close()
            if group is not None:
                group.abort()

    def _left(self) -> timedelta:
        return timedelta(seconds=max(TIMEOUT_FLOOR_S, self._deadline - time.monotonic()))

    def _join(self) -> _Group:
        started, held = self.started, self.group
        if not started.fresh:
            if held is None or held.name != started.group:
                raise TransferError("join", f"group {started.group!r} is not held any more")
            return held
        if held is not None:
            held.abort()
        options = _Gloo._Options()
        options._devices = [_Gloo.create_device(hostname=self._host)]
        options._timeout = self._left()
        options._threads = 1
        meeting = self._offered.meeting
        meeting.joining.set_timeout(self._left())
        store = _within(started.group, meeting.joining)
        communicator = _Gloo(store, 0, started.world_size, options)
        addresses = [_announced(store.get(_key(rank))) for rank in range(started.world_size)]
        group = _Group(started.group, communicator, addresses, meeting)
        with self._lock:
            if not self.ended.is_set():
                self.group = group
                return group
        group.abort()
        raise TransferError("join", "abandoned")

    def _broadcast(self, group: _Group) -> Sent:
        self._phase = "send"
        begin = time.monotonic()
        sent = 0
        for flat in self._offered.flattened():
            options = BroadcastOptions()
            options.rootRank = 0
            options.timeout = self._left()
            group.communicator.broadcast([flat], options).wait()
            sent += flat.numel()
        return Sent(time.monotonic() - begin, sent)


def _listen(host: str) -> TCPStore:
    """A store that receivers can connect to at any time. It listens at `host` alone, where torch would take all."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as listener:
        listener.bind((host, 0))
        listener.listen()
        return TCPStore(
            host_name=host,
            port=listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def _within(group: str, store: TCPStore) -> PrefixStore:
    """Where torch's own group creation looks: the caller's prefix, the group's, and the device's."""
    return PrefixStore("cpu/", PrefixStore(f"{group}/", PrefixStore(group, store)))


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


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
