"""What a server holds of its GPU's memory while it does not serve: with engine.release it gives it back for a while.

A call that failed, or had no answer, leaves it open what is held: nothing is asked of that server again (SGLang ends
itself when it is told to give back what it does not have), and it has to be killed, which gives everything back.
"""

from __future__ import annotations

from typing import Literal

from actors.engine.client import HttpEngineClient

Kept = Literal["none", "kv", "all"]
KV, WEIGHTS = "kv_cache", "weights"
"""SGLang's names."""
TAGS: dict[Kept, tuple[str, ...]] = {"none": (), "kv": (KV,), "all": (KV, WEIGHTS)}


class Memory:
    """Of one server, which begins with everything. Every call raises `CallError`; timeouts are seconds."""

    def __init__(self, release: Kept) -> None:
        self.tags = TAGS[release]
        self._gone: set[str] = set()
        self.uncertain = False
        """A call did not end as it should: the server has to be killed."""

    async def give_back(self, client: HttpEngineClient, timeout: float) -> None:
        """Have the server give back what it still holds of `tags`. It has to be idle, its cache flushed."""
        tags = [tag for tag in self.tags if tag not in self._gone]
        if not tags:
            return
        self.uncertain = True
        await client.release_memory(tags, timeout)
        self.uncertain = False
        self._gone.update(tags)

    async def take(self, client: HttpEngineClient, tag: str, timeout: float) -> None:
        """Have it take `tag` again, if it gave it back. What was in the memory is lost: weights have to be loaded."""
        if tag not in self._gone:
            return
        self.uncertain = True
        await client.resume_memory([tag], timeout)
        self.uncertain = False
        self._gone.discard(tag)
