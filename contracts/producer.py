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
    """One answer of the policy. `stop_reason`: `stop` or `length`.

    `message` is the answer to `Session.chat` as a chat message: content, `reasoning_content` and `tool_calls` taken
    apart. Append it to the conversation for the next turn. `flaws` names malformed thinking and tool calls in it.
    """

    text: str
    tokens: int
    stop_reason: str
    message: dict[str, Any] = {}
    flaws: tuple[str, ...] = ()


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where an agent that speaks OpenAI's API finds the policy, for one rollout.

    `base_url` ends in `/v1` and serves chat completions and responses; any API key will do. An agent whose base URL is
    fixed sends `session` in the body instead. Every turn is recorded behind it, until the rollout returns.
    """

    base_url: str
    session: str
    temperature: float
    max_new_tokens: int
    deadline_s: float
    sample: int
    attempt: int


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a producer finds itself when it is started: in which collector, of how many.

    `run_dir` is the run's directory, `gateway_url` the gateway's address if `gateway.port` fixes it.
    """

    actor: str
    collectors: int
    run_dir: str
    gateway_url: str | None


class DataError(Exception):
    """Raised by a producer: this task can't be used, ever. The sample is dropped with the reason, not retried."""


class Session(Protocol):
    """The policy, as one rollout of one sample sees it. Tokens are recorded behind it, exact to the id."""

    async def generate(self, prompt: str) -> Completion:
        """One turn; `prompt` is the text that follows what the episode holds so far."""
        ...

    async def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> Completion:
        """One turn; `messages` is the whole conversation, rendered by the model's chat template.

        `tools`, in OpenAI's form, are offered to the model. What the conversation repeats of earlier answers keeps the
        tokens that were sampled; see `rollout.noncontiguous` for one that says something else.
        """
        ...

    async def endpoint(self) -> Endpoint:
        """An address for an agent that calls the policy itself. A rollout uses either this or the turns above."""
        ...


@runtime_checkable
class SingleTurn(Protocol):
    """A producer whose rollout is one prompt and one scored completion.

    `prompt(task)` answers a string or a list of chat messages. `score` may be slow or blocking: it runs in a thread,
    under the rollout's deadline.
    """

    contract: int

    def tasks(self, cursor: str | None, seed: int, split: str) -> AsyncIterator[Task]:
        """Yield tasks for ever or until exhausted, from behind `cursor`; the same seed gives the same tasks.

        What is exhausted is asked again from the start for the next of `producer.epochs`, with another seed.
        """
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


@runtime_checkable
class Started(Protocol):
    """A producer of either kind that needs something running: collectors start it before the first rollout.

    An error of `start` ends the run. The source, which only asks for tasks, does not start it.
    """

    async def start(self, place: Place) -> None: ...

    async def close(self) -> None: ...


Producer = SingleTurn | MultiTurn
