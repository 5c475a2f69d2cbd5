"""Dead letters: work that was given up, kept with its reason until a person decides."""

from __future__ import annotations

import msgspec

from pipeline.bus import scripts
from pipeline.bus.keys import Keys
from pipeline.bus.link import Link
from pipeline.bus.lua import Key

PAGE = 500


class Letter(msgspec.Struct, frozen=True):
    """One entry of `dead:<stream>`. `origin`: its id in `stream`; `at`: seconds; `data` is empty if it was lost."""

    stream: str
    entry: str
    origin: str
    reason: str
    at: float
    deliveries: int
    data: bytes


class DeadLetters:
    """The dead-letter streams of one run."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    async def read(self, stream: str) -> list[Letter]:
        """All dead letters of a work stream, oldest first."""
        found: list[Letter] = []
        start = "-"
        while True:
            page = await self._link.command("XRANGE", self._keys.dead(stream), start, "+", "COUNT", PAGE)
            found += [_letter(stream, id.decode(), fields) for id, fields in page]
            if len(page) < PAGE:
                return found
            start = "(" + found[-1].entry

    async def requeue(self, stream: str, entry: str, data: bytes) -> str | None:
        """Append `data` to `stream` in place of a dead letter; answers its id there, None if the letter was gone."""
        key, dead = Key(self._keys.stream(stream)), Key(self._keys.dead(stream))
        order, tails = Key(self._keys.order), Key(self._keys.tails)
        added = await self._link.call(scripts.requeue(order, tails, key, dead, entry, data))
        return None if added is None else added.decode()

    async def drop(self, stream: str, entry: str) -> bool:
        """Forget a dead letter; False if it was gone."""
        return bool(await self._link.command("XDEL", self._keys.dead(stream), entry))


def _letter(stream: str, entry: str, fields: list[bytes]) -> Letter:
    facts = dict(zip(fields[::2], fields[1::2], strict=True))
    return Letter(
        stream=stream,
        entry=entry,
        origin=facts[b"origin"].decode(),
        reason=facts[b"reason"].decode(),
        at=float(facts[b"at"]),
        deliveries=int(facts[b"deliveries"]),
        data=facts[b"e"],
    )
