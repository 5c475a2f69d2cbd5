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

    def extend(self, made: Made, call: Call) -> None:
        """Append what `call` produced; consecutive tokens of one origin share a span."""
        end = len(self.ids)
        for length, version in made.pieces:
            start, end = end, end + length
            last = self.spans[-1] if self.spans else None
            if last is not None and (last.version, last.engine, last.boot) == (version, call.engine, call.boot):
                start = self.spans.pop().start
            self.spans.append(Span(start, end, version, call.engine, call.boot))
        self.ids += made.ids
        self.logprobs += made.logprobs


class Made(msgspec.Struct, frozen=True):
    """Checked tokens of one sample. `pieces` tile them, none empty: (how many in a row, the version that sampled them).

    `finish` is None for an event of a stream that goes on.
    """

    ids: list[int]
    logprobs: list[float]
    finish: Finish | None
    pieces: list[tuple[int, int]]


class _FinishReason(msgspec.Struct, gc=False):
    type: str


class _Scored(msgspec.Struct, array_like=True, gc=False):
    """Not a tuple: one for every token, they would set off the garbage collector with each answer."""

    logprob: float | None
    token: int
    text: Any


class _Meta(msgspec.Struct):
    finish_reason: _FinishReason | None = None
    output_token_logprobs: list[_Scored] | None = None
    weight_version_spans: list[tuple[int, int, str]] | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] = []
    index: int = 0
    """Of an event: which of several prompts it answers."""


_answers = msgspec.json.Decoder(_Answer | list[_Answer])
_events = msgspec.json.Decoder(_Answer)


def rids(call: Call) -> list[str]:
    """The request ids of a call, in the order of its samples."""
    return [rid(call.rid, sample) for sample in call.samples]


def size_limit(job: Job, samples: int) -> int:
    """Bytes that an answer may have, or one event of it."""
    return 65_536 + 256 * job.max_new_tokens * samples


def body(job: Job, drafts: list[Draft], call: Call, stream: bool = False) -> bytes:
    """JSON of POST /generate: every sample of the call goes on from the prompt and what it has so far."""
    prompts = [job.prompt_ids + drafts[sample].ids for sample in call.samples]
    params = [_params(job, drafts[sample], sample) for sample in call.samples]
    common: dict[str, Any] = {"return_logprob": True, "stream": stream}
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


def absorb(
    data: bytes, job: Job, drafts: list[Draft], call: Call, vocabulary: int, outlives: bool = False
) -> tuple[Part, ...]:
    """Check the answer to `call` and append it to the drafts: all of it, or, raising `AnswerError`, nothing.

    With `outlives` the call may have gone on over refits: then the engine must say which version sampled what.
    """
    try:
        answers = _answers.decode(data)
    except msgspec.DecodeError as error:
        raise AnswerError(f"the answer is not a generation: {error}") from error
    answers = answers if isinstance(answers, list) else [answers]
    if len(answers) != len(call.samples):
        raise AnswerError(f"{len(answers)} answers to {len(call.samples)} prompts")
    checked = []
    for sample, answer in zip(call.samples, answers, strict=True):
        room = job.max_new_tokens - len(drafts[sample].ids)
        checked.append(_check(answer, sample, room, vocabulary, call.version, outlives))
    parts = []
    for sample, made in zip(call.samples, checked, strict=True):
        drafts[sample].extend(made, call)
        drafts[sample].finish = settled = _settled(cast(Finish, made.finish), drafts[sample], job)
        parts.append(Part(sample, len(made.ids), settled))
    return tuple(parts)


