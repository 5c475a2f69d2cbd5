"""The transcript of a rollout: exact ids, honest spans, one sequence per context."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from actors.collector.session import RolloutSession, Transcript
from actors.gateway.client import (
    DataProblem,
    DeadlineProblem,
    Generated,
    InfraProblem,
    NoncontiguousProblem,
    Problem,
    Sample,
    Span,
)
from contracts.events import Provenance
from contracts.producer import Completion
from contracts.trajectory import Sampling, Sequence, TokenSpan, check

SAMPLING = Sampling(temperature=0.7, max_new_tokens=8)


def sample(ids: list[int], *spans: tuple[int, int, int, str], finish: str = "stop") -> Sample:
    return Sample(
        output_ids=ids,
        logprobs=[-0.5 * k for k in range(len(ids))],
        spans=[Span(start, end, version, engine, 1) for start, end, version, engine in spans],
        finish_reason=finish,
        text=f"text{ids}",
    )


def ids_of(sequence: Sequence) -> list[int]:
    return list(struct.unpack(f"<{sequence.length}i", sequence.ids))


def test_a_turn_is_an_environment_span_and_its_sampled_spans() -> None:
    transcript = Transcript(SAMPLING)
    transcript.add([5, 6], sample([7, 8, 9], (0, 1, 3, "engine-0"), (1, 3, 4, "engine-1"), finish="length"))
    (sequence,) = transcript.sequences()
    check(sequence, "here")
    assert ids_of(sequence) == [5, 6, 7, 8, 9]
    assert list(sequence.loss_mask) == [0, 0, 1, 1, 1]
    assert struct.unpack("<5f", sequence.logprobs) == (0.0, 0.0, 0.0, -0.5, -1.0)
    assert sequence.spans == (
        TokenSpan(0, 2, "environment"),
        TokenSpan(2, 3, "sampled", 3, "engine-0", 1),
        TokenSpan(3, 5, "sampled", 4, "engine-1", 1),
    )
    assert (sequence.sampling, sequence.stop_reason) == (SAMPLING, "length")
    assert (transcript.prompt_tokens, transcript.completion_tokens) == (2, 3)
    assert transcript.sources() == (Provenance(3, "engine-0", 1), Provenance(4, "engine-1", 1))


def test_a_turn_that_continues_the_ids_continues_the_sequence() -> None:
    transcript = Transcript(SAMPLING)
    transcript.add([1, 2], sample([3], (0, 1, 9, "e")))
    transcript.add([1, 2, 3, 4, 5], sample([6], (0, 1, 8, "e")))
    (sequence,) = transcript.sequences()
    check(sequence, "here")
    assert ids_of(sequence) == [1, 2, 3, 4, 5, 6]
    assert list(sequence.loss_mask) == [0, 0, 1, 0, 0, 1]
    assert transcript.prompt_tokens == 4
    assert transcript.sources() == (Provenance(8, "e", 1), Provenance(9, "e", 1))


def test_a_turn_that_adds_no_prompt_adds_no_environment_span() -> None:
    transcript = Transcript(SAMPLING)
    transcript.add([1], sample([2], (0, 1, 0, "e"), finish="length"))
    transcript.add([1, 2], sample([3], (0, 1, 0, "e")))
    (sequence,) = transcript.sequences()
    check(sequence, "here")
    assert [span.origin for span in sequence.spans] == ["environment", "sampled", "sampled"]


@pytest.mark.parametrize("prompt", [[1, 2, 9, 4], [1], []])
def test_a_turn_in_another_context_begins_a_new_sequence(prompt: list[int]) -> None:
    transcript = Transcript(SAMPLING)
    transcript.add([1, 2], sample([3], (0, 1, 0, "e")))
    transcript.add(prompt, sample([6], (0, 1, 0, "e")))
    first, second = transcript.sequences()
    for sequence in (first, second):
        check(sequence, "here")
    assert ids_of(first) == [1, 2, 3]
    assert ids_of(second) == [*prompt, 6]


def test_an_answer_without_tokens_is_a_sequence_without_trained_tokens() -> None:
    transcript = Transcript(SAMPLING)
    transcript.add([1, 2], sample([]))
    (sequence,) = transcript.sequences()
    check(sequence, "here")
    assert sum(sequence.loss_mask) == 0
    assert transcript.sources() == ()


def test_nothing_said_is_no_sequence() -> None:
    assert Transcript(SAMPLING).sequences() == ()


class Gateway:
    """Answers turns with what it was given, in order; keeps what it was asked."""

    def __init__(self, *answers: Generated | Problem) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, **asked: Any) -> Generated:
        self.asked.append({**asked, "prefix_ids": list(asked["prefix_ids"])})
        answer = self.answers.pop(0)
        if isinstance(answer, Problem):
            raise answer
        return answer


def turn(prompt: list[int], ids: list[int]) -> Generated:
    return Generated(prompt_ids=prompt, samples=[sample(ids, (0, len(ids), 0, "e"))], held_s=0.0)


async def test_a_turn_carries_the_exact_ids_so_far_and_answers_the_text() -> None:
    gateway = Gateway(turn([1, 2], [3]), turn([1, 2, 3, 4], [5]))
    session = RolloutSession(gateway, SAMPLING)
    assert await session.generate("hi") == Completion(text="text[3]", tokens=1, stop_reason="stop")
    await session.chat([{"role": "user", "content": "more"}])
    assert gateway.asked == [
        {"prompt": "hi", "prefix_ids": [], "turn": 1},
        {"messages": [{"role": "user", "content": "more"}], "prefix_ids": [1, 2, 3], "turn": 2},
    ]
    assert [ids_of(sequence) for sequence in session.transcript.sequences()] == [[1, 2, 3, 4, 5]]


async def test_a_conversation_that_was_rewritten_is_asked_without_its_ids_and_begins_a_new_sequence() -> None:
    gateway = Gateway(turn([1, 2], [3]), NoncontiguousProblem("differs"), turn([1, 2], [7]))
    session = RolloutSession(gateway, SAMPLING)
    await session.chat([])
    await session.chat([])
    assert [asked["prefix_ids"] for asked in gateway.asked] == [[], [1, 2, 3], []]
    assert [ids_of(sequence) for sequence in session.transcript.sequences()] == [[1, 2, 3], [1, 2, 7]]
    session.raise_infra()


@pytest.mark.parametrize("problem", [InfraProblem("down"), DeadlineProblem("late")])
async def test_an_infrastructure_failure_is_remembered_until_a_turn_succeeds(problem: Problem) -> None:
    session = RolloutSession(Gateway(problem, turn([1], [2])), SAMPLING)
    with pytest.raises(type(problem)):
        await session.generate("a")
    with pytest.raises(type(problem)):
        session.raise_infra()
    await session.generate("a")
    session.raise_infra()


async def test_a_refused_prompt_is_left_to_the_environment() -> None:
    session = RolloutSession(Gateway(DataProblem("too long")), SAMPLING)
    with pytest.raises(DataProblem):
        await session.generate("a")
    session.raise_infra()
