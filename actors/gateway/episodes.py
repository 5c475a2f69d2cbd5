"""The episodes of agents that speak OpenAI's API: opened and finished by collectors, kept in memory.

What is kept here can be had again by trying the sample again: a gateway that restarts has forgotten its episodes, and
their agents and collectors are told so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from actors.gateway.client import InfraProblem, OpenForm, Problem, Record, SamplingForm
from actors.gateway.sessions import Episode


class GoneProblem(Problem):
    """An agent speaks for an episode that is not open: nothing it does counts any more."""

    kind, status = "data", 410


class Held:
    """An open episode. Its turns run one after another (`turn`); `requests` are the handlers that do."""

    def __init__(self, form: OpenForm, deadline_at: float) -> None:
        self.sampling: SamplingForm = form.sampling
        self.deadline_at = deadline_at
        self.episode = Episode(form.noncontiguous)
        self.turn = asyncio.Lock()
        self.requests: set[asyncio.Task[object]] = set()


class Episodes:
    """At most `limit` of them, each until its deadline."""

    def __init__(self, limit: int, now: Callable[[], float]) -> None:
        self._limit = limit
        self._now = now
        self._held: dict[str, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def open(self, name: str, form: OpenForm) -> None:
        """Begin an episode, from nothing if it existed. Raises `InfraProblem` while there are too many."""
        self._end(name)
        now = self._now()
        if len(self._held) >= self._limit:
            for old in [name for name, held in self._held.items() if held.deadline_at <= now]:
                self._end(old)
        if len(self._held) >= self._limit:
            raise InfraProblem(
                f"gateway.max_episodes={self._limit} are open: wait for one to end, allow more, or lower "
                "rollout.open_groups"
            )
        self._held[name] = Held(form, now + form.deadline_s)

    def get(self, name: str) -> Held:
        """The open episode `name`. Raises `GoneProblem`."""
        held = self._held.get(name)
        if held is None or held.deadline_at <= self._now():
            why = "its time is over" if held else "it was finished, or the gateway restarted since"
            raise GoneProblem(f"episode {name[:100]!r} is not open: {why}")
        return held

    def finish(self, name: str) -> Record:
        """Cut off what runs for an episode, forget it, and answer its record. Raises `InfraProblem` if unknown."""
        held = self._end(name)
        if held is None:
            raise InfraProblem(f"episode {name[:100]!r} is unknown: the gateway restarted since it was opened")
        return held.episode.record()

    def _end(self, name: str) -> Held | None:
        held = self._held.pop(name, None)
        for request in held.requests if held else ():
            request.cancel()
        return held
