"""What one sample said to the policy and got back, exact to the token id."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Items
from typing import Any, Protocol

from actors.gateway.client import (
    PROBLEMS,
    Divergence,
    Generated,
    NoncontiguousProblem,
    Problem,
    Record,
    Sample,
)
from actors.gateway.parsing import Flaw, Parsed, message_of
from actors.gateway.sessions import Episode, describe
from config.schema import RolloutConfig
from contracts.events import Provenance
from contracts.producer import Completion, DataError, Endpoint
from contracts.trajectory import Sampling, Sequence, TokenSpan, TrajectoryError

Generate = Callable[..., Awaitable[Generated]]
"""`GatewayClient.generate` with everything but prompt or messages, prefix_ids and the number of the turn filled in."""


class Remote(Protocol):
    """The gateway, as the keeper of an episode whose agent calls it directly."""

    async def open(self) -> Endpoint: ...

    async def finish(self, session: str) -> Record: ...


class Transcript:
    """The token sequences of one sample, grown a turn at a time.

    A turn's prompt begins with everything that its sequence holds so far, so no token is ever attributed to a context
    that it was not sampled in; `break_off` begins a new sequence.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.stop_reason = ""
        self._done: list[Sequence] = []
        self._begin()

    def _begin(self) -> None:
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[TokenSpan] = []

    @property
    def ids(self) -> list[int]:
        """Token ids of the current sequence."""
        return self._ids

    def add(self, prompt_ids: Items[int], sample: Sample) -> None:
        """Record one turn. Raises `ValueError` if its prompt does not continue the sequence."""
        prompt = list(prompt_ids)
        if prompt[: len(self._ids)] != self._ids:
            raise ValueError(f"a prompt of {len(prompt)} tokens does not continue the {len(self._ids)} before it")
        fresh = prompt[len(self._ids) :]
        if fresh:
            self._spans.append(TokenSpan(len(self._ids), len(prompt), "environment"))
        self._ids += fresh
        self._logprobs += [0.0] * len(fresh)
        offset = len(self._ids)
        self._spans += [
            TokenSpan(offset + s.start, offset + s.end, "sampled", s.version, s.engine, s.boot) for s in sample.spans
        ]
        self._ids += sample.output_ids
        self._logprobs += sample.logprobs
        self.prompt_tokens += len(fresh)
        self.completion_tokens += len(sample.output_ids)
        self.stop_reason = sample.finish_reason

    def break_off(self) -> None:
        """The next turn begins a new sequence."""
        self._done = list(self.sequences())
        self._begin()

    def sequences(self) -> tuple[Sequence, ...]:
        """All sequences so far."""
        return (*self._done, self._sequence()) if self._ids else tuple(self._done)

    def sources(self) -> tuple[Provenance, ...]:
        """Who sampled, each once, oldest version first."""
        spans = (span for sequence in self.sequences() for span in sequence.spans if span.origin == "sampled")
        found = {Provenance(span.policy_version, span.engine, span.boot) for span in spans}
        return tuple(sorted(found, key=lambda source: (source.version, source.engine, source.boot)))

    def _sequence(self) -> Sequence:
        """Raises `TrajectoryError` for a number that its type can't hold."""
        count = len(self._ids)
        mask = bytearray(count)
        for span in self._spans:
            if span.origin == "sampled":
                mask[span.start : span.end] = b"\x01" * (span.end - span.start)
        try:
            ids = struct.pack(f"<{count}i", *self._ids)
            logprobs = struct.pack(f"<{len(self._logprobs)}f", *self._logprobs)
        except (struct.error, OverflowError) as error:
            raise TrajectoryError(f"an id is no int32 or a logprob no float32: {error}") from error
        return Sequence(
            length=count,
            ids=ids,
            loss_mask=bytes(mask),
            logprobs=logprobs,
            spans=tuple(self._spans),
            sampling=self.sampling,
            stop_reason=self.stop_reason,
        )


