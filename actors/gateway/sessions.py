"""One episode's exact tokens over its turns: what a conversation repeats of them, and where it leaves them.

A client sends its whole conversation each turn, and what it repeats of the policy's answers is text, often changed on
the way: thinking dropped, white space trimmed, tool calls parsed. The tokens that were sampled stay what they were: a
conversation that says the same as the episode so far is continued from its ids, and only what is new is tokenised.
One that says something else has diverged, and `Divergence` names the place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from actors.gateway.client import DataProblem, Divergence, ErrorBody, NoncontiguousProblem, Record, Recorded, Sample
from actors.gateway.parsing import Parsed
from config.schema import Noncontiguous

Message = Mapping[str, Any]

TURNS = 1024
"""Turns that one episode may have."""


class Plan(msgspec.Struct, frozen=True):
    """How the next prompt is made.

    `prefix` are exact ids, and hold the first `carried` messages. `repeat`: the conversation of the last turn is asked
    again, so the prompt is `prefix` alone and the answer takes the place of the last one. `diverged`: nothing carries
    over, and this is why.
    """

    prefix: Sequence[int] = ()
    carried: int = 0
    repeat: bool = False
    diverged: Divergence | None = None


class Turn:
    """One answered turn: the conversation it was asked with, and what came of it."""

    def __init__(self, sequence: int, start: int, prompt: int, messages: int, sample: Sample, answer: Parsed) -> None:
        self.sequence = sequence
        self.start, self.prompt = start, prompt
        self.messages = messages
        self.sample, self.answer = sample, answer


class Episode:
    """The turns of one episode, under one policy for what diverges.

    `error` refuses the turn, `split` begins a new sequence with it, `truncate` and `drop` serve it and record nothing
    from there on.
    """

    def __init__(self, policy: Noncontiguous) -> None:
        self.policy: Noncontiguous = policy
        self.turns: list[Turn] = []
        self.served = 0
        self.superseded = 0
        self.diverged: Divergence | None = None
        self.failure: ErrorBody | None = None
        self.ids: list[int] = []
        self._ended: list[list[int]] = []
        self._messages: list[dict[str, Any]] = []
        self._tools: Any = None

    def restored(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation with the policy's empty answers, which some agents leave out of their history."""
        found = list(messages)
        last = self.turns[-1].sequence if self.turns else 0
        for turn in self.turns:
            silent = turn.sequence == last and not turn.answer.content.strip() and not turn.answer.tool_calls
            if silent and turn.messages < len(found) and found[turn.messages].get("role") != "assistant":
                found.insert(turn.messages, {"role": "assistant", "content": ""})
        return found

    def plan(self, messages: Sequence[Message], tools: Any = None) -> Plan:
        """How to prompt for messages that are `restored`. Raises `NoncontiguousProblem`, `DataProblem`."""
        given = [canonical(message) for message in messages]
        if not self.turns:
            return Plan()
        last = self.turns[-1]
        diverged = self._compare(given, tools)
        if diverged is None and len(given) == last.messages:
            return Plan(self.ids[: last.prompt], last.messages, repeat=True)
        if diverged is None:
            diverged = self._answered(given)
        if diverged is None:
            return Plan(self.ids, last.messages + 1)
        if self.policy == "error":
            self.diverged = diverged
            raise NoncontiguousProblem(describe(diverged))
        return Plan(diverged=diverged)

    def add(
        self,
        plan: Plan,
        messages: Sequence[Message],
        tools: Any,
        prompt_ids: Sequence[int],
        sample: Sample,
        answer: Parsed,
    ) -> None:
        """Record an answered turn. Raises `DataProblem` beyond `TURNS`."""
        self.served += 1
        self.failure = None
        fresh = plan.diverged
        if fresh is not None:
            at = next((k for k, (a, b) in enumerate(zip(self.ids, prompt_ids, strict=False)) if a != b), None)
            at = min(len(self.ids), len(prompt_ids)) if at is None else at
            fresh = msgspec.structs.replace(fresh, token=at)
            self.diverged = self.diverged or fresh
        if self.diverged is not None and self.policy in ("truncate", "drop"):
            return
        if len(self.turns) >= TURNS:
            raise DataProblem(f"the episode has {TURNS} turns, which is the most")
        if fresh is not None:
            self._split()
        elif plan.repeat:
            self._forget_last()
        self._append(messages, tools, list(prompt_ids), sample, answer)

    def extend(self, prompt_ids: Sequence[int], sample: Sample) -> None:
        """Record a turn of plain text, which always follows the ids so far; chat can't go on behind it."""
        self.served += 1
        self.failure = None
        if self.diverged is None or self.policy == "split":
            self._append((), None, list(prompt_ids), sample, Parsed(sample.text))

    def failed(self, kind: str, reason: str) -> None:
        """The last request got no answer."""
        self.failure = ErrorBody(kind, reason)

    def record(self) -> Record:
        """Everything, as the collector needs it."""
        turns, ends = [], {}
        for turn in self.turns:
            start = ends.get(turn.sequence, 0)
            turns.append(Recorded(turn.sequence, self._fresh(turn, start), turn.sample, list(turn.answer.flaws)))
            ends[turn.sequence] = turn.prompt + len(turn.sample.output_ids)
        return Record(turns, self.served, self.superseded, self.diverged, self.failure)

    # --- parts ---

    def _fresh(self, turn: Turn, start: int) -> list[int]:
        ids = self._ended[turn.sequence] if turn.sequence < len(self._ended) else self.ids
        return ids[start : turn.prompt]

    def _split(self) -> None:
        self._ended.append(self.ids)
        self.ids = []

    def _forget_last(self) -> None:
        last = self.turns.pop()
        self.ids = self.ids[: last.start]
        self.superseded += 1

    def _append(
        self, messages: Sequence[Message], tools: Any, prompt: list[int], sample: Sample, answer: Parsed
    ) -> None:
        if prompt[: len(self.ids)] != self.ids:
            raise DataProblem(f"a prompt of {len(prompt)} tokens does not continue the {len(self.ids)} of its episode")
        sequence = len(self._ended)
        self.turns.append(Turn(sequence, len(self.ids), len(prompt), len(messages), sample, answer))
        self.ids = prompt + sample.output_ids
        self._messages = [canonical(message) for message in messages]
        self._tools = tools

    def _compare(self, given: list[dict[str, Any]], tools: Any) -> Divergence | None:
        """Where the messages of the last turn and those given part."""
        last = self.turns[-1]
        if last.messages == 0:
            return self._at(0, 0, "the episode so far is plain text, which no message repeats")
        if tools != self._tools:
            return self._at(0, 0, "other tools are offered than before")
        answers = {turn.messages: turn.answer for turn in self.turns if turn.sequence == last.sequence}
        answers.pop(last.messages, None)
        for index, known in enumerate(self._messages):
            if index >= len(given):
                return self._at(index, 0, f"the conversation ends before message {index}")
            different = _different(known, given[index], answers.get(index))
            if different is not None:
                return self._at(index, *different)
        return None

    def _answered(self, given: list[dict[str, Any]]) -> Divergence | None:
        """Where the answer of the last turn and what the conversation makes of it part."""
        last = self.turns[-1]
        different = _different(None, given[last.messages], last.answer, last.sample.text)
        return None if different is None else self._at(last.messages, *different)

    def _at(self, message: int, character: int, what: str) -> Divergence:
        last = self.turns[-1]
        turns = [turn for turn in self.turns if turn.sequence == last.sequence]
        number = next((k for k, turn in enumerate(turns, 1) if message <= turn.messages), len(turns))
        holder = turns[number - 1]
        token = holder.prompt if message == holder.messages else holder.start
        return Divergence(turn=len(self.turns) + 1, message=message, character=character, token=token, what=what)


