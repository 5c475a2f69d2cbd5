"""Bodies of SGLang's native API: parsing and validation of requests, shapes of answers and errors."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from actors.engine.torch_server.generation import Generation
from actors.engine.torch_server.sampling import BadRequest, parse_sampling, stream_key
from contracts.weights import Checksum

T = TypeVar("T")
# prompts this engine has no reading of, and features it lacks
REFUSED = ("text", "input_embeds", "image_data", "audio_data", "video_data", "lora_path", "token_ids_logprob")


class SchemaError(ValueError):
    """The body is not of the form the call takes (SGLang answers these in another shape than `BadRequest`)."""


class JoinGroup(msgspec.Struct):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class LeaveGroup(msgspec.Struct):
    group_name: str = "weight_update_group"


class Update(msgspec.Struct):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: Literal["flattened_bucket"] | None = None


class Take(msgspec.Struct):
    serialized_named_tensors: list[str]
    load_format: Literal["flattened_bucket"]
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class Relabel(msgspec.Struct):
    new_version: str
    abort_all_requests: bool = True


class Occupation(msgspec.Struct):
    """Which memory is to be released or resumed. No tags at all: everything."""

    tags: list[str] | None = None

    def known(self, tags: Sequence[str]) -> tuple[str, ...]:
        """Those of `tags`, in their order. Raises `BadRequest` for another."""
        strange = sorted(set(self.tags or ()).difference(tags))
        if strange:
            raise BadRequest(f"tags names {', '.join(strange)}; this engine knows {', '.join(tags)}")
        return tuple(tag for tag in tags if not self.tags or tag in self.tags)


class Abort(msgspec.Struct):
    rid: str = ""
    abort_all: bool = False


class Pause(msgspec.Struct):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Resume(msgspec.Struct):
    torch_empty_cache: bool = True


class Check(msgspec.Struct):
    action: str
    checksum: Checksum = "xxh3_128"


class GetWeights(msgspec.Struct):
    name: str
    truncate_size: int = 100


def decode(body: bytes, kind: type[T]) -> T:
    """`body` as `kind`; raises `SchemaError`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise SchemaError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Limits:
    """What a prompt must respect: token ids below `vocab`, prompt + new tokens within `context` and `total`."""

    vocab: int
    context: int
    total: int
    eos: frozenset[int]
    seed: int
    sequences: int


class Ticket:
    """One HTTP request: its generations, how many still run, and what to wake."""

    def __init__(self, done: asyncio.Future[None], wake: asyncio.Event | None) -> None:
        """`done` is set when all generations left; `wake`, of a stream, whenever one moved on."""
        self.generations: list[Generation] = []
        self.remaining, self.done, self.wake = 0, done, wake
        self.listed = False

    @property
    def stream(self) -> bool:
        return self.wake is not None


def parse_generate(body: bytes, limits: Limits, ticket_of: Callable[[bool], Ticket]) -> Ticket:
    """The ticket of a /generate body; `ticket_of(stream)` makes it. Raises `BadRequest` or `SchemaError`.

    Generations stand in the order of the answer: prompts, and for each its n samples.
    """
    raw = decode(body, dict[str, Any])
    for name in REFUSED:
        if raw.get(name) is not None:
            raise BadRequest(f"{name} is not served: this engine takes input_ids and answers ids")
    if raw.get("top_logprobs_num"):
        raise BadRequest(
            f"top_logprobs_num is {raw['top_logprobs_num']!r}, this engine returns the chosen token's only"
        )
    ids = raw.get("input_ids")
    if not isinstance(ids, list):
        raise (BadRequest if ids is None else SchemaError)(f"input_ids is {ids!r}, it must be a list of token ids")
    listed = bool(ids) and isinstance(ids[0], list)
    prompts = ids if listed else [ids]
    columns = zip(
        prompts,
        _spread(raw, "sampling_params", {}, len(prompts), listed, (dict,)),
        _rids(raw.get("rid"), len(prompts), listed),
        _spread(raw, "return_logprob", False, len(prompts), listed, (bool,)),
        _spread(raw, "logprob_start_len", -1, len(prompts), listed, (int,)),
        strict=True,
    )
    ticket = ticket_of(bool(raw.get("stream", False)))
    for prompt, sampling, rid, logprob, start in columns:
        ticket.generations += _generations(prompt, sampling, rid, logprob, start, ticket, limits)
    ticket.remaining = len(ticket.generations)
    if ticket.remaining > limits.sequences:
        raise BadRequest(f"{ticket.remaining} sequences in one request, at most {limits.sequences} may be queued")
    ticket.listed = listed or ticket.remaining > 1
    return ticket


