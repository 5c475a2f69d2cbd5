"""Prompts become exactly the model's own ids, and limits come from its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from actors.gateway.tokens import KEPT, LARGE, ModelFilesError, Recent, Tokens


def test_limits_and_end_tokens_come_from_the_model(model: Path):
    tokens = Tokens(model)
    assert (tokens.vocabulary, tokens.context, tokens.eos) == (64, 48, (1, 63))


def test_a_nested_text_model_is_read_too(model: Path):
    config = {"text_config": {"vocab_size": 100, "max_position_embeddings": 7, "eos_token_id": 5}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "generation_config.json").unlink()
    tokens = Tokens(model)
    assert (tokens.vocabulary, tokens.context, tokens.eos) == (100, 7, (5,))


def test_a_model_without_an_end_token_has_none(model: Path):
    (model / "config.json").write_text('{"vocab_size": 64, "max_position_embeddings": 7}')
    (model / "generation_config.json").write_text("{}")
    assert Tokens(model).eos == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "config.json is not JSON"), ('{"vocab_size": 3}', "config.json: max_position_embeddings is None")],
)
def test_an_unusable_config_is_named(model: Path, text: str, says: str):
    (model / "config.json").write_text(text)
    with pytest.raises(ModelFilesError, match=says):
        Tokens(model)


async def test_the_begin_token_comes_first_and_only_there(model: Path):
    path = str(model / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = TemplateProcessing(single="<start> $A", special_tokens=[("<start>", 2)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(path)
    tokens = Tokens(model)
    assert await tokens.text_ids("abc", ()) == [2, 3, 4, 5]
    assert await tokens.text_ids("c", [2, 3, 4]) == [2, 3, 4, 5]
    chat: Any = [{"role": "user", "content": "a"}]
    assert (await tokens.chat_ids(chat, ()))[:2] == [2, 23]


@pytest.mark.parametrize(
    ("ids", "written"), [([4, 5, 1], None), ([], None), ([4, 2, 5, 63], "b<start>c"), ([1, 2], "<eos><start>")]
)
def test_a_text_with_special_tokens_in_it_is_told_as_it_was_written(model: Path, ids: list[int], written: str | None):
    assert Tokens(model).written(ids) == written


async def test_a_large_text_has_the_ids_of_its_parts(model: Path):
    tokens = Tokens(model)
    assert await tokens.text_ids("ab" * LARGE, ()) == [3, 4] * LARGE


def test_text_leaves_special_tokens_out(model: Path):
    assert Tokens(model).text([3, 4, 63, 1]) == "ab"


async def test_the_samples_of_a_group_have_their_prompt_made_once_and_each_its_own_ids(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    tokens, made = Tokens(model), []
    render = tokens._render
    monkeypatch.setattr(tokens, "_render", lambda *asked: made.append(asked) or render(*asked))
    chat: Any = [{"role": "user", "content": "a"}]
    first = await tokens.chat_ids(chat)
    second = await tokens.chat_ids(list(chat))
    assert first == second
    second.append(3)
    assert await tokens.chat_ids(chat) == first
    assert len(made) == 1
    await tokens.chat_ids(chat, template={"x": 1})
    await tokens.chat_ids(chat, tools=[{"function": {"name": "f"}}])
    await tokens.chat_ids([*chat, *chat])
    assert len(made) == 4


def test_the_prompts_that_are_kept_are_bounded_and_the_newest():
    recent = Recent()
    prompts = [chr(97 + k) * (KEPT // 8) for k in range(9)]
    for k, prompt in enumerate(prompts):
        recent.add(prompt, [k])
        recent.add(prompt, [k])
        assert recent.get(prompts[0]) == [0]
    assert [recent.get(prompt) for prompt in prompts] == [[0], None, *([k] for k in range(2, 9))]
    recent.add("x" * (KEPT // 8 + 1), [9])
    assert recent.get("x" * (KEPT // 8 + 1)) is None
    assert recent.get(prompts[8]) == [8]
