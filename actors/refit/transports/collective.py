"""Broadcasts weights from rank 0 to receivers that join the way SGLang does, over whatever library moves the bytes.

A receiver meets rank 0 at a TCP store, under the prefix of the group's name, and lets torch build a process group from
it. Rank 0 builds the same communicator by hand (a `Wire` does): it neither has nor registers a default group, so
nothing of a training group (bound device, name, sequence) leaks into it. Each transfer runs on a thread of its own, so
that whoever asked for it never waits longer than the deadline. While a bucket is broadcast the next one is flattened.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, TCPStore

from actors.network import address_of
from actors.refit.transports import Offer, Sent, TransferError
from actors.refit.transports.staging import Staging
from actors.refit.transports.tensors import Planner, Sizer, checksum_for, checksums
from contracts.events import Bucket, TransferStarted
from contracts.weights import digest

TIMEOUT_FLOOR_S = 0.1
"""gloo refuses a timeout of zero."""
LEAVE_S = 1.0
"""Longest wait for an aborted transfer's thread to come out of the library."""


class Communicator(Protocol):
    """Rank 0's end of a group."""

    def warm(self, timeout: timedelta) -> None:
        """Do what the first broadcast would do besides, with receivers that do so too. Raises as `broadcast` does."""
        ...

    def broadcast(self, flats: Sequence[torch.Tensor], timeout: timedelta) -> Callable[[], None]:
        """Begin to broadcast vectors of bytes, in order; the answer waits until they may be changed.

        Both raise `RuntimeError` or `OSError`.
        """
        ...

    def abort(self) -> None:
        """Break what is under way, here and at the receivers, from any thread. The communicator is of no use then."""
        ...


