"""OpenAI's two APIs as far as an agent under training may use them: what they ask becomes an `Ask`, and back.

Anything that would change the distribution that tokens are sampled from is refused, because their logprobs must be the
policy's own. Unknown fields are left alone, as OpenAI's own clients send many that mean nothing here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import msgspec

from actors.gateway.answers import offered
from actors.gateway.chat import Ask, Served
from actors.gateway.client import DataProblem, Sample
from actors.gateway.parsing import Parsed

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (None, 1),
    "top_k": (None, -1, 0),
    "min_p": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "stop": (None, [], ""),
    "min_tokens": (None, 0),
    "top_logprobs": (None, 0),
    "tool_choice": (None, "auto", "none"),
    "response_format": (None, {"type": "text"}),
    "text": (None, {"format": {"type": "text"}}),
    "previous_response_id": (None,),
    "background": (None, False),
}
"""Fields that are taken only with a value that changes nothing."""

RENDERED = frozenset(
    ("messages", "conversation", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt")
)
"""Arguments of rendering that are not the caller's."""

SAMPLES_MAX = 128
"""Answers of one request: their ids travel in one header."""


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    temperature: float | None = None
    seed: int | None = None
    stream: bool | None = None
    session: str | None = None
    """Not OpenAI's: the episode that the request belongs to, for agents that can't be given a base URL of their own."""
    deadline_s: float | None = None


class ChatForm(_Common, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    logprobs: bool | None = None
    stream_options: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Not OpenAI's: further variables for the chat template, such as enable_thinking."""


class ResponsesForm(_Common, frozen=True, kw_only=True):
    """Body of POST /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    max_output_tokens: int | None = None


Form = ChatForm | ResponsesForm


def read_chat(data: bytes) -> tuple[ChatForm, Ask]:
    """A chat request. Raises `DataProblem` naming the field."""
    form, raw = _read(ChatForm, data)
    if not form.messages:
        raise DataProblem("messages is empty")
    tools = _offered(form.tools, raw)
    given = sorted(RENDERED & (form.chat_template_kwargs or {}).keys())
    if given:
        raise DataProblem(f"chat_template_kwargs may not hold {', '.join(given)}: the gateway sets these")
    ask = _ask(form, form.messages, tools, form.max_completion_tokens or form.max_tokens, form.n or 1)
    return form, msgspec.structs.replace(ask, template=form.chat_template_kwargs)


def read_responses(data: bytes) -> tuple[ResponsesForm, Ask]:
    """A request to the Responses API. Raises `DataProblem` naming the field."""
    form, raw = _read(ResponsesForm, data)
    messages = _messages(form)
    if not messages:
        raise DataProblem("input is empty")
    tools = _offered([_nested(tool) for tool in form.tools or ()] or None, raw)
    return form, _ask(form, messages, tools, form.max_output_tokens, 1)


def _read(kind: Any, data: bytes) -> tuple[Any, dict[str, Any]]:
    try:
        raw = msgspec.json.decode(data)
        form = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise DataProblem(str(error)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise DataProblem(f"the body is not JSON: {error}") from error
    for name, accepted in NEUTRAL.items():
        if name in raw and raw[name] not in accepted:
            raise DataProblem(
                f"{name}={raw[name]!r}"[:200] + " is not supported, leave it out: tokens are sampled from the whole "
                "distribution, because their logprobs must be the policy's own"
            )
    return form, raw


def _ask(form: Form, messages: list[Any], tools: Any, max_tokens: int | None, n: int) -> Ask:
    for name, value, least in (("max_tokens", max_tokens, 1), ("n", n, 1), ("temperature", form.temperature, 0)):
        if value is not None and value < least:
            raise DataProblem(f"{name}={value}: at least {least} is due")
    if n > SAMPLES_MAX:
        raise DataProblem(f"n={n}: at most {SAMPLES_MAX}")
    return Ask(
        messages=messages,
        tools=tools,
        temperature=form.temperature,
        max_tokens=max_tokens,
        seed=form.seed,
        n=n,
        session=form.session,
        deadline_s=form.deadline_s,
    )


def _offered(tools: list[dict[str, Any]] | None, raw: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = None if raw.get("tool_choice") == "none" else tools or None
    offered(tools)
    return tools


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool of the Responses API in the form of the chat API."""
    if tool.get("type") != "function" or "function" in tool:
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}}


# --- input items of the Responses API --------------------------------------------------------------------------------


def _messages(form: ResponsesForm) -> list[dict[str, Any]]:
    """Items as chat messages: an assistant's text and calls that follow each other are one message."""
    messages: list[dict[str, Any]] = []
    if form.instructions:
        messages.append({"role": "system", "content": form.instructions})
    if isinstance(form.input, str):
        return [*messages, {"role": "user", "content": form.input}]
    for item in form.input:
        _take(messages, item)
    return messages


