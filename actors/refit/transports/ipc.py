"""Hands weights to engines on the same host through shared memory: nothing but their place travels.

Sidecars come to a Unix socket that only this user can reach. Each bucket is copied into one of two buffers; a sidecar
passes its place on to its server and says when it is loaded. While receivers load one buffer, the other is filled.
Every wait ends at the deadline of the transfer; `abandon` ends it by shutting the connections down.

For our own receiver in SGLang's processes the whole model is one bucket: it is copied into a buffer of its size when it
is offered, which stays, and which every reader opens once.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from actors.engine.inside.slices import offsets
from actors.leftovers import MEETING, Claim, sweep
from actors.refit.transports import Offer, Sent, TransferError
from actors.refit.transports.buffers import Buffer, Form, buffer
from actors.refit.transports.staging import Staging
from actors.refit.transports.tensors import Planner, Sizer, checksum_for, checksums
from contracts.events import Bucket, Rank, TransferStarted
from contracts.handles import LINE_LIMIT, Filled, Hello, Message, Refused, Taken, line, parse
from contracts.weights import digest

BUFFERS = 2
FILL_S = 60.0
"""How long the copy of a whole model may take."""
SCHEME = "unix:"
"""What an offered address begins with; the path of the socket follows."""
HELLO_S = 5.0
"""How long somebody who connects may take to say who it is."""


class IpcSender:
    """`actors.refit.transports.Sender` over shared memory. `form`: what the engines read."""

    def __init__(self, bucket_bytes: int | None, form: Form, staging: Staging = Staging()) -> None:  # noqa: B008 - frozen
        self._sizer = Sizer(bucket_bytes, staging)
        self._planner = Planner()
        self._form: Form = form
        self._lock = threading.Lock()
        self._offered: _Offered | None = None
        self._attempt: _Attempt | None = None
        self._buffers: list[Buffer] = []
        sweep()  # what a trainer before this one was killed with
        self._readers: dict[tuple[str, int], tuple[str, ...]] = {}

    def offer(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Offer:
        """See `Sender.offer`."""
        self.abandon()
        held = {name: tensor.detach() for name, tensor in tensors}
        try:
            choice = self._sizer.choose(held, sum(one.size for one in self._buffers))
            buckets = self._planner.plan(held, choice.size)
            if self._form == "direct":
                self._lay_out(held)
            kind = checksum_for(held, self._form == "direct")
            whole = digest(checksums(held, kind))
            meeting = _Meeting()
        except (OSError, ValueError, RuntimeError) as error:  # a GPU without memory is a RuntimeError
            self._sizer.forget()
            raise TransferError("offer", f"can't offer weights on this host: {error}") from error
        if self._form == "direct":
            held = {}
        with self._lock:
            before, self._offered = self._offered, _Offered(held, buckets, meeting)
        if before is not None:
            before.meeting.close()
        total = sum(bucket.size for bucket in buckets)
        return Offer(f"{SCHEME}{meeting.path}", 0, buckets, total, whole, kind, choice.note)

    def send(self, started: TransferStarted, timeout: float) -> Sent:
        """See `Sender.send`. There is no group: receivers come anew for each transfer."""
        with self._lock:
            offered, self._offered = self._offered, None
            if offered is None:
                raise TransferError("join", f"nothing is offered for epoch {started.epoch}")
            attempt = self._attempt = _Attempt(started, offered, self._form, time.monotonic() + timeout)
        try:
            if self._form == "direct":
                return attempt.run(lambda: attempt.hand_over(self._buffers[0], self._readers))
            buffers = self._room(max(bucket.size for bucket in offered.buckets), offered.tensors, BUFFERS)
            return attempt.run(lambda: attempt.send(buffers))
        except TransferError as error:
            self._sizer.forget(error.reason)
            raise attempt.abandoned or error from error.__cause__
        finally:
            attempt.close()
            with self._lock:
                self._attempt = None

    def abandon(self, epoch: int | None = None, reason: str = "") -> None:
        """See `Sender.abandon`."""
        if reason:
            self._sizer.forget(reason)
        with self._lock:
            attempt = self._attempt
        if attempt is not None and (epoch is None or attempt.started.epoch <= epoch):
            attempt.abandon()

    def close(self) -> None:
        """See `Sender.close`."""
        self.abandon()
        with self._lock:
            offered, self._offered = self._offered, None
        if offered is not None:
            offered.meeting.close()
        for one in self._buffers:
            one.close()
        self._buffers = []

    def _lay_out(self, tensors: dict[str, torch.Tensor]) -> None:
        """The whole model where readers find it. Raises `TransferError`."""
        starts, size = offsets(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        (room,) = self._room(size, tensors, 1)
        try:
            room.fill(tensors.values(), time.monotonic() + FILL_S, starts)
        except (TimeoutError, RuntimeError) as error:
            raise TransferError("offer", f"the weights were not copied for other processes: {error}") from error

    def _room(self, size: int, tensors: dict[str, torch.Tensor], count: int) -> Sequence[Buffer]:
        """`count` buffers of at least `size` bytes, kept for the next transfer. Raises `TransferError`."""
        if not self._buffers or self._buffers[0].size < size:
            for one in self._buffers:
                one.close()
            self._buffers, self._readers = [], {}
            device = next(iter(tensors.values())).device
            try:
                for _ in range(count):
                    self._buffers.append(buffer(size, device))
            except (OSError, RuntimeError) as error:
                way_out = "lower refit.bucket_mib" if count > 1 else "use refit.receiver=sglang, which takes buckets"
                raise TransferError(
                    "send", f"no room for {count} buffers of {size} bytes ({error}): {way_out}"
                ) from error
        return self._buffers


class _Meeting:
    """A socket in a directory that nobody else may enter."""

    def __init__(self) -> None:
        self._claim = Claim.directory(Path(tempfile.gettempdir()) / f"{MEETING}{secrets.token_hex(8)}")
        self.path = self._claim.path / "offer"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.listener.bind(str(self.path))
            self.listener.listen(1024)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Nobody can come any more."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes an accept under way
        self.listener.close()
        self._claim.drop()


class _Offered:
    """Tensors by name, how they are bucketed, and where receivers come."""

    def __init__(self, tensors: dict[str, torch.Tensor], buckets: tuple[Bucket, ...], meeting: _Meeting) -> None:
        self.tensors = tensors
        self.buckets = buckets
        self.meeting = meeting


class _Receiver:
    """The connection of one sidecar."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = bytearray()
        self.member: Rank | None = None

    @property
    def name(self) -> str:
        return self.member.engine if self.member is not None else "a receiver"

    def send(self, message: Message, deadline: float) -> None:
        self._connection.settimeout(_left(deadline))
        self._connection.sendall(line(message))

    def next(self, deadline: float) -> Message:
        """The next message. Raises `OSError` (`TimeoutError` at the deadline) or `ValueError`."""
        while (end := self._data.find(b"\n")) < 0:
            if len(self._data) > LINE_LIMIT:
                raise ValueError(f"a message is longer than {LINE_LIMIT} bytes")
            self._connection.settimeout(_left(deadline))
            piece = self._connection.recv(65536)
            if not piece:
                raise ConnectionError("it went away")
            self._data += piece
        data = bytes(self._data[:end])
        del self._data[: end + 1]
        return parse(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class _Attempt:
    """One transfer, in the thread that asked for it."""

    def __init__(self, started: TransferStarted, offered: _Offered, form: Form, deadline: float) -> None:
        self.started = started
        self.abandoned: TransferError | None = None
        self._offered = offered
        self._form: Form = form
        self._deadline = deadline
        self._receivers: list[_Receiver] = []
        self._lock = threading.Lock()
        self._phase = "join"

    def run(self, send: Callable[[], None]) -> Sent:
        """Wait for all receivers, then `send`. Raises `TransferError`."""
        try:
            self._join()
            self._phase = "send"
            begin = time.monotonic()
            send()
        except TimeoutError as error:
            raise TransferError(self._phase, f"not done at the deadline: {error}{self._absent()}") from error
        except (OSError, ValueError, RuntimeError) as error:
            raise TransferError(self._phase, f"{str(error) or type(error).__name__}{self._absent()}") from error
        return Sent(time.monotonic() - begin, sum(bucket.size for bucket in self._offered.buckets))

    def abandon(self) -> None:
        """End it from another thread."""
        with self._lock:
            self.abandoned = TransferError(self._phase, f"epoch {self.started.epoch} was abandoned")
            for receiver in self._receivers:
                receiver.close()
        self._offered.meeting.close()

    def close(self) -> None:
        """Let everybody go."""
        self._offered.meeting.close()
        with self._lock:
            for receiver in self._receivers:
                receiver.close()

    def _join(self) -> None:
        members = {(m.engine, m.boot): m for m in self.started.members}
        while members:
            listener = self._offered.meeting.listener
            listener.settimeout(_left(self._deadline))
            receiver = _Receiver(listener.accept()[0])
            try:
                hello = receiver.next(min(self._deadline, time.monotonic() + HELLO_S))
            except (OSError, ValueError):
                hello = None
            found = None
            if isinstance(hello, Hello) and hello.epoch == self.started.epoch:
                found = members.pop((hello.engine, hello.boot), None)
            if found is None:
                receiver.close()
                continue
            receiver.member = found
            with self._lock:
                self._receivers.append(receiver)
                if self.abandoned is not None:
                    raise self.abandoned

    def _absent(self) -> str:
        if self._phase != "join":
            return ""
        there = [receiver.name for receiver in self._receivers]
        absent = [m.engine for m in self.started.members if m.engine not in there]
        return f"; never came: {', '.join(absent)}" if absent else ""

    def hand_over(self, room: Buffer, known: dict[tuple[str, int], tuple[str, ...]]) -> None:
        """Have every receiver take the whole of `room`. `known`: what each reader was told of where it is."""
        for receiver in self._receivers:
            member = receiver.member
            assert member is not None
            reader = (member.engine, member.boot)
            if reader not in known:
                known[reader] = tuple(room.part((), self._form) for _ in range(member.ranks))
            with _named(receiver, 0):
                receiver.send(Filled(0, known[reader]), self._deadline)
        self._await(0)

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Hand out bucket after bucket."""
        buckets = self._offered.buckets
        for index, bucket in enumerate(buckets):
            if index >= len(buffers):
                self._await(index - len(buffers))
            room = buffers[index % len(buffers)]
            room.fill((self._offered.tensors[spec.name] for spec in bucket.tensors), self._deadline)
            for receiver in self._receivers:
                assert receiver.member is not None
                parts = tuple(room.part(bucket.tensors, self._form) for _ in range(receiver.member.ranks))
                with _named(receiver, index):
                    receiver.send(Filled(index, parts), self._deadline)
        for index in range(max(0, len(buckets) - len(buffers)), len(buckets)):
            self._await(index)

    def _await(self, index: int) -> None:
        """Until every receiver has loaded bucket `index`."""
        for receiver in self._receivers:
            with _named(receiver, index):
                answer = receiver.next(self._deadline)
            if isinstance(answer, Refused):
                raise TransferError(self._phase, f"{receiver.name} refused bucket {index}: {answer.reason}")
            if answer != Taken(index):
                raise TransferError(self._phase, f"{receiver.name} answered {answer} to bucket {index}")


@contextlib.contextmanager
def _named(receiver: _Receiver, index: int) -> Iterator[None]:
    """Say of whom, and of which bucket, an error is."""
    try:
        yield
    except TimeoutError as error:
        raise TimeoutError(f"{receiver.name} did not load bucket {index} in time") from error
    except (OSError, ValueError) as error:
        raise TransferError("send", f"{receiver.name}, bucket {index}: {error}") from error


def _left(deadline: float) -> float:
    """Seconds until `deadline`. Raises `TimeoutError` when none are left: a socket would take 0 for not waiting."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left