class RolloutSession:
    """`contracts.producer.Session` of one rollout.

    Its turns are recorded by itself, or, behind an endpoint, by the gateway until `settle`.
    """

    def __init__(self, generate: Generate, sampling: Sampling, rules: RolloutConfig, remote: Remote) -> None:
        self.transcript = Transcript(sampling)
        self.flaws: list[tuple[int, Flaw]] = []
        self.texts: list[str] = []
        self.diverged: Divergence | None = None
        self._rules = rules
        self._episode = Episode(rules.noncontiguous)
        self._failure: Problem | None = None
        self._generate = generate
        self._remote = remote
        self._endpoint: Endpoint | None = None
        self._turns = 0

    async def generate(self, prompt: str) -> Completion:
        """One turn from a plain-text prompt, behind what the episode holds so far."""
        answer = await self._ask(prompt=prompt, prefix_ids=self._episode.ids)
        self._episode.extend(answer.prompt_ids, answer.samples[0])
        return _completion(answer)

    async def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> Completion:
        """One turn from chat messages, through the model's chat template."""
        restored = self._episode.restored(messages)
        plan = self._episode.plan(restored, tools)
        if plan.repeat:
            asked: dict[str, Any] = {"input_ids": [], "prefix_ids": plan.prefix}
        else:
            asked = {"messages": restored, "prefix_ids": plan.prefix, "carried": plan.carried}
        answer = await self._ask(**asked, tools=tools, parse=True)
        sample = answer.samples[0]
        parsed = sample.parsed or Parsed(sample.text)
        self._episode.add(plan, restored, tools, answer.prompt_ids, sample, parsed)
        return _completion(answer, parsed)

    async def endpoint(self) -> Endpoint:
        """The gateway's address for this rollout. Raises `Problem`."""
        if self._turns:
            raise DataError("a rollout that took turns itself can't hand its session to an agent as well")
        if self._endpoint is None:
            self._endpoint = await self._remote.open()
        return self._endpoint

    async def settle(self) -> None:
        """End the episode and build the transcript from its record.

        Raises its last turn's failure again if gateway or engines caused it, since it must not become a reward, and
        `NoncontiguousProblem` if the episode diverged and the rules leave nothing of it.
        """
        if self._endpoint is not None:
            endpoint, self._endpoint = self._endpoint, None
            record = await self._remote.finish(endpoint.session)
            if record.failure is not None and record.failure.type in ("infra", "timeout"):
                self._failure = PROBLEMS[record.failure.type](record.failure.message)
        else:
            record = self._episode.record()
        self.diverged = record.diverged
        if self._failure is not None and self._failure.kind in ("infra", "timeout"):
            raise self._failure
        if record.diverged is not None and self._rules.noncontiguous in ("error", "drop"):
            raise NoncontiguousProblem(describe(record.diverged))
        self._transcribe(record)

    async def abandon(self) -> None:
        """Cut off what an agent still asks for, and forget it."""
        if self._endpoint is not None:
            with contextlib.suppress(Problem):
                await self._remote.finish(self._endpoint.session)

    def _transcribe(self, record: Record) -> None:
        sequence = 0
        for number, turn in enumerate(record.turns, 1):
            if turn.sequence != sequence:
                self.transcript.break_off()
                sequence = turn.sequence
            self.transcript.add([*self.transcript.ids, *turn.fresh_ids], turn.sample)
            self.texts.append(turn.sample.written or turn.sample.text)
            self.flaws += [(number, flaw) for flaw in turn.flaws]

    async def _ask(self, **asked: Any) -> Generated:
        self._turns += 1
        try:
            answer = await self._generate(**asked, turn=self._turns)
        except Problem as error:
            self._failure = error
            raise
        self._failure = None
        return answer


def _completion(answer: Generated, parsed: Parsed | None = None) -> Completion:
    sample = answer.samples[0]
    message = message_of(parsed) if parsed is not None else {}
    flaws = tuple(f"{flaw.kind} at {flaw.at}: {flaw.what}" for flaw in parsed.flaws) if parsed is not None else ()
    return Completion(
        text=sample.text,
        tokens=len(sample.output_ids),
        stop_reason=sample.finish_reason,
        message=message,
        flaws=flaws,
    )
