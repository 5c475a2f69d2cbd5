"""What one sample said to the policy and got back, exact to the token id."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Items
from typing import Any

from actors.gateway.client import Generated, NoncontiguousProblem, Problem, Sample
from contracts.events import Provenance
from contracts.producer import Completion
from contracts.trajectory import Sampling, Sequence, TokenSpan

Generate = Callable[..., Awaitable[Generated]]
"""`GatewayClient.generate` with everything but prompt or messages, prefix_ids and the number of the turn filled in."""


class Transcript:
    """The token sequences of one sample, grown a turn at a time.

    A turn whose prompt begins with everything recorded so far continues the sequence; any other prompt begins a new
    one, so no token is ever attributed to a context that it was not sampled in.
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
        """Record one turn."""
        prompt = list(prompt_ids)
        if prompt[: len(self._ids)] != self._ids:
            self.break_off()
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
        count = len(self._ids)
        mask = bytearray(count)
        for span in self._spans:
            if span.origin == "sampled":
                mask[span.start : span.end] = b"\x01" * (span.end - span.start)
        return Sequence(
            length=count,
            ids=struct.pack(f"<{count}i", *self._ids),
            loss_mask=bytes(mask),
            logprobs=struct.pack(f"<{len(self._logprobs)}f", *self._logprobs),
            spans=tuple(self._spans),
            sampling=self.sampling,
            stop_reason=self.stop_reason,
        )


class RolloutSession:
    """`contracts.producer.Session` of one rollout.

    A plain-text prompt is what follows the episode so far. Chat messages are the whole conversation; where they differ
    from what was sampled, they begin a new sequence.
    """

    def __init__(self, generate: Generate, sampling: Sampling) -> None:
        self.transcript = Transcript(sampling)
        self._failure: Problem | None = None
        self._generate = generate
        self._turns = 0

    async def generate(self, prompt: str) -> Completion:
        """One turn from a plain-text prompt."""
        return await self._turn(prompt=prompt)

    async def chat(self, messages: list[dict[str, Any]]) -> Completion:
        """One turn from chat messages, through the model's chat template."""
        try:
            return await self._turn(messages=messages)
        except NoncontiguousProblem:
            self.transcript.break_off()
            return await self._turn(messages=messages)

    def raise_infra(self) -> None:
        """Raise the last turn's failure again if gateway or engines caused it: it must not become a reward."""
        if self._failure is not None and self._failure.kind in ("infra", "timeout"):
            raise self._failure

    async def _turn(self, **asked: Any) -> Completion:
        self._turns += 1
        try:
            answer = await self._generate(**asked, prefix_ids=self.transcript.ids, turn=self._turns)
        except Problem as error:
            self._failure = error
            raise
        self._failure = None
        sample = answer.samples[0]
        self.transcript.add(answer.prompt_ids, sample)
        return Completion(text=sample.text, tokens=len(sample.output_ids), stop_reason=sample.finish_reason)
