"""The transcript of a rollout: exact ids, honest spans, one sequence per context."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from actors.collector.session import RolloutSession, Transcript
from actors.gateway.client import (
    DataProblem,
    DeadlineProblem,
    ErrorBody,
    Generated,
    InfraProblem,
    NoncontiguousProblem,
    Problem,
    Record,
    Recorded,
    Sample,
    Span,
)
from actors.gateway.parsing import Flaw
from config.schema import Noncontiguous, RolloutConfig
from contracts.events import Provenance
from contracts.producer import Completion, Endpoint
from contracts.producer import DataError as EnvironmentDataError
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
def test_a_turn_in_another_context_is_never_added_to_the_sequence(prompt: list[int]) -> None:
    transcript = Transcript(SAMPLING)
    transcript.add([1, 2], sample([3], (0, 1, 0, "e")))
    with pytest.raises(ValueError, match="does not continue"):
        transcript.add(prompt, sample([6], (0, 1, 0, "e")))
    transcript.break_off()
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


class Keeper:
    """A gateway that keeps an episode and answers `record` at its end."""

    def __init__(self, record: Record | Problem | None = None) -> None:
        self.record = record
        self.finished: list[str] = []

    async def open(self) -> Endpoint:
        return Endpoint(
            base_url="http://g/v1", session="e", temperature=0.7, max_new_tokens=8, deadline_s=9.0, sample=0, attempt=1
        )

    async def finish(self, session: str) -> Record:
        self.finished.append(session)
        if isinstance(self.record, Problem):
            raise self.record
        assert self.record is not None
        return self.record


def session_of(gateway: Gateway, rule: Noncontiguous = "error", keeper: Keeper | None = None) -> RolloutSession:
    return RolloutSession(gateway, SAMPLING, RolloutConfig(noncontiguous=rule), keeper or Keeper())


def turn(prompt: list[int], ids: list[int]) -> Generated:
    return Generated(prompt_ids=prompt, samples=[sample(ids, (0, len(ids), 0, "e"))], held_s=0.0)


def says(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


ASKED = [says("user", "hi")]
REWRITTEN = [says("user", "ho"), says("assistant", "text[3]"), says("user", "more")]


def sequences(session: RolloutSession) -> list[list[int]]:
    return [ids_of(sequence) for sequence in session.transcript.sequences()]


async def test_a_turn_of_text_carries_the_exact_ids_so_far() -> None:
    gateway = Gateway(turn([1, 2], [3]), turn([1, 2, 3, 4], [5]))
    session = session_of(gateway)
    assert await session.generate("hi") == Completion(text="text[3]", tokens=1, stop_reason="stop")
    await session.generate("more")
    assert gateway.asked == [
        {"prompt": "hi", "prefix_ids": [], "turn": 1},
        {"prompt": "more", "prefix_ids": [1, 2, 3], "turn": 2},
    ]
    await session.settle()
    assert sequences(session) == [[1, 2, 3, 4, 5]]


async def test_a_conversation_that_goes_on_carries_ids_and_how_many_messages_they_hold() -> None:
    gateway = Gateway(turn([1, 2], [3]), turn([1, 2, 3, 4], [5]))
    session = session_of(gateway)
    completion = await session.chat(ASKED)
    assert completion.message == says("assistant", "text[3]")
    await session.chat([*ASKED, completion.message, says("user", "more")])
    assert (gateway.asked[1]["prefix_ids"], gateway.asked[1]["carried"]) == ([1, 2, 3], 2)
    await session.settle()
    assert sequences(session) == [[1, 2, 3, 4, 5]]
    assert session.texts == ["text[3]", "text[5]"]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [("truncate", [[1, 2, 3]]), ("split", [[1, 2, 3], [1, 9, 3, 4, 5]])],
)
async def test_a_rewritten_conversation_is_served_and_kept_as_far_as_its_rule_says(
    rule: Noncontiguous, kept: list[list[int]]
) -> None:
    session = session_of(Gateway(turn([1, 2], [3]), turn([1, 9, 3, 4], [5])), rule)
    await session.chat(ASKED)
    await session.chat(REWRITTEN)
    await session.settle()
    assert sequences(session) == kept
    assert session.diverged is not None
    assert (session.diverged.turn, session.diverged.message, session.diverged.token) == (2, 0, 1)


async def test_a_rewritten_conversation_is_refused_under_error_and_dropped_at_the_end_under_drop() -> None:
    gateway = Gateway(turn([1, 2], [3]))
    session = session_of(gateway, "error")
    await session.chat(ASKED)
    with pytest.raises(NoncontiguousProblem, match="message 0, character 1"):
        await session.chat(REWRITTEN)
    with pytest.raises(NoncontiguousProblem, match="turn 2"):
        await session.settle()
    assert len(gateway.asked) == 1
    dropping = session_of(Gateway(turn([1, 2], [3]), turn([1, 9, 3, 4], [5])), "drop")
    await dropping.chat(ASKED)
    await dropping.chat(REWRITTEN)
    with pytest.raises(NoncontiguousProblem, match=r"token 1 "):
        await dropping.settle()


async def test_the_same_conversation_again_takes_the_place_of_its_first_answer() -> None:
    gateway = Gateway(turn([1, 2], [3]), turn([1, 2], [7]), turn([1, 2, 7, 4], [5]))
    session = session_of(gateway)
    await session.chat(ASKED)
    await session.chat(ASKED)
    assert (gateway.asked[1]["input_ids"], gateway.asked[1]["prefix_ids"]) == ([], [1, 2])
    await session.chat([*ASKED, says("assistant", "text[7]"), says("user", "more")])
    await session.settle()
    assert sequences(session) == [[1, 2, 7, 4, 5]]


@pytest.mark.parametrize("problem", [InfraProblem("down"), DeadlineProblem("late")])
async def test_an_infrastructure_failure_is_remembered_until_a_turn_succeeds(problem: Problem) -> None:
    session = session_of(Gateway(problem, turn([1], [2])))
    with pytest.raises(type(problem)):
        await session.generate("a")
    with pytest.raises(type(problem)):
        await session.settle()
    await session.generate("a")
    await session.settle()


async def test_a_refused_prompt_is_left_to_the_environment() -> None:
    session = session_of(Gateway(DataProblem("too long")))
    with pytest.raises(DataProblem):
        await session.generate("a")
    await session.settle()


# --- behind an endpoint ----------------------------------------------------------------------------------------------


async def test_what_an_agent_said_behind_its_endpoint_becomes_the_transcript() -> None:
    flaw = Flaw("malformed_thinking", 3, "no </think>")
    turns = [
        Recorded(0, [1, 2], sample([3], (0, 1, 4, "e"))),
        Recorded(0, [4], sample([5], (0, 1, 5, "e")), [flaw]),
        Recorded(1, [8], sample([9], (0, 1, 5, "e"))),
    ]
    keeper = Keeper(Record(turns, served=3, superseded=0))
    session = session_of(Gateway(), keeper=keeper)
    endpoint = await session.endpoint()
    assert await session.endpoint() == endpoint
    await session.settle()
    assert sequences(session) == [[1, 2, 3, 4, 5], [8, 9]]
    assert session.flaws == [(2, flaw)]
    assert session.transcript.sources() == (Provenance(4, "e", 1), Provenance(5, "e", 1))
    await session.abandon()
    assert keeper.finished == ["e"]


async def test_an_agents_last_unanswered_turn_fails_the_rollout() -> None:
    keeper = Keeper(Record([], served=0, superseded=0, failure=ErrorBody("infra", "no engine")))
    session = session_of(Gateway(), keeper=keeper)
    await session.endpoint()
    with pytest.raises(InfraProblem, match="no engine"):
        await session.settle()


async def test_an_abandoned_episode_is_ended_at_the_gateway_even_if_that_forgot_it() -> None:
    keeper = Keeper(InfraProblem("unknown"))
    session = session_of(Gateway(), keeper=keeper)
    await session.endpoint()
    await session.abandon()
    assert keeper.finished == ["e"]


async def test_a_rollout_does_not_mix_its_own_turns_with_an_agents() -> None:
    session = session_of(Gateway(turn([1], [2])))
    await session.generate("a")
    with pytest.raises(EnvironmentDataError, match="as well"):
        await session.endpoint()