class Arriving:
    """The streamed answer to `call`, appended to the drafts event by event. Events repeat what came before them.

    What was appended stays, whatever becomes of the stream: somebody may have read it.
    """

    def __init__(self, job: Job, drafts: list[Draft], call: Call, vocabulary: int, outlives: bool = False) -> None:
        """`outlives`: see `absorb`."""
        self._job, self._drafts, self._call, self._vocabulary = job, drafts, call, vocabulary
        self._outlives = outlives
        self._limit = size_limit(job, len(call.samples))
        self._counts = dict.fromkeys(call.samples, 0)
        self._finishes: dict[int, Finish] = {}
        self._buffer = b""

    @property
    def grew(self) -> bool:
        return any(self._counts.values())

    @property
    def whole(self) -> bool:
        return len(self._finishes) == len(self._counts)

    def feed(self, chunk: bytes) -> None:
        """Take bytes of the stream. Raises `AnswerError`."""
        *events, self._buffer = (self._buffer + chunk).split(b"\n\n")
        if len(self._buffer) > self._limit:
            raise AnswerError(f"an event exceeds {self._limit} bytes")
        events = [event[5:].strip() for event in events if event.startswith(b"data:")]
        answers = [event for event in events if event != b"[DONE]"]
        for data in answers[-1:] if len(self._counts) == 1 else answers:
            self._take(data)

    def parts(self) -> tuple[Part, ...]:
        """What was appended; a sample without its end must go on."""
        return tuple(Part(sample, n, self._finishes.get(sample, "abort")) for sample, n in self._counts.items())

    def _take(self, data: bytes) -> None:
        try:
            answer = _events.decode(data)
        except msgspec.DecodeError as error:
            raise AnswerError(f"an event is not a generation: {error}: {data[:200]!r}") from error
        if not 0 <= answer.index < len(self._counts):
            raise AnswerError(f"an event has index {answer.index}, {len(self._counts)} prompts were sent")
        sample = self._call.samples[answer.index]
        draft, known = self._drafts[sample], self._counts[sample]
        room = self._job.max_new_tokens - len(draft.ids) + known
        made = _check(answer, sample, room, self._vocabulary, self._call.version, self._outlives, known)
        draft.extend(made, self._call)
        self._counts[sample] = known + len(made.ids)
        if made.finish is not None:
            self._finishes[sample] = draft.finish = _settled(made.finish, draft, self._job)


def _check(
    answer: _Answer, sample: int, room: int, vocabulary: int, version: int, outlives: bool, known: int | None = None
) -> Made:
    """The tokens beyond the first `known` ones. None: the answer is whole, not an event of a stream that goes on."""
    where = f"sample {sample}"
    ids, entries = answer.output_ids, answer.meta_info.output_token_logprobs or []
    reason = answer.meta_info.finish_reason
    finish = reason.type if reason else None
    if finish is None and known is not None:
        ids = ids[: len(entries)]
        entries = entries[: len(ids)]
    elif finish not in ("stop", "length", "abort"):
        raise AnswerError(f"{where}: finish_reason is {finish!r}, not stop, length or abort")
    if len(entries) != len(ids):
        raise AnswerError(f"{where}: {len(entries)} logprobs for {len(ids)} tokens")
    if len(ids) > room:
        raise AnswerError(f"{where}: {len(ids)} tokens, at most {room} were asked for")
    if not ids and finish in ("stop", "length"):
        raise AnswerError(f"{where}: no token, and finish_reason {finish}")
    if finish is not None and len(ids) < (known or 0):
        raise AnswerError(f"{where}: ends with {len(ids)} tokens, after {known}")
    pieces = _pieces(answer.meta_info.weight_version_spans, len(ids), version, where) if outlives else None
    ids, entries = ids[known or 0 :], entries[known or 0 :]
    scored, logprobs = [entry.token for entry in entries], [entry.logprob for entry in entries]
    if ids and not (ids == scored and min(ids) >= 0 and max(ids) < vocabulary and _proper(logprobs)):
        _blame(where, ids, entries, vocabulary, known or 0)
    fresh = [(len(ids), version)] * bool(ids) if pieces is None else _behind(pieces, known or 0)
    return Made(ids, cast(list[float], logprobs), cast(Finish | None, finish), fresh)


def _pieces(spans: list[tuple[int, int, str]] | None, count: int, version: int, where: str) -> list[tuple[int, int]]:
    """The spans of an answer as lengths: they tile its tokens, and versions rise from that of the call on."""
    pieces, at, last = [], 0, version - 1
    for start, end, label in spans or ():
        sampled = int(label) if label.isdecimal() else -1
        if start != at or end <= start or sampled <= last:
            raise AnswerError(
                f"{where}: weight_version_spans {spans} don't rise from version {version}, token by token"
            )
        pieces.append((end - start, sampled))
        at, last = end, sampled
    if at != count:
        raise AnswerError(f"{where}: weight_version_spans {spans} do not cover {count} tokens")
    return pieces


def _behind(pieces: list[tuple[int, int]], known: int) -> list[tuple[int, int]]:
    """What is left of the pieces without their first `known` tokens."""
    left = []
    for length, version in pieces:
        if length > known:
            left.append((length - known, version))
        known = max(0, known - length)
    return left


def _proper(logprobs: list[float | None]) -> bool:
    """Whether all are finite and <= 0. One that isn't makes the sum of all no number, infinite or unknown."""
    found = cast(list[float], logprobs)
    try:
        return math.isfinite(sum(found)) and max(found) <= 0.0
    except TypeError:
        return False


def _blame(where: str, ids: list[int], entries: list[_Scored], vocabulary: int, start: int) -> None:
    """Raises `AnswerError` naming the first token that is wrong; the first one is number `start`."""
    for at, (token, entry) in enumerate(zip(ids, entries, strict=True), start):
        logprob, scored = entry.logprob, entry.token
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