def _take(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    kind = item.get("type", "message")
    if kind == "function_call_output":
        output = item.get("output")
        messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": _text(output)})
    elif kind == "message" and item.get("role") != "assistant":
        messages.append({"role": item.get("role"), "content": _text(item.get("content"))})
    elif kind in ("message", "function_call", "reasoning"):
        message = _own(messages)
        if kind == "message":
            message["content"] += _text(item.get("content"))
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": str(item.get("call_id")), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        message |= {key: item[key] for key in ("prompt_token_ids", "generation_token_ids") if item.get(key)}
    else:
        raise DataProblem(f"an input item of type {kind!r} can't be used")


def _own(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that is being put together."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: Any) -> str:
    if not isinstance(content, list):
        return "" if content is None else str(content)
    texts = []
    for part in content:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise DataProblem("a content part without text can't be used: only text goes to the model")
        texts.append(text)
    return "".join(texts)


# --- answers ---------------------------------------------------------------------------------------------------------


def tokens_of(prompt_ids: list[int], sample: Sample) -> dict[str, Any]:
    """The exact tokens of an answer, one entry a token: id, natural log of its probability, and who sampled it."""
    return {
        "prompt_token_ids": prompt_ids,
        "generation_token_ids": sample.output_ids,
        "generation_log_probs": sample.logprobs,
        "generation_policy_versions": [s.version for s in sample.spans for _ in range(s.start, s.end)],
    }


def chat_answer(served: Served, form: ChatForm) -> dict[str, Any]:
    """Body of the answer to a chat request."""
    pairs = zip(served.samples, served.answers, strict=True)
    choices = [_choice(number, served.prompt_ids, *pair, form) for number, pair in enumerate(pairs)]
    return {
        "id": f"chatcmpl-{uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": form.model or "policy",
        "choices": choices,
        "usage": _usage(served, "prompt_tokens", "completion_tokens"),
        "sluice": {"turn": served.turn, "held_s": served.held_s},
    }


def _choice(number: int, prompt_ids: list[int], sample: Sample, answer: Parsed, form: ChatForm) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or (None if answer.tool_calls else "")}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": new_id("call"), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
    message |= tokens_of(prompt_ids, sample)
    logprobs = None
    if form.logprobs:
        logprobs = logprobs_of(sample.output_ids, sample.logprobs)
    return {"index": number, "message": message, "finish_reason": _finish(sample, answer), "logprobs": logprobs}


def logprobs_of(ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    """In OpenAI's form; tokens are named by their ids."""
    entries = zip(ids, logprobs, strict=True)
    content = [{"token": f"token_id:{t}", "logprob": p, "bytes": None, "top_logprobs": []} for t, p in entries]
    return {"content": content, "refusal": None}


def _finish(sample: Sample, answer: Parsed) -> str:
    if sample.finish_reason == "length":
        return "length"
    return "tool_calls" if answer.tool_calls else "stop"


def _usage(served: Served, prompt: str, completion: str) -> dict[str, Any]:
    read, written = len(served.prompt_ids), sum(len(sample.output_ids) for sample in served.samples)
    return {prompt: read, completion: written, "total_tokens": read + written}


def new_id(kind: str) -> str:
    """An id that nothing else has."""
    return f"{kind}_{uuid4().hex[:24]}"


def responses_answer(served: Served, form: ResponsesForm) -> dict[str, Any]:
    """Body of the answer to the Responses API. The exact tokens are on the last output item."""
    sample, answer = served.samples[0], served.answers[0]
    output: list[dict[str, Any]] = []
    if answer.reasoning is not None:
        summary = [{"type": "summary_text", "text": answer.reasoning}]
        output.append({"id": new_id("rs"), "type": "reasoning", "summary": summary})
    if answer.content or not answer.tool_calls:
        content = [{"type": "output_text", "text": answer.content, "annotations": []}]
        message = {"type": "message", "role": "assistant", "status": "completed", "content": content}
        output.append({"id": new_id("msg"), **message})
    for call in answer.tool_calls:
        item = {"type": "function_call", "call_id": new_id("call"), "name": call.name, "arguments": call.arguments}
        output.append({"id": new_id("fc"), **item, "status": "completed"})
    output[-1] |= tokens_of(served.prompt_ids, sample)
    cut = sample.finish_reason == "length"
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": form.model or "policy",
        "output": output,
        "tools": form.tools or [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "temperature": form.temperature,
        "usage": _usage(served, "input_tokens", "output_tokens"),
        "sluice": {"turn": served.turn, "held_s": served.held_s},
    }
