"""One sequence being generated (filled in by the scheduler's thread, read by the loop's), and a batch of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from actors.engine.torch_server.sampling import Sampling, SamplingRows

ABORTED: Mapping[str, Any] = {"type": "abort", "message": "Aborted"}
NOT_FINITE: Mapping[str, Any] = {"type": "abort", "message": "logits are not finite"}


class Generation:
    """`tokens` is prompt + output; the cache row `row` holds the first `filled` of them.

    `finish` says why it ended; once `left` is set the scheduler never touches it again.
    """

    __slots__ = (
        "cached",
        "created",
        "epoch",
        "filled",
        "finish",
        "key",
        "left",
        "logprob_start",
        "logprobs",
        "prompt",
        "prompt_logprobs",
        "reach",
        "retractions",
        "return_logprob",
        "rid",
        "row",
        "sampling",
        "stored",
        "stream",
        "ticket",
        "tokens",
        "version",
        "versions",
    )

    def __init__(
        self,
        rid: str,
        prompt: list[int],
        sampling: Sampling,
        key: int,
        return_logprob: bool,
        logprob_start: int,
        stream: bool,
        ticket: Any,
    ) -> None:
        """`logprob_start` -1: no logprobs of the prompt. `ticket` is the caller's, untouched here."""
        self.rid, self.tokens, self.prompt, self.sampling, self.key = (
            rid,
            list(prompt),
            len(prompt),
            sampling,
            key,
        )
        self.return_logprob, self.logprob_start, self.stream = return_logprob, logprob_start, stream
        self.ticket = ticket
        self.reach = len(prompt) + sampling.max_new
        self.logprobs: list[float] = []
        self.prompt_logprobs: list[float] = []
        self.finish: Mapping[str, Any] | None = None
        self.left = False
        self.version = ""
        self.versions: list[tuple[int, str]] = []
        """(first output token, label of the weights that sampled it and those after it)."""
        self.row, self.filled, self.epoch = -1, 0, -1
        self.cached = self.retractions = 0
        self.stored: torch.Tensor | None = None
        self.created = time.monotonic()

    @property
    def scores_prompt(self) -> bool:
        """Logprobs of the prompt are asked for and not complete."""
        return self.logprob_start >= 0 and len(self.prompt_logprobs) < self.prompt - 1 - self.logprob_start

    @property
    def shareable(self) -> int:
        """How many leading tokens may come from a cache: the last is computed, and all that must be scored."""
        return min(len(self.tokens) - 1, self.logprob_start) if self.scores_prompt else len(self.tokens) - 1

    @property
    def guarded(self) -> bool:
        """Too short to stop."""
        return len(self.logprobs) < self.sampling.min_new

    def begin(self, epoch: int, shared: int, stored: torch.Tensor | None) -> None:
        """Take a row whose first `shared` tokens come from a cache."""
        self.epoch, self.filled, self.stored = epoch, shared, stored
        if not self.retractions:
            self.cached = shared

    def leave(self, version: str) -> None:
        """It has ended under weights labelled `version`."""
        self.version = version
        self.left = True

    def requeue(self) -> None:
        """Lose the row."""
        self.row, self.filled, self.stored = -1, 0, None
        self.retractions += 1
        if self.scores_prompt:
            self.prompt_logprobs = []

    def accept(self, token: int, logprob: float, version: str) -> None:
        """Take the next token, the one that ends it included, from weights labelled `version`."""
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.logprobs), version))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if len(self.logprobs) >= self.sampling.max_new:
            self.finish = {"type": "length", "length": self.sampling.max_new}
        elif token in self.sampling.stops:
            self.finish = {"type": "stop", "matched": token}


class DecodeState:
    """Device tensors of the running rows, kept from step to step while the rows stay the same."""

    def __init__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        counts: torch.Tensor,
        sampling: SamplingRows,
        span: int,
    ) -> None:
        self.tokens, self.positions, self.counts, self.sampling, self.span = (
            tokens,
            positions,
            counts,
            sampling,
            span,
        )

    @staticmethod
    def of(generations: Sequence[Generation], device: torch.device) -> DecodeState:
        positions = [g.filled for g in generations]
        return DecodeState(
            torch.tensor([g.tokens[-1] for g in generations], device=device),
            torch.tensor(positions, device=device),
            torch.tensor([len(g.logprobs) for g in generations], device=device),
            SamplingRows.of([g.sampling for g in generations], [g.key for g in generations], device),
            max(positions) + 1,
        )

    def advance(self, ids: torch.Tensor) -> None:
        self.tokens = ids
        self.positions = self.positions + 1
        self.counts = self.counts + 1
        self.span += 1
