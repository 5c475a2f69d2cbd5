"""A gateway's HTTP side over a policy of a few lines, and a model whose template changes what it is given."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from actors.gateway.answers import Answers
from actors.gateway.client import Generated, Sample, Span
from actors.gateway.http import Server
from actors.gateway.serving import Live, Serving
from actors.gateway.tokens import Tokens
from actors.gateway.upstream import Job
from config.schema import GatewayConfig

MERGED = ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"', '": ', "}}"]
"""Text that the tokenizer makes one token of, and that the policy below samples letter by letter."""
RE_RENDERING = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == "assistant" %}
{%- set said = m.content.split("</think>")[-1] | trim %}
{%- if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ said }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}
{%- else %}{{ m.content | trim }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Drops the thinking of every turn, trims white space, and writes tool calls in its own way."""


def write_chat_model(directory: Path, context: int = 100_000, specials: Sequence[str] = ()) -> Path:
    """All of ASCII as tokens, some merged ones, more special ones, and a ChatML-like template that re-renders."""
    directory.mkdir(parents=True, exist_ok=True)
    specials = ["<pad>", "<|im_end|>", "<|im_start|>", *specials]
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    ids = {piece: number for number, piece in enumerate([*specials, *letters, *MERGED])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in specials])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in MERGED])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"model_type": "llama", "vocab_size": len(ids), "max_position_embeddings": context, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": RE_RENDERING}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


class Policy:
    """Answers jobs with what `say` makes of the prompt's text, letter by letter; -1 a token, version 7."""

    def __init__(self, tokens: Tokens, say: Callable[[str], str]) -> None:
        self.tokens, self.say = tokens, say
        self.jobs: list[Job] = []
        self.finish = "stop"

    async def __call__(self, job: Job) -> Generated:
        self.jobs.append(job)
        text = self.say(self.tokens._tokenizer.decode(job.prompt_ids, skip_special_tokens=False))
        return Generated(job.prompt_ids, [self.sample(text) for _ in range(job.n)], 0.25)

    def sample(self, text: str) -> Sample:
        vocabulary = self.tokens._tokenizer.get_vocab()
        ids = [vocabulary[letter] for letter in text] + ([1] if self.finish == "stop" else [])
        spans = [Span(0, len(ids), 7, "engine-0", 1)]
        return Sample(ids, [-1.0] * len(ids), spans, self.finish, self.tokens.text(ids))


class Clock:
    def now(self) -> float:
        return time.monotonic()


class Front:
    """`async with`: the server, and a client session for it."""

    def __init__(
        self,
        tokens: Tokens,
        submit: Callable[[Job], Awaitable[Generated]],
        follow: Callable[[Job, Live], Awaitable[Generated]] | None = None,
        answers: Answers | None = None,
        **config: Any,
    ) -> None:
        """`follow` is asked instead of `submit` where an answer is streamed."""

        async def asked(job: Job, live: Live | None) -> Generated:
            return await (submit(job) if follow is None or live is None else follow(job, live))

        clock: Any = Clock()
        self.server = Server(
            Serving(tokens, answers or Answers(tokens), tokens.context, GatewayConfig(**config), clock, asked), dict
        )

    async def __aenter__(self) -> Front:
        self.url = await self.server.start("127.0.0.1", patient=False)
        self.http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.http.close()
        await self.server.close()

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def open(self, name: str, **changes: Any) -> None:
        sampling = {"temperature": 1.0, "max_new_tokens": 1000, "seed": 3}
        status, body = await self.post(f"/episodes/{name}", {"sampling": sampling, "deadline_s": 60, **changes})
        assert status == 200, body

    async def finish(self, name: str) -> Any:
        status, body = await self.post(f"/episodes/{name}/finish", {})
        assert status == 200, body
        return body

    async def chat(self, name: str, messages: list[Any], **more: Any) -> Any:
        status, body = await self.post(f"/episodes/{name}/v1/chat/completions", {"messages": messages, **more})
        assert status == 200, body
        return body["choices"][0]["message"]
