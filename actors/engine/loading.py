"""One transfer into one server: join the group, receive the weights, flush what was made with the old ones, verify."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from actors.engine import colocated, direct, manifest
from actors.engine.client import CallError, HttpEngineClient
from actors.engine.direct import Answer, Direct
from actors.engine.state import Receive
from config.schema import RunConfig
from contracts.core import Context
from contracts.events import Bucket, Phase
from contracts.weights import digest

CALL_S = 5.0
"""How long the server may take to answer a call that has nothing to wait for; beyond that it counts as hung."""
AHEAD = 1
"""Buckets whose calls SGLang's own receiver has beside the one that it loads."""
FLUSH_S = 1.0
"""How long one flush waits for the server to be idle."""


class Unfit(Exception):
    """The server answered, and what it holds won't do. `error`: what of `contracts.events.EngineFailed`."""

    def __init__(self, error: str, reason: str) -> None:
        super().__init__(reason)
        self.error = error


class Loading:
    """`phase` is what is done now, `phases` what was done so far.

    `direct` is None where the server takes weights itself. `pause` pauses it; None where nobody but this actor can
    reach it: what is drained stays so.
    """

    def __init__(
        self,
        config: RunConfig,
        context: Context,
        client: HttpEngineClient,
        direct: Direct | None,
        pause: Callable[[], Awaitable[None]] | None,
        command: Receive,
        buckets: tuple[Bucket, ...],
    ) -> None:
        self.phase = "join"
        self._spent: dict[str, float] = {}
        self._config, self._context, self._client = config, context, client
        self._direct, self._pause, self._command, self._buckets = direct, pause, command, buckets

    @property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(Phase(name, seconds) for name, seconds in self._spent.items())

    async def run(self) -> dict[str, str] | None:
        """The checksums of what the server holds, by name; None when it can't tell.

        Raises `Unfit`, `CallError`, `colocated.TransferBroke` and `TimeoutError`.
        """
        if self._config.refit.transport != "ipc":
            with self.within("join"):
                await self._join()
        if self._direct is not None:
            return await self._straight(self._direct)
        if self._pause is not None:
            with self.within("pause"):
                await self._pause()
        with self.within("receive"):
            await self._receive()
        if not self._flushed_behind:
            with self.within("flush"):
                if not self._command.hold and not await self._client.flush(FLUSH_S):
                    raise Unfit("Busy", "requests are held: the cache can't be flushed")
        with self.within("verify"):
            return self._known(await self._checksums())

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """What is done in the block counts as `phase`."""
        self.phase, began = phase, time.monotonic()
        yield
        self._spent[phase] = self._spent.get(phase, 0.0) + time.monotonic() - began

    def _left(self) -> float:
        return max(0.0, self._command.deadline_at - self._context.clock.now())

    async def _join(self) -> None:
        command = self._command
        if command.leave is not None:
            try:
                await self._client.leave_group(command.leave, CALL_S)
            except CallError as error:  # a group that broke is left badly; the new one has another name
                self._context.log.warning("group not left", group=command.leave, error=str(error))
        if not command.fresh:
            return
        transport = self._config.refit.transport
        await self._client.join_group(
            command.address,
            command.port,
            command.offset,
            command.world_size,
            command.group,
            transport,
            self._left(),
        )
        if transport == "nccl":
            await self._client.warm(command.group, self._left())

    @property
    def _flushed_behind(self) -> bool:
        """Whether the last bucket's call flushes the cache: SGLang then keeps its allocator's memory, for the next."""
        return self._config.engine.kind == "sglang" and not self._command.hold

    async def _receive(self) -> None:
        command, version = self._command, str(self._command.version)
        flushes = [self._flushed_behind and bucket is self._buckets[-1] for bucket in self._buckets]
        if self._config.refit.transport == "ipc":
            order = iter(flushes)
            take = self._client.take
            await self._take(len(flushes), lambda parts, left: take(parts, version, left, next(order)))
            return
        if self._config.engine.kind == "sglang":  # nothing is between this actor and a server of its own
            # a bucket that is refused leaves the server in the next one's collective: so not before all fitted once
            ahead = 0 if command.fresh else AHEAD
            parts, flush = [bucket.tensors for bucket in self._buckets], self._flushed_behind
            await self._client.receive_all(parts, command.group, version, self._left(), flush, ahead)
            return
        for bucket, flush in zip(self._buckets, flushes, strict=True):
            await self._client.receive(bucket.tensors, command.group, version, self._left(), flush)

    async def _take(self, count: int, load: Callable[[Sequence[str], float], Awaitable[None]]) -> None:
        actor, boot = self._context.actor, self._context.boot
        await colocated.take(self._command, actor, boot, count, load, self._left())

    async def _checksums(self) -> dict[str, str] | None:
        """Of what the server holds, by name; only ours checksums as the trainer does."""
        if self._config.engine.kind != "torch" or self._config.refit.verify == "none":
            return None
        ranks = await self._client.checksums(self._left(), self._command.checksum)
        return ranks[0] if ranks else None

    async def fingerprint(self, held: dict[str, str] | None) -> str:
        """Digest of SGLang's own checksums of what its ranks hold, where nothing compares that with what was sent.

        Empty if refit.verify does not ask for it, or the server has no checksums. Raises `CallError`.
        """
        if held is not None or self._config.refit.verify != "fleet":
            return ""
        with self.within("verify"):
            ranks = await self._client.checksums(self._left()) or []
        found = {f"{rank}/{name}": checksum for rank, sums in enumerate(ranks) for name, checksum in sums.items()}
        return digest(found) if found else ""

    def _known(self, held: dict[str, str] | None) -> dict[str, str] | None:
        if held is not None and (wrong := manifest.strangers(set(held), self._buckets)) is not None:
            raise Unfit("ManifestMismatch", wrong)
        return held

    # --- by our own receiver -----------------------------------------------------------------------------------------

    async def _straight(self, receiver: Direct) -> dict[str, str] | None:
        """One call takes everything, and flushes the cache behind it.

        Memory that is new to the receiver is opened in a call of its own, which counts as the making of a group does.
        """
        command, version = self._command, str(self._command.version)
        with self.within("prepare"):
            await receiver.prepare(self._buckets, self._left())
        answers: list[Answer] = []

        async def copy(parts: Sequence[str], left: float) -> None:
            give_up_at = time.monotonic() + left
            if not receiver.has_open(parts):
                with self.within("join"):
                    await receiver.open(parts, left)
                self._spent["receive"] = -self._spent["join"]
                self.phase = "receive"
            answers.extend(await receiver.copy(parts, version, give_up_at - time.monotonic()))

        with self.within("receive"):
            if self._config.refit.transport == "ipc":
                await self._take(1, copy)
            else:
                answers = await receiver.broadcast(command.group, version, self._left())
        self._split(direct.slowest(answers))
        with self.within("verify"):
            if not all(answer.flushed for answer in answers):
                raise Unfit("Busy", "requests are held: the cache can't be flushed")
            held = receiver.checksums(answers, self._buckets)
            return self._known(held) if self._config.refit.verify != "none" else None

    def _split(self, inside: dict[str, float]) -> None:
        """What of the call was the call itself, and what was done in the server."""
        self._spent["receive"] = max(0.0, self._spent["receive"] - sum(inside.values()))
        self._spent |= inside
