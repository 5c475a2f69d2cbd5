"""One call to one engine: the body it gets, and the checks that its answer must pass.

Bodies and answers have SGLang's form: one prompt and one object, or lists of both.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, cast

import msgspec

from actors.gateway.client import Span
from actors.gateway.state import Call, Finish, Part, rid


class AnswerError(Exception):
    """An engine's answer can't be used: says which sample, where, and what is wrong."""


class Job(msgspec.Struct, frozen=True):
    """A valid request: prompt and parameters. `max_new_tokens` keeps within the context."""

    session: str
    prompt_ids: list[int]
    n: int
    temperature: float
    max_new_tokens: int
    seed: int | None
    eos: tuple[int, ...]
    deadline_at: float


class Draft:
    """One sample as far as it has come."""

    __slots__ = ("finish", "ids", "logprobs", "spans")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[Span] = []
        self.finish = ""

    def extend(self, ids: list[int], logprobs: list[float], call: Call) -> None:
        """Append what `call` produced; consecutive tokens of one origin share a span."""
        if not ids:
            return
        start = len(self.ids)
        last = self.spans[-1] if self.spans else None
        if last is not None and (last.version, last.engine, last.boot) == (call.version, call.engine, call.boot):
            start = self.spans.pop().start
        self.ids += ids
        self.logprobs += logprobs
        self.spans.append(Span(start, len(self.ids), call.version, call.engine, call.boot))


class _FinishReason(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    finish_reason: _FinishReason | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] = []


_answers = msgspec.json.Decoder(_Answer | list[_Answer])


def rids(call: Call) -> list[str]:
    """The request ids of a call, in the order of its samples."""
    return [rid(call.rid, sample) for sample in call.samples]


def body(job: Job, drafts: list[Draft], call: Call) -> bytes:
    """JSON of POST /generate: every sample of the call goes on from the prompt and what it has so far."""
    prompts = [job.prompt_ids + drafts[sample].ids for sample in call.samples]
    params = [_params(job, drafts[sample], sample) for sample in call.samples]
    common: dict[str, Any] = {"return_logprob": True, "stream": False}
    if len(prompts) == 1:
        return msgspec.json.encode(
            {"input_ids": prompts[0], "rid": rids(call)[0], "sampling_params": params[0], **common}
        )
    alike = all(other == params[0] for other in params)
    return msgspec.json.encode(
        {"input_ids": prompts, "rid": rids(call), "sampling_params": params[0] if alike else params, **common}
    )


def _params(job: Job, draft: Draft, sample: int) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": job.temperature,
        "max_new_tokens": job.max_new_tokens - len(draft.ids),
        "stop_token_ids": list(job.eos),
    }
    if job.seed is not None:
        params["sampling_seed"] = seed_of(job.seed, sample, len(draft.ids))
    return params


def seed_of(seed: int, sample: int, position: int) -> int:
    """A seed of 31 bits for one stretch of one sample, so that neither samples nor continuations repeat each other."""
    digest = hashlib.blake2b(f"{seed}/{sample}/{position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def absorb(data: bytes, job: Job, drafts: list[Draft], call: Call, vocabulary: int) -> tuple[Part, ...]:
    """Check the answer to `call` and append it to the drafts: all of it, or, raising `AnswerError`, nothing."""
    try:
        answers = _answers.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise AnswerError(f"the answer is not a generation: {error}") from error
    answers = answers if isinstance(answers, list) else [answers]
    if len(answers) != len(call.samples):
        raise AnswerError(f"{len(answers)} answers to {len(call.samples)} prompts")
    checked = []
    for sample, answer in zip(call.samples, answers, strict=True):
        room = job.max_new_tokens - len(drafts[sample].ids)
        checked.append(_check(answer, sample, room, vocabulary))
    parts = []
    for sample, (ids, logprobs, finish) in zip(call.samples, checked, strict=True):
        drafts[sample].extend(ids, logprobs, call)
        drafts[sample].finish = finish = _settled(finish, drafts[sample], job)
        parts.append(Part(sample, len(ids), finish))
    return tuple(parts)


def _check(answer: _Answer, sample: int, room: int, vocabulary: int) -> tuple[list[int], list[float], Finish]:
    where = f"sample {sample}"
    ids, entries = answer.output_ids, answer.meta_info.output_token_logprobs or []
    reason = answer.meta_info.finish_reason
    finish = reason.type if reason else None
    if finish not in ("stop", "length", "abort"):
        raise AnswerError(f"{where}: finish_reason is {finish!r}, not stop, length or abort")
    if len(entries) != len(ids):
        raise AnswerError(f"{where}: {len(entries)} logprobs for {len(ids)} tokens")
    if len(ids) > room:
        raise AnswerError(f"{where}: {len(ids)} tokens, at most {room} were asked for")
    if not ids and finish != "abort":
        raise AnswerError(f"{where}: no token, and finish_reason {finish}")
    scored, logprobs = [entry[1] for entry in entries], [entry[0] for entry in entries]
    if ids and not (ids == scored and min(ids) >= 0 and max(ids) < vocabulary and _proper(logprobs)):
        _blame(where, ids, entries, vocabulary)
    return ids, cast(list[float], logprobs), finish


def _proper(logprobs: list[float | None]) -> bool:
    """Whether all are finite and <= 0. One that isn't makes the sum of all no number, infinite or unknown."""
    if None in logprobs:
        return False
    found = cast(list[float], logprobs)
    return math.isfinite(sum(found)) and max(found) <= 0.0


def _blame(where: str, ids: list[int], entries: list[tuple[float | None, int, Any]], vocabulary: int) -> None:
    """Raises `AnswerError` naming the first token that is wrong."""
    for at, (token, (logprob, scored, _)) in enumerate(zip(ids, entries, strict=True)):
        if not 0 <= token < vocabulary:
            raise AnswerError(f"{where}: token {token} at {at} is not in the vocabulary of {vocabulary}")
        if token != scored:
            raise AnswerError(f"{where}: token {token} at {at} has the logprob of token {scored}")
        if logprob is None or not math.isfinite(logprob) or logprob > 0.0:
            raise AnswerError(f"{where}: logprob {logprob} at {at} is not a finite number <= 0")


def _settled(finish: Finish, draft: Draft, job: Job) -> Finish:
    """An abort that came after the last token was one too late."""
    if finish != "abort":
        return finish
    if draft.ids and draft.ids[-1] in job.eos:
        return "stop"
    return "length" if len(draft.ids) == job.max_new_tokens else "abort"
