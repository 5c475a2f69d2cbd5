"""What events of several streams are made of."""

from __future__ import annotations

from typing import Literal

import msgspec

FailureKind = Literal["infra", "data", "timeout", "noncontiguous"]
"""Why a rollout ended without a usable trajectory. Each kind has a budget of attempts; none is ever reward 0."""

Split = Literal["train", "eval"]


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="kind"):
    """Base of all events: immutable, keyword-only, tagged by `kind`."""


class Member(msgspec.Struct, frozen=True, gc=False):
    """One boot of an actor. A restarted process is another member."""

    actor: str
    boot: int


class PayloadRef(msgspec.Struct, frozen=True, gc=False):
    """Bytes kept in a payload key beside the stream. `size` in bytes."""

    key: str
    size: int