def describe(diverged: Divergence) -> str:
    """One sentence with the position."""
    return (
        f"turn {diverged.turn} does not continue the episode: message {diverged.message}, character "
        f"{diverged.character} (token {diverged.token} of the episode): {diverged.what}"
    )


# --- messages --------------------------------------------------------------------------------------------------------


def canonical(message: Message) -> dict[str, Any]:
    """What a message says: role, text, calls by name and arguments. Raises `DataProblem` for what can't be rendered."""
    role = message.get("role")
    if not isinstance(role, str):
        raise DataProblem(f"a message has role {role!r}; system, user, assistant or tool is due")
    said: dict[str, Any] = {"role": role, "content": text_of(message.get("content"))}
    for name in ("tool_call_id", "name"):
        if isinstance(message.get(name), str):
            said[name] = message[name]
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise DataProblem(f"tool_calls is {type(calls).__name__}; a list of calls is due")
        said["tool_calls"] = [_call(call) for call in calls]
    return said


def text_of(content: Any) -> str:
    """The text of a message's content: a string, or text parts. Raises `DataProblem` for any other part."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataProblem(f"content is {type(content).__name__}; a string or a list of text parts is due")
    texts = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise DataProblem(f"a content part of type {kind!r} can't be used: only text goes to the model")
        texts.append(part["text"])
    return "".join(texts)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataProblem("an entry of tool_calls has no function.name")
    return {"name": function["name"], "arguments": _arguments(function.get("arguments"))}


def _arguments(value: Any) -> Any:
    if not isinstance(value, str):
        return value or {}
    try:
        return json.loads(value) if value else {}
    except ValueError:
        return value
    except RecursionError as error:
        raise DataProblem("the arguments of a call are nested too deeply") from error


Difference = tuple[int, str]


def _different(
    known: dict[str, Any] | None, given: dict[str, Any], answer: Parsed | None, raw: str | None = None
) -> Difference | None:
    """Character and reason if `given` says something else than `known`, or than the policy's own `answer`."""
    if answer is not None:
        return _misquoted(answer, given, raw)
    assert known is not None
    if known["role"] != given["role"]:
        return 0, f"role {given['role']!r} where it was {known['role']!r}"
    # Tool results come back with the id of their call, which clients make up anew.
    for name in ("tool_calls", "name"):
        if known.get(name) != given.get(name):
            return 0, f"{name} {given.get(name)!r} where it was {known.get(name)!r}"[:300]
    return _parting(known["content"], given["content"])


