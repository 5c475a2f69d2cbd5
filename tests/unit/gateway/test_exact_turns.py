"""Tool use over several turns under a template that re-renders: the gateway keeps every token as it was sampled."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from actors.gateway.tokens import Tokens
from tests.unit.gateway.agents import Front, Policy, write_chat_model

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
EPISODES, TURNS = 100, 4


def wordy(seed: int) -> Any:
    """A policy that thinks, calls one or two tools with odd white space, and comments on them."""
    draw = random.Random(seed)

    def say(prompt: str) -> str:
        spaces = [" " * draw.randrange(3) for _ in range(4)]
        call = f'<tool_call>{spaces[0]}{{"name": "look",{spaces[1]} "arguments": {{"x": {draw.randrange(100)}}}}}'
        calls = f"{call}{spaces[2]}</tool_call>" * draw.randrange(1, 3)
        return f"<think>{spaces[3]}maybe {draw.randrange(9)}\n</think>\n\n {spaces[0]}I look.{spaces[1]}\n{calls}"

    return say


def results(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": f" seen {json.loads(call['function']['arguments'])} \n"}
        for call in message["tool_calls"]
    ]


def as_agents_do(message: dict[str, Any], style: int) -> dict[str, Any]:
    """What an agent keeps of an answer: all, no thinking, other white space, or re-written call arguments."""
    kept = {key: message[key] for key in ("role", "content", "tool_calls")}
    if style == 0:
        return {**kept, "reasoning_content": message["reasoning_content"]}
    if style == 2:
        kept["content"] = f"\n{kept['content']}  "
    if style == 3:
        calls = json.loads(json.dumps(kept["tool_calls"]))
        for call in calls:
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
        kept["tool_calls"] = calls
    return kept


async def test_no_episode_of_a_hundred_is_noncontiguous_where_plain_retokenisation_breaks_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    tokens = Tokens(write_chat_model(tmp_path))
    policy = Policy(tokens, wordy(0))
    broken = plainly_broken = 0
    async with Front(tokens, policy) as front:
        for number in range(EPISODES):
            name = f"e{number}"
            await front.open(name)
            messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
            held: list[int] = []
            plain_held: list[int] = []
            exact = plain = True
            for _ in range(TURNS):
                message = await front.chat(name, messages, tools=TOOLS)
                prompt = message["prompt_token_ids"]
                exact = exact and prompt[: len(held)] == held
                held = prompt + message["generation_token_ids"]
                retokenised = await tokens.chat_ids(messages, tools=TOOLS)
                plain = plain and retokenised[: len(plain_held)] == plain_held
                plain_held = retokenised + message["generation_token_ids"]
                messages = [*messages, as_agents_do(message, number % 4), *results(message)]
            record = await front.finish(name)
            assert record["diverged"] is None
            ids = [token for turn in record["turns"] for token in turn["fresh_ids"] + turn["sample"]["output_ids"]]
            assert ids == held
            assert len(record["turns"]) == TURNS
            broken += not exact
            plainly_broken += not plain
    with capsys.disabled():
        print(f"\nnoncontiguous episodes of {EPISODES}: gateway {broken}, plain re-tokenisation {plainly_broken}")
    assert broken == 0
    assert plainly_broken == EPISODES


async def test_only_what_is_new_is_rendered_behind_the_answer(tmp_path: Path):
    tokens = Tokens(write_chat_model(tmp_path))
    policy = Policy(tokens, lambda _: "<think>a</think>  b  ")
    async with Front(tokens, policy) as front:
        await front.open("e")
        first = await front.chat("e", [{"role": "user", "content": "hi"}])
        asked = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        second = await front.chat("e", asked)
    held = first["prompt_token_ids"] + first["generation_token_ids"]
    fresh = second["prompt_token_ids"][len(held) :]
    decode = tokens._tokenizer.decode
    assert decode(first["generation_token_ids"], skip_special_tokens=False) == "<think>a</think>  b  <|im_end|>"
    assert decode(fresh, skip_special_tokens=False) == "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"


async def test_an_answer_cut_at_its_length_gets_its_end_token_from_the_template(tmp_path: Path):
    tokens = Tokens(write_chat_model(tmp_path))
    policy = Policy(tokens, lambda _: "cut")
    policy.finish = "length"
    async with Front(tokens, policy) as front:
        await front.open("e")
        first = await front.chat("e", [{"role": "user", "content": "hi"}])
        asked = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "cut"},
            {"role": "user", "content": "c"},
        ]
        second = await front.chat("e", asked)
    held = first["prompt_token_ids"] + first["generation_token_ids"]
    fresh = tokens._tokenizer.decode(second["prompt_token_ids"][len(held) :], skip_special_tokens=False)
    assert fresh.startswith("<|im_end|>\n<|im_start|>user")


async def test_ids_that_messages_carry_are_the_prefix_where_no_episode_is_named(tmp_path: Path):
    tokens = Tokens(write_chat_model(tmp_path))
    async with Front(tokens, Policy(tokens, lambda _: "<think>a</think>b")) as front:
        asked: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        for _ in range(3):
            status, body = await front.post("/v1/chat/completions", {"messages": asked})
            assert status == 200, body
            message = body["choices"][0]["message"]
            if len(asked) > 1:
                before = asked[-2]
                held = before["prompt_token_ids"] + before["generation_token_ids"]
                assert message["prompt_token_ids"][: len(held)] == held
            asked = [*asked, {**message, "content": " b "}, {"role": "user", "content": "c"}]
        # An agent that copies the ids of one message to the next, which never had any.
        copied = {**asked[1], "content": "written by somebody else"}
        status, body = await front.post("/v1/chat/completions", {"messages": [*asked[:3], copied, asked[4]]})
    assert status == 200, body
    text = tokens._tokenizer.decode(body["choices"][0]["message"]["prompt_token_ids"], skip_special_tokens=False)
    assert "written by somebody else" in text
