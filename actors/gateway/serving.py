"""What the gateway answers requests with, and an answer that can be followed while it is made."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.gateway.answers import Answers, Follower
from actors.gateway.client import Generated
from actors.gateway.tokens import Tokens
from actors.gateway.upstream import Job
from config.schema import GatewayConfig
from contracts.core import Clock


class Drafted(Protocol):
    """A sample as far as it has come."""

    ids: list[int]
    logprobs: list[float]


class Live:
    """An answer in the making: `news` is set whenever one of its `drafts` has grown, which only ever get longer."""

    def __init__(self) -> None:
        self.drafts: Sequence[Drafted] = ()
        self.news = asyncio.Event()
        self.follow: Callable[[], Follower] | None = None
        """Begins to follow one of the samples. Set before there are drafts."""


@dataclass(frozen=True, slots=True)
class Serving:
    """`context`: tokens that prompt and answer may have together. `submit` answers a job, or raises a `Problem`.

    With a `Live`, engines are asked to stream, and it is told of every token.
    """

    tokens: Tokens
    answers: Answers
    context: int
    config: GatewayConfig
    clock: Clock
    submit: Callable[[Job, Live | None], Awaitable[Generated]]