def _misquoted(answer: Parsed, given: dict[str, Any], raw: str | None) -> Difference | None:
    """Whether an assistant message is the policy's answer: thinking may be left out, white space may differ."""
    if given["role"] != "assistant":
        return 0, f"role {given['role']!r} where the policy's answer is due"
    calls = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in answer.tool_calls]
    said = _bare(given["content"])
    whole = [_bare(raw)] if raw is not None else []
    if "tool_calls" not in given and said in (*whole, _bare(_with_calls(answer))):
        return None
    if given.get("tool_calls", []) != calls:
        return 0, f"tool calls {given.get('tool_calls', [])!r} where the policy's were {calls!r}"[:300]
    if said in (_bare(answer.content), *whole):
        return None
    return _parting(answer.content, given["content"])


def _with_calls(answer: Parsed) -> str:
    blocks = [
        "<tool_call>" + json.dumps({"name": call.name, "arguments": json.loads(call.arguments)}) + "</tool_call>"
        for call in answer.tool_calls
    ]
    return answer.content + "".join(blocks)


def _bare(text: str) -> str:
    """Without thinking and white space."""
    _, tag, behind = text.rpartition("</think>")
    return "".join((behind if tag else text).split())


def _parting(known: str, given: str) -> Difference | None:
    """The first character that differs; white space at the ends is not counted."""
    if known.strip() == given.strip():
        return None
    at = next((k for k, (a, b) in enumerate(zip(known, given, strict=False)) if a != b), min(len(known), len(given)))
    return at, f"{given[at : at + 40]!r} where it was {known[at : at + 40]!r}"
