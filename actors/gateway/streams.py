"""Answers on their way: what the engines have sampled so far becomes the chunks of a stream.

A reader takes what is new whenever it gets round to it, so one that is slow sees fewer and larger pieces, and nothing
is kept for it but the answer itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from actors.gateway.chat import Served
from actors.gateway.client import Sample
from actors.gateway.openai import ChatForm, ResponsesForm, chat_answer, logprobs_of, new_id, responses_answer
from actors.gateway.parsing import Parsed, Shown
from actors.gateway.serving import Live


class Told(msgspec.Struct, frozen=True):
    """What is new of one sample since it was last looked at; tokens [start, end) came with it."""

    reasoning: str
    content: str
    start: int
    end: int


class Teller:
    """Says of one sample what is new. The pieces add up to `Shown` at the end."""

    def __init__(self, live: Live) -> None:
        assert live.follow is not None
        self._follower = live.follow()
        self._seen = 0
        self.shown = Shown(None, "")

    def news(self, ids: Sequence[int]) -> Told:
        """`ids` are all that are known, and more will follow."""
        return self._tell(len(ids), self._follower.more(ids))

    def end(self, sample: Sample, answer: Parsed) -> Told:
        """The sample is whole."""
        return self._tell(len(sample.output_ids), self._follower.end(sample, answer))

    def _tell(self, count: int, now: Shown) -> Told:
        start, self._seen = self._seen, count
        before, self.shown = self.shown, now
        reasoning = (self.shown.reasoning or "")[len(before.reasoning or "") :]
        return Told(reasoning, self.shown.content[len(before.content) :], start, self._seen)


class ChatStream:
    """A chat answer as chunks; the exact tokens come with the chunk that ends a choice."""

    closing = b"data: [DONE]\n\n"

    def __init__(self, form: ChatForm) -> None:
        self._form = form
        self._id, self._created = f"chatcmpl-{uuid4().hex}", int(time.time())
        self._tellers: list[Teller] = []

    def news(self, live: Live) -> Iterator[dict[str, Any]]:
        """The chunks of what was sampled since the last call."""
        if not live.drafts:
            return
        yield from self._begin(len(live.drafts), live)
        for index, (teller, draft) in enumerate(zip(self._tellers, live.drafts, strict=True)):
            yield from self._deltas(index, teller.news(draft.ids), draft.logprobs, draft.ids)

    def end(self, served: Served, live: Live) -> Iterator[dict[str, Any]]:
        """The rest, once the answer is whole."""
        yield from self._begin(len(served.samples), live)
        whole = zip(self._tellers, served.samples, served.answers, strict=True)
        rest = [teller.end(sample, answer) for teller, sample, answer in whole]
        answer = chat_answer(as_shown(served, self._tellers), self._form)
        for choice, told, sample in zip(answer["choices"], rest, served.samples, strict=True):
            index, message = choice["index"], choice["message"]
            said = list(self._deltas(index, told, sample.logprobs, sample.output_ids))
            yield from said
            calls = message.get("tool_calls", ())
            for number, call in enumerate(calls):
                yield self._chunk(index, {"tool_calls": [{"index": number, **call}]})
            tokens = {key: message[key] for key in message if key.startswith(("prompt_", "generation_"))}
            unsaid = None if said else self._logprobs(told, sample.logprobs, sample.output_ids)
            yield self._chunk(index, tokens, choice["finish_reason"], unsaid)
        if (self._form.stream_options or {}).get("include_usage"):
            yield {**self._head(), "choices": [], "usage": answer["usage"]}

    def _begin(self, samples: int, live: Live) -> Iterator[dict[str, Any]]:
        if self._tellers:
            return
        self._tellers = [Teller(live) for _ in range(samples)]
        for index in range(samples):
            yield self._chunk(index, {"role": "assistant"})

    def _deltas(self, index: int, told: Told, logprobs: list[float], ids: list[int]) -> Iterator[dict[str, Any]]:
        """At most one chunk a part; the first one carries the logprobs of all tokens that are new."""
        delta = {"reasoning_content": told.reasoning, "content": told.content}
        delta = {key: text for key, text in delta.items() if text}
        found = self._logprobs(told, logprobs, ids)
        if delta or found:
            yield self._chunk(index, delta, None, found)

    def _logprobs(self, told: Told, logprobs: list[float], ids: list[int]) -> dict[str, Any] | None:
        if not self._form.logprobs or told.start == told.end:
            return None
        return logprobs_of(ids[told.start : told.end], logprobs[told.start : told.end])

    def _head(self) -> dict[str, Any]:
        model = self._form.model or "policy"
        return {"id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": model}

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return {**self._head(), "choices": [choice]}


class ResponsesStream:
    """An answer of the Responses API as events. Items appear with their first piece, calls when the answer is whole."""

    closing = b""

    def __init__(self, form: ResponsesForm) -> None:
        self._form = form
        self._id, self._created = new_id("resp"), int(time.time())
        self._teller: Teller | None = None
        self._reasoning = ""
        """What was told of thinking: all of it, or what came before the content."""
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open = False

    def news(self, live: Live) -> Iterator[dict[str, Any]]:
        """The events of what was sampled since the last call."""
        if not live.drafts:
            return
        yield from self._begin(live)
        assert self._teller is not None
        yield from self._said(self._teller.news(live.drafts[0].ids))

    def end(self, served: Served, live: Live) -> Iterator[dict[str, Any]]:
        """The rest, once the answer is whole."""
        yield from self._begin(live)
        assert self._teller is not None
        yield from self._said(self._teller.end(served.samples[0], served.answers[0]))
        (shown,) = as_shown(served, [self._teller]).answers
        shown = msgspec.structs.replace(shown, reasoning=self._reasoning or None)
        answer = responses_answer(msgspec.structs.replace(served, answers=[shown]), self._form)
        answer |= {"id": self._id, "created_at": self._created}
        for known, item in zip(self._items, answer["output"], strict=False):
            item["id"] = known["id"]
        for index, item in enumerate(answer["output"]):
            if index >= len(self._items):
                yield from self._add(item["type"], item)
            if index == len(self._items) - 1:
                yield from self._close(item)
        yield self._event(f"response.{answer['status']}", response=answer)

    def _begin(self, live: Live) -> Iterator[dict[str, Any]]:
        if self._teller is not None:
            return
        self._teller = Teller(live)
        model = self._form.model or "policy"
        known = {"id": self._id, "object": "response", "created_at": self._created, "model": model}
        known |= {"status": "in_progress", "output": [], "error": None, "incomplete_details": None}
        known |= {"tools": self._form.tools or [], "tool_choice": "auto", "parallel_tool_calls": True}
        yield self._event("response.created", response=known)
        yield self._event("response.in_progress", response=known)

    def _said(self, told: Told) -> Iterator[dict[str, Any]]:
        assert self._teller is not None
        if told.reasoning and not any(item["type"] == "message" for item in self._items):
            self._reasoning += told.reasoning
            yield from self._ensure("reasoning")
            yield self._event("response.reasoning_summary_text.delta", **self._place("summary"), delta=told.reasoning)
        if told.content:
            yield from self._ensure("message")
            yield self._event("response.output_text.delta", **self._place("content"), delta=told.content)

    def _ensure(self, kind: str) -> Iterator[dict[str, Any]]:
        """The newest item is of this kind."""
        if self._items and self._items[-1]["type"] == kind:
            return
        if self._items:
            summary = [{"type": "summary_text", "text": self._reasoning}]
            yield from self._close({**self._items[-1], "summary": summary})
        empty: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant", "content": []}
        prefix = "rs" if kind == "reasoning" else "msg"
        yield from self._add(kind, {"id": new_id(prefix), "type": kind, **empty})

    def _add(self, kind: str, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._items.append(item)
        empty = {"summary": []} if kind == "reasoning" else {"content": []} if kind == "message" else {"arguments": ""}
        begun = {key: value for key, value in item.items() if not key.startswith(("prompt_", "generation_"))}
        index = len(self._items) - 1
        yield self._event(
            "response.output_item.added", output_index=index, item={**begun, **empty, "status": "in_progress"}
        )
        if kind == "reasoning":
            part = {"type": "summary_text", "text": ""}
            yield self._event("response.reasoning_summary_part.added", **self._place("summary"), part=part)
        elif kind == "message":
            part = {"type": "output_text", "text": "", "annotations": []}
            yield self._event("response.content_part.added", **self._place("content"), part=part)

    def _close(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The end of the newest item, which is `item` when whole."""
        if item["type"] == "reasoning":
            (part,) = item["summary"]
            yield self._event("response.reasoning_summary_text.done", **self._place("summary"), text=part["text"])
            yield self._event("response.reasoning_summary_part.done", **self._place("summary"), part=part)
        elif item["type"] == "message":
            (part,) = item["content"]
            yield self._event("response.output_text.done", **self._place("content"), text=part["text"])
            yield self._event("response.content_part.done", **self._place("content"), part=part)
        else:
            arguments = item["arguments"]
            yield self._event("response.function_call_arguments.delta", **self._place(), delta=arguments)
            yield self._event("response.function_call_arguments.done", **self._place(), arguments=arguments)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self, part: str | None = None) -> dict[str, Any]:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return place if part is None else {**place, f"{part}_index": 0}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


def as_shown(served: Served, tellers: Sequence[Teller]) -> Served:
    """The answers as the stream has told them: what was told is not taken back."""
    answers = [
        msgspec.structs.replace(answer, content=teller.shown.content, reasoning=teller.shown.reasoning or None)
        for answer, teller in zip(served.answers, tellers, strict=True)
    ]
    return msgspec.structs.replace(served, answers=answers)