def _generations(
    prompt: Any, raw: Mapping[str, Any], rid: str, logprob: bool, start: int, ticket: Ticket, limits: Limits
) -> Iterator[Generation]:
    _check_prompt(prompt, limits)
    room = min(limits.context, limits.total) - len(prompt)
    sampling = parse_sampling(raw, limits.eos, limits.vocab, room)
    if sampling.max_new > room:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length: {len(prompt)} prompt tokens and "
            f"max_new_tokens={sampling.max_new}, at most {min(limits.context, limits.total)} together"
        )
    if start >= len(prompt):
        raise BadRequest(f"logprob_start_len is {start}, the prompt has {len(prompt)} tokens")
    for i in range(sampling.n):
        own = rid if sampling.n == 1 else f"{rid}_{i}"
        seed = None if sampling.seed is None else sampling.seed + i
        key = stream_key(limits.seed, own, len(prompt), seed)
        yield Generation(own, prompt, sampling, key, logprob, start if logprob else -1, ticket.stream, ticket)


def _check_prompt(prompt: Any, limits: Limits) -> None:
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise SchemaError("input_ids must be a list of integers, or a list of such lists")
    if not prompt:
        raise BadRequest("input_ids is empty: a prompt needs at least one token")
    if len(prompt) >= limits.context:
        raise BadRequest(
            f"The input ({len(prompt)} tokens) is longer than the model's context length ({limits.context} tokens)."
        )
    if min(prompt) < 0 or max(prompt) >= limits.vocab:
        raise BadRequest(f"input_ids reach from {min(prompt)} to {max(prompt)}, the vocabulary has {limits.vocab} ids")


def _spread(raw: Mapping[str, Any], name: str, default: Any, count: int, listed: bool, types: tuple[type, ...]) -> Any:
    """One value a prompt: a list of a batch as it is, anything else for all."""
    value = raw.get(name)
    if isinstance(value, list):
        if not listed:
            raise BadRequest(f"{name} is a list, but input_ids is one prompt")
        if len(value) != count:
            raise BadRequest(f"{name} has {len(value)} entries for {count} prompts")
        values = [default if one is None else one for one in value]
    else:
        values = [default if value is None else value]
    for one in values:
        if not isinstance(one, types):
            raise SchemaError(f"{name} is {one!r}, it must be of type {types[0].__name__}")
    return values if isinstance(value, list) else list(itertools.repeat(values[0], count))


def _rids(value: Any, count: int, listed: bool) -> list[str]:
    if value is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(value, str) and value:
        return [f"{value}_{i}" for i in range(count)] if listed else [value]
    if not isinstance(value, list) or not all(isinstance(rid, str) and rid for rid in value):
        raise SchemaError(f"rid is {value!r}, it must be a string or a list of strings, none empty")
    if len(value) != count or not listed:
        raise BadRequest(f"rid has {len(value)} entries for {count if listed else 'one unlisted'} prompts")
    return value


def answer(g: Generation, version: str) -> dict[str, Any]:
    """SGLang's object for one generation, ended or (finish_reason null) on its way under weights `version`."""
    made = min(len(g.logprobs), len(g.tokens) - g.prompt)  # the scheduler may be appending
    ids = g.tokens[g.prompt : g.prompt + made]
    meta: dict[str, Any] = {
        "id": g.rid,
        "finish_reason": g.finish if g.left else None,
        "prompt_tokens": g.prompt,
        "weight_version": g.version if g.left else version,
        "weight_version_spans": _version_spans(g, made),
        "num_retractions": g.retractions,
    }
    if g.return_logprob:
        meta["input_token_logprobs"] = _prompt_logprobs(g)
        meta["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(g.logprobs[:made], ids, strict=True)
        ]
    meta["completion_tokens"] = made
    meta["cached_tokens"] = g.cached
    if g.left:
        meta["e2e_latency"] = time.monotonic() - g.created
    return {"output_ids": ids, "meta_info": meta}


def _version_spans(g: Generation, made: int) -> list[tuple[int, int, str]]:
    """[start, end) of the first `made` output tokens, and the label of the weights that sampled them."""
    begun = [(start, version) for start, version in list(g.versions) if start < made]
    ends = [*(start for start, _ in begun[1:]), made]
    return [(start, end, version) for (start, version), end in zip(begun, ends, strict=False)]


def _prompt_logprobs(g: Generation) -> list[list[Any]]:
    if g.logprob_start < 0 or g.scores_prompt:
        return []
    scored = g.tokens[g.logprob_start : g.prompt]
    return [[logprob, token, None] for logprob, token in zip([None, *g.prompt_logprobs], scored, strict=True)]


def semantic_error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


def schema_error(message: str) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}


def outcome(success: bool, message: str) -> dict[str, Any]:
    return {"success": success, "message": message}
