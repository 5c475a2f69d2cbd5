"""An answer that outlived a refit is taken only if it tells, token by token, which version sampled what."""

from __future__ import annotations

import json
from typing import Any

import pytest

from actors.gateway.state import Call
from actors.gateway.upstream import AnswerError, Arriving, Draft, Job, absorb

JOB = Job("s", [1], 1, 1.0, 8, None, (), 0.0)
CALL = Call(1, 1, (0,), "engine-0", 2, "http://e", 3, 10, "rid-")


def answer(spans: Any, count: int = 4, finish: str = "length") -> bytes:
    meta: dict[str, Any] = {"finish_reason": {"type": finish}, "output_token_logprobs": [[-1.0, 5, None]] * count}
    meta |= {} if spans is None else {"weight_version_spans": spans}
    return json.dumps({"output_ids": [5] * count, "meta_info": meta}).encode()


def taken(*answers: bytes, outlives: bool = True) -> list[tuple[int, int, int]]:
    draft = Draft()
    for each in answers:
        absorb(each, JOB, [draft], CALL, 64, outlives)
    assert all((s.engine, s.boot) == ("engine-0", 2) for s in draft.spans)
    return [(s.start, s.end, s.version) for s in draft.spans]


def test_each_version_gets_a_span() -> None:
    assert taken(answer([[0, 1, "10"], [1, 4, "12"]])) == [(0, 1, 10), (1, 4, 12)]


def test_a_call_that_was_held_before_its_first_token_is_all_of_the_newer_version() -> None:
    assert taken(answer([[0, 4, "12"]])) == [(0, 4, 12)]


def test_spans_of_one_version_are_joined_over_calls() -> None:
    parts = (answer([[0, 2, "10"]], 2, "abort"), answer([[0, 1, "10"], [1, 2, "11"]], 2))
    assert taken(*parts) == [(0, 3, 10), (3, 4, 11)]


def test_an_abort_before_the_first_token_has_no_span() -> None:
    assert taken(answer([], 0, "abort")) == []


def test_where_no_call_outlives_a_refit_the_version_of_its_commit_counts() -> None:
    assert taken(answer(None), outlives=False) == [(0, 4, 10)]


def test_a_stream_tells_the_versions_of_what_is_new_in_each_event() -> None:
    draft = Draft()
    arriving = Arriving(JOB, [draft], CALL, 64, True)
    seen = [([[0, 1, "10"]], 1), ([[0, 2, "10"], [2, 3, "11"]], 3), ([[0, 2, "10"], [2, 4, "11"]], 4)]
    for spans, count in seen:
        arriving.feed(b"data: " + answer(spans, count, "length") + b"\n\n")
    assert [(s.start, s.end, s.version) for s in draft.spans] == [(0, 2, 10), (2, 4, 11)]
    assert len(draft.ids) == 4


@pytest.mark.parametrize(
    "spans",
    [
        None,
        [],
        [[0, 3, "10"]],
        [[0, 5, "10"]],
        [[1, 4, "10"]],
        [[0, 2, "10"], [3, 4, "11"]],
        [[0, 2, "10"], [2, 2, "11"], [2, 4, "12"]],
        [[0, 2, "11"], [2, 4, "10"]],
        [[0, 2, "10"], [2, 4, "10"]],
        [[0, 4, "9"]],
        [[0, 4, "default"]],
        [[0, 4, "-3"]],
    ],
)
def test_tokens_of_unknown_origin_are_refused(spans: Any) -> None:
    draft = Draft()
    with pytest.raises(AnswerError, match="weight_version_spans"):
        absorb(answer(spans), JOB, [draft], CALL, 64, True)
    assert (draft.ids, draft.spans) == ([], [])
