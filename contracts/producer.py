"""The plug-in surface: an environment producer.

A producer is registered under the entry-point group `sluice.producers` and called with the recipe's `producer.args`.
It yields tasks and scores what the policy did with them. It never sees token ids: the gateway records those, and the
collector builds the trajectory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec

CONTRACT_VERSION = 1
"""A producer states the version it was written for in `contract`; another one is refused at start-up."""

GROUP = "sluice.producers"


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt group. `id` is stable over restarts; `payload` is JSON; `cursor` resumes right behind this task."""

    id: str
    payload: Mapping[str, Any]
    cursor: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment says of one rollout. `mask`: a reason to keep the sample out of baseline and loss."""

    reward: float
    components: dict[str, float] = {}
    mask: str | None = None
    info: dict[str, str] = {}


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the policy. `stop_reason`: `stop` or `length`."""

    text: str
    tokens: int
    stop_reason: str


class DataError(Exception):
    """Raised by a producer: this task can't be used, ever. The sample is dropped with the reason, not retried."""


class Session(Protocol):
    """The policy, as one rollout of one sample sees it. Tokens are recorded behind it, exact to the id."""

    async def generate(self, prompt: str) -> Completion:
        """One turn; `prompt` is the text that follows what the episode holds so far."""
        ...

    async def chat(self, messages: list[dict[str, Any]]) -> Completion:
        """One turn; `messages` is the whole conversation, rendered by the model's chat template."""
        ...


@runtime_checkable
class SingleTurn(Protocol):
    """A producer whose rollout is one prompt and one scored completion.

    `prompt(task)` answers a string or a list of chat messages. `score` may be slow or blocking: it runs in a thread,
    under the rollout's deadline.
    """

    contract: int

    def tasks(self, cursor: str | None, seed: int, split: str) -> AsyncIterator[Task]:
        """Yield tasks for ever or until exhausted, from behind `cursor`; the same seed gives the same tasks."""
        ...

    def prompt(self, task: Task) -> str | list[dict[str, Any]]: ...

    def score(self, task: Task, completion: str) -> float | Outcome: ...


@runtime_checkable
class MultiTurn(Protocol):
    """A producer that drives the whole episode itself."""

    contract: int

    def tasks(self, cursor: str | None, seed: int, split: str) -> AsyncIterator[Task]: ...

    async def rollout(self, task: Task, session: Session) -> Outcome:
        """Run one episode. Raise `DataError` for an unusable task; any other error is an `infra` failure."""
        ...


Producer = SingleTurn | MultiTurn