class Wire(Protocol):
    """A library that moves bytes."""

    device: str
    """What torch puts before a backend's keys in the store: `cpu` or `cuda`."""

    def connect(self, store: Any, world_size: int, timeout: timedelta) -> Communicator:
        """Build rank 0's communicator; `store` is where the group's keys are. Raises `RuntimeError` or `OSError`."""
        ...

    def absent(self, store: Any, offset: int) -> bool:
        """Whether the receiver whose first rank is `offset` has not come. Raises `RuntimeError`."""
        ...

    def flatten(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Their bytes, one behind the other, as one uint8 vector where the library wants it."""
        ...


class CollectiveSender:
    """`actors.refit.transports.Sender` by broadcast. `host`: where to listen, and what to announce; `auto`: this node.

    `wire` is called for each fresh group. With `apart` the tensors of a bucket travel together, but each from where it
    is to where it goes, which our own receiver takes; otherwise a bucket is one vector.
    """

    def __init__(
        self,
        host: str,
        bucket_bytes: int | None,
        wire: Callable[[str], Wire],
        apart: bool = False,
        staging: Staging = Staging(),  # noqa: B008 - frozen
    ) -> None:
        self._host = address_of(host)
        self._sizer = Sizer(bucket_bytes, staging)
        self._planner = Planner()
        self._apart = apart
        self._wire = wire(self._host)
        self._lock = threading.Lock()
        self._offered: Offered | None = None
        self._group: Group | None = None
        self._attempt: _Attempt | None = None

    def offer(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Offer:
        """See `Sender.offer`."""
        self.abandon()
        held = {name: tensor.detach() for name, tensor in tensors}
        try:
            choice = self._sizer.choose(held)
            buckets = self._planner.plan(held, choice.size)
            kind = checksum_for(held, self._apart)
            whole = digest(checksums(held, kind))
            meeting = _Meeting(self._host)
        except (OSError, ValueError, RuntimeError) as error:  # a GPU without memory is a RuntimeError
            self._sizer.forget()
            raise TransferError("offer", f"can't offer weights at {self._host}: {error}") from error
        with self._lock:
            self._offered = Offered(held, buckets, meeting, self._wire if self._apart else None)
        return Offer(self._host, meeting.port, buckets, sum(b.size for b in buckets), whole, kind, choice.note)

    def send(self, started: TransferStarted, timeout: float) -> Sent:
        """See `Sender.send`."""
        with self._lock:
            offered, self._offered = self._offered, None
            group, self._group = self._group, None
            if offered is None:
                raise TransferError("join", f"nothing is offered for epoch {started.epoch}")
            attempt = self._attempt = _Attempt(started, offered, group, self._wire, timeout)
        thread = threading.Thread(target=attempt.run, name=f"refit-{started.epoch}", daemon=True)
        thread.start()
        if not attempt.ended.wait(timeout):
            attempt.abort(f"not done in {timeout:.3g} s{attempt.absent()}")
        # A thread that comes out of the library while the interpreter ends would abort the process.
        thread.join(LEAVE_S)
        with self._lock:
            self._attempt = None
            if attempt.error is None:
                self._group = attempt.group
            else:
                self._sizer.forget(attempt.error.reason)
        return attempt.result()

    def abandon(self, epoch: int | None = None, reason: str = "") -> None:
        """See `Sender.abandon`."""
        if reason:
            self._sizer.forget(reason)
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


class Offered:
    """Tensors by name, how they are bucketed, and where receivers meet."""

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        buckets: tuple[Bucket, ...],
        meeting: _Meeting,
        apart: Wire | None,
    ) -> None:
        self.tensors = tensors
        self.buckets = buckets
        self.meeting = meeting
        self.apart: dict[str, torch.Tensor] | None = None
        if apart is not None:  # now, and not while generation stands still
            self.apart = {name: apart.flatten([tensor]) for name, tensor in tensors.items() if tensor.numel()}

    def vectors(self, wire: Wire) -> Iterator[list[torch.Tensor]]:
        """Each bucket as it travels; one at a time."""
        for bucket in self.buckets:
            names = [spec.name for spec in bucket.tensors]
            if self.apart is None:
                yield [wire.flatten([self.tensors[name] for name in names])]
            else:
                yield [self.apart[name] for name in names if name in self.apart]


class Group:
    """A communicator and the store its ranks met at."""

    def __init__(self, name: str, communicator: Communicator, meeting: _Meeting) -> None:
        self.name = name
        self.communicator = communicator
        self.meeting = meeting

    def abort(self) -> None:
        """A broadcast under way ends in an error, here and at every receiver."""
        self.communicator.abort()
        self.meeting.close()


class _Attempt:
    """One transfer. It ends once: with a result, with its own error, or by `abort` from another thread."""

    def __init__(
        self, started: TransferStarted, offered: Offered, group: Group | None, wire: Wire, timeout: float
    ) -> None:
        self.started = started
        self.ended = threading.Event()
        self.group = group
        self.error: TransferError | None = None
        self._offered = offered
        self._wire = wire
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
        """End the attempt from outside. Its thread may stay in the library until the library's own timeout."""
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
            store = self._within(self._offered.meeting.watching)
            names = [m.engine for m in self.started.members if self._wire.absent(store, m.offset)]
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

    def _within(self, store: TCPStore) -> PrefixStore:
        """Where torch's own group creation looks: the caller's prefix, the group's, and the device's."""
        name = self.started.group
        return PrefixStore(f"{self._wire.device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))

    def _join(self) -> Group:
        started, held = self.started, self.group
        if not started.fresh:
            if held is None or held.name != started.group:
                raise TransferError("join", f"group {started.group!r} is not held any more")
            return held
        if held is not None:
            held.abort()
        meeting = self._offered.meeting
        meeting.joining.set_timeout(self._left())
        communicator = self._wire.connect(self._within(meeting.joining), started.world_size, self._left())
        group = Group(started.group, communicator, meeting)
        with self._lock:
            if not self.ended.is_set():
                self.group = group
        if self.group is not group:
            group.abort()
            raise TransferError("join", "abandoned")
        communicator.warm(self._left())
        return group

    def _broadcast(self, group: Group) -> Sent:
        """Two flattened buckets at most are in memory: the one that travels and the one that is flattened meanwhile."""
        self._phase = "send"
        begin = time.monotonic()
        sent = 0
        under_way: list[Callable[[], None]] = []
        for flats in self._offered.vectors(self._wire):
            if under_way and self._offered.apart is None:
                under_way.pop()()
            under_way.append(group.communicator.broadcast(flats, self._left()))
            sent += sum(flat.numel() for flat in flats)
        for wait in under_way:
            wait()
        return Sent(time.monotonic() - begin, sent)


def broadcast_options(timeout: timedelta) -> BroadcastOptions:
    """From rank 0."""
    options = BroadcastOptions()
    options.rootRank = 0
    options.timeout = timeout
    return options


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


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
