"""Answers of any family are taken apart by its response template; what can't be read is named and stays."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.gateway.answers import FAMILIES, PIECE, load, template_of
from actors.gateway.chat import Ask, Served
from actors.gateway.client import Generated, Sample, Span
from actors.gateway.openai import ChatForm, ResponsesForm
from actors.gateway.parsing import Parsed, ToolCall
from actors.gateway.reading import Following, read
from actors.gateway.serving import Live
from actors.gateway.streams import ChatStream, ResponsesStream
from actors.gateway.templates import Template, TemplateError
from actors.gateway.tokens import Tokens
from actors.gateway.upstream import Draft, Job
from config.schema import RolloutConfig, RunConfig
from pipeline import preflight
from pipeline.errors import PipelineError
from tests.unit.gateway.agents import Front, write_chat_model

HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    }
]
CALL = (ToolCall("look", '{"x": 1}'),)


def shipped(name: str, specials: Sequence[str] = ()) -> Template:
    found = template_of(name, specials=specials)
    assert found is not None
    return found


GPT = shipped("gpt-oss", HARMONY)
GPT_CALL = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}<|call|>"


def gpt(call: str) -> str:
    return f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{GPT_CALL.replace('{}', call)}"


def kinds(parsed: Parsed) -> list[str]:
    return [flaw.kind for flaw in parsed.flaws]


# --- families --------------------------------------------------------------------------------------------------------

WHOLE = {
    "gpt-oss": (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        '<|start|>assistant to=functions.look<|channel|>commentary <|constrain|>json<|message|>{"x": 1}<|call|>'
    ),
    "gemma-4": "<|channel>thought\nhm<channel|>Wait.<|tool_call>call:look{x:1}<tool_call|><|tool_response>",
    "qwen3.5": (
        "<think>\nhm\n</think>\n\nWait.\n\n<tool_call>\n<function=look>\n<parameter=x>\n1\n</parameter>\n</function>\n"
        "</tool_call><|im_end|>"
    ),
    "deepseek-v3.1": (
        '<think>hm</think>Wait.<|tool_calls_begin|><|tool_call_begin|>look<|tool_sep|>{"x": 1}<|tool_call_end|>'
        "<|tool_calls_end|><|end_of_sentence|>"
    )
    .replace("|", chr(0xFF5C))
    .replace("_", chr(0x2581)),
}


@pytest.mark.parametrize("name", sorted(path.stem for path in FAMILIES.glob("*.json")))
def test_a_shipped_template_reads_thinking_calls_and_content_of_its_family(name: str):
    assert read(shipped(name), WHOLE[name], "", TOOLS) == Parsed("Wait.", "hm", CALL)


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_cut_anywhere_an_answer_loses_nothing_and_only_its_end_is_blamed(name: str):
    template, text = shipped(name, HARMONY), WHOLE[name]
    for size in range(len(text)):
        parsed = read(template, text[:size], "", TOOLS)
        if text[:size].count("hm") and parsed.reasoning is None:
            assert "hm" in parsed.content
        assert len(parsed.flaws) <= 1, (text[:size], parsed)
        assert parsed.tool_calls in ((), CALL)


def test_a_prompt_that_opened_thinking_is_known_and_its_own_text_is_not_the_answers():
    qwen = shipped("qwen3.5")
    assert read(qwen, "hm</think>ok", "<think>\n", None) == Parsed("ok", "hm")
    assert read(qwen, "ok", "<think>\n\n</think>\n\n", None) == Parsed("ok")
    assert read(qwen, "ok", "said before ", None) == Parsed("ok")
    broken = "<tool_call><function=look></function></tool_call>"
    assert read(qwen, "ok", broken, TOOLS) == Parsed("ok")
    assert read(GPT, "<|channel|>final<|message|>ok", gpt("{"), TOOLS) == Parsed("ok")


def test_what_follows_a_call_is_kept_where_the_parser_would_let_it_replace_what_came_before():
    gemma = shipped("gemma-4")
    text = "a <|tool_call>call:look{x:1}<tool_call|> b <|tool_call>call:look{x:1}<tool_call|>"
    assert read(gemma, text, "", TOOLS) == Parsed("a  b", None, CALL * 2)


def test_without_tools_calls_are_content_and_nobodys_fault():
    parsed = read(GPT, gpt("{"), "", None)
    assert parsed == Parsed(GPT_CALL.replace("{}", "{"), "hm")
    qwen = WHOLE["qwen3.5"]
    parsed = read(shipped("qwen3.5", ["<|im_end|>"]), qwen, "", None)
    assert (parsed.content, parsed.flaws) == (qwen[qwen.index("Wait") : -len("<|im_end|>")], ())


# --- what is malformed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "what"),
    [
        ("{", "can't be read: Expecting"),
        ("[1]", "can't be read: arguments of 'look' are list, an object is due"),
        ('{"x": "\\ud800"}', "can't be read: name or arguments of 'look' have half a character"),
        ('{"x": NaN}', "can't be read: arguments of 'look' are not JSON"),
        ("[" * 100_000, "can't be read: maximum recursion depth"),
    ],
)
def test_a_call_that_cannot_be_read_stays_in_the_content_and_those_behind_it_are_read(call: str, what: str):
    parsed = read(GPT, gpt(call) + GPT_CALL.replace("{}", '{"x": 1}'), "", TOOLS)
    assert (parsed.tool_calls, parsed.reasoning, kinds(parsed)) == (CALL, "hm", ["invalid_tool_call"])
    assert parsed.content == GPT_CALL.replace("{}", call)
    assert parsed.flaws[0].at == gpt(call).index("<|channel|>commentary")
    assert parsed.flaws[0].what.startswith(what)


@pytest.mark.parametrize(
    ("name", "lost"), [("gpt-oss", "<|call|>"), ("qwen3.5", "</function>\n</tool_call><|im_end|>")]
)
def test_a_call_that_is_never_closed_is_not_closed_for_the_policy(name: str, lost: str):
    text = WHOLE[name].removesuffix(lost)
    parsed = read(shipped(name), text, "", TOOLS)
    assert (parsed.tool_calls, kinds(parsed)) == ((), ["invalid_tool_call"])
    assert parsed.content.startswith("Wait.")
    assert '"x": 1' in parsed.content or "<parameter=x>" in parsed.content
    assert parsed.flaws[0].what == "can't be read: it is never closed"


def test_a_tool_that_was_not_offered_is_passed_on_and_named():
    parsed = read(GPT, gpt('{"x": 1}').replace("look", "jump"), "", TOOLS)
    assert parsed.tool_calls == (ToolCall("jump", '{"x": 1}'),)
    assert parsed.flaws[0].what == "no tool 'jump' was offered, only look"


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "at"),
    [
        ("<think>hm", "", "hm", [0]),
        ("ok</think>", "ok</think>", None, [2]),
        ("<think>a<think>b</think>ok", "ok", "a<think>b", [8]),
        ("<think>a</think>b<think>c</think>", "b", "ac", [17]),
    ],
)
def test_thinking_that_does_not_pair_up_is_named(text: str, content: str, reasoning: str | None, at: list[int]):
    parsed = read(shipped("qwen3.5"), text, "", TOOLS)
    assert (parsed.content, parsed.reasoning) == (content, reasoning)
    assert [(flaw.kind, flaw.at) for flaw in parsed.flaws] == [("malformed_thinking", place) for place in at]


def test_text_in_no_field_is_kept_and_named_and_what_marks_a_turn_is_not():
    text = "so<|channel|>final<|message|>ok<|end|><|start|>assistant oops <|channel|>final<|message|>!<|return|>"
    parsed = read(GPT, text, "", TOOLS)
    assert parsed.content == "so\nok\n oops \n!".replace("\n oops \n", "\noops\n")
    assert [(flaw.kind, flaw.at) for flaw in parsed.flaws] == [("malformed_answer", 0), ("malformed_answer", 57)]


def test_a_field_that_is_required_and_missing_is_named():
    spec = {"start_anchor": "x", "fields": {"thinking": {"open": "(", "close": ")", "optional": False}, "content": {}}}
    assert kinds(read(Template(spec), "(a)b", "", None)) == []
    parsed = read(Template(spec), "b", "", None)
    assert (parsed.content, parsed.flaws[0].what) == ("b", "no thinking, which the template requires")
    assert kinds(parsed) == ["malformed_answer"]


def test_half_a_call_in_the_content_is_named_and_in_thinking_it_is_not():
    parsed = read(shipped("gemma-4"), "<|channel>thought\n<tool_call|><channel|>a<tool_call|>", "", TOOLS)
    assert (parsed.content, parsed.reasoning) == ("a<tool_call|>", "<tool_call|>")
    assert [(flaw.kind, flaw.at) for flaw in parsed.flaws] == [("invalid_tool_call", 41)]


# --- streams ---------------------------------------------------------------------------------------------------------

PIECES = {
    "gpt-oss": ["<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", "<|start|>assistant",
                GPT_CALL, GPT_CALL.replace("{}", "{"), "<|call|>", "a", " b", "\n", "<|return|>"],
    "qwen3.5": ["<think>", "</think>", "<tool_call><function=look>", "<parameter=x>1</parameter>", "</function>",
                "</tool_call>", "a", " b", "\n", "<|im_end|>"],
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(PIECES)), st.data(), st.booleans())
def test_what_is_shown_early_is_certain_and_adds_up_to_the_answer(name: str, data: Any, offer: bool):
    pieces = data.draw(st.lists(st.sampled_from(PIECES[name]), max_size=8))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    text, tools = "".join(pieces), TOOLS if offer else None
    tokens = re.findall("|".join(map(re.escape, HARMONY)) + r"|<\|im_end\|>|.", text, re.DOTALL)
    template = shipped(name, [*HARMONY, "<|im_end|>"])
    whole = read(template, text, "", tools)
    following, at = Following(template, "", tools), 0
    while at < len(tokens):
        size = sizes[at % len(sizes)]
        now = following.more("".join(tokens[at : at + size]))
        at += size
        assert whole.content.startswith(now.content)
        assert (whole.reasoning or "").startswith(now.reasoning or "")
    end = following.end(whole)
    assert (end.content, end.reasoning) == (whole.content, whole.reasoning)


def test_text_is_shown_as_it_comes_and_nothing_behind_a_call_that_cannot_be_read():
    following = Following(shipped("gemma-4"), "", TOOLS)
    assert following.more("<|channel>thought\nh").reasoning == "h"
    assert following.more("m<channel|>a <|tool").content == "a"
    assert following.more("_call>call:look{x:1}<tool_call|>b").content == "a b"
    assert following.more("<|tool_call>call:look{").content == "a b"
    assert following.more("<tool_call|>c").content == "a b"
    assert following.more("d").content == "a b"


# --- what can be used ------------------------------------------------------------------------------------------------

TEXT = {"content": {}}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ([], "transformers refuses it: response_template must be a dict, got list"),
        ({"fields": TEXT}, "transformers refuses it: response_template must define 'start_anchor'"),
        ({"start_anchor": "x", "fields": {"content": {"open_pattern": "("}}}, "invalid open_pattern regex"),
        ({"start_anchor": "x", "fields": {"content": {"open_pattern": 5}}}, "transformers refuses it"),
        ({"start_anchor": "x", "fields": {"contents": {}}}, "fields.contents: agents read content"),
        ({"start_anchor": "x", "fields": {"thinking": {"open": "("}}}, "fields.content is missing"),
        ({"start_anchor": "x", "fields": {"thinking": {}}}, "only content can be what is outside"),
        ({"start_anchor": "x", "fields": {"content": {"content": "json"}}}, "fields.content: it is text"),
        ({"start_anchor": "x", "fields": {"content": {"content_args": []}}}, "content_args is list"),
    ],
)
def test_a_template_that_no_agent_could_use_is_refused_by_its_part(spec: Any, says: str):
    with pytest.raises(TemplateError, match=says.replace("(", r"\(").replace("[", r"\[")):
        Template(spec)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"content": "xml-inline"}, "content_args.tag_pattern: "),
        ({"content": "xml-inline", "content_args": {"tag_pattern": "(?P<key>a)"}}, "needs the groups"),
        ({"content": "json", "transform": {"function": {"name": "{nme}"}}}, "there is no {nme}, only content"),
    ],
)
def test_a_template_that_would_blame_every_call_is_refused(field: Any, says: str):
    with pytest.raises(TemplateError, match=f"fields.tool_calls: .*{says}"):
        Template({"start_anchor": "x", "fields": {**TEXT, "tool_calls": {"open": "<", "close": ">", **field}}})


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "it can't be read: No such file"), ("{", "it is not JSON"), ("{}", "transformers refuses it")],
)
def test_a_file_that_is_no_template_is_refused_before_anything_starts(tmp_path: Path, text: str | None, says: str):
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_text(text)
    config = RunConfig(rollout=RolloutConfig(response_template="mine.json"))
    config = preflight.absolute(config, tmp_path)
    assert config.rollout.response_template == str(path)
    with pytest.raises(PipelineError) as refused:
        preflight._answers(config)
    message = str(refused.value)
    assert message.startswith(f"rollout.response_template={path}: {says}")
    assert "give auto, hermes, one of deepseek-v3.1, " in message


def test_the_template_of_the_howto_reads_what_it_is_for():
    page = (Path(__file__).parents[3] / "docs/howto/response-templates.md").read_text()
    spec = json.loads(page[page.index("\n    {\n") : page.index("\n    }\n") + 7])
    text = '<thought>hm</thought>ok<call>look{"x": 1}</call></s>'
    assert read(Template(spec, ["</s>"]), text, "", TOOLS) == Parsed("ok", "hm", CALL)


def test_a_name_that_is_not_shipped_is_refused():
    with pytest.raises(TemplateError, match=r"rollout.response_template=gpt: no family has this name; give .*gpt-oss"):
        template_of("gpt")
    assert template_of("auto") is None
    assert template_of("hermes") is None


# --- through the gateway ---------------------------------------------------------------------------------------------


def harmony(directory: Path, model_type: str, **settings: Any) -> Tokens:
    """A model whose template begins answers as gpt-oss has them."""
    write_chat_model(directory, specials=HARMONY)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    path = directory / "tokenizer_config.json"
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template, **settings}))
    return Tokens(directory)


class Says:
    """Answers every job with a text, a token at a time if it is followed."""

    def __init__(self, tokens: Tokens, text: str) -> None:
        self.ids: list[int] = tokens._tokenizer.encode(text, add_special_tokens=False).ids
        self.tokens = tokens
        self.jobs: list[Job] = []

    async def whole(self, job: Job) -> Generated:
        self.jobs.append(job)
        spans = [Span(0, len(self.ids), 7, "engine-0", 1)]
        sample = Sample(self.ids, [-1.0] * len(self.ids), spans, "stop", self.tokens.text(self.ids))
        return Generated(job.prompt_ids, [sample], 0.0)

    async def streamed(self, job: Job, live: Live) -> Generated:
        draft = Draft()
        live.drafts = [draft]
        draft.ids, draft.logprobs = self.ids[:20], [-1.0] * 20
        live.news.set()
        return await self.whole(job)


HI = [{"role": "user", "content": "hi"}]
ASKED = {"messages": HI, "tools": TOOLS}
URL = "/v1/chat/completions"


async def test_a_familys_answers_are_taken_apart_and_its_tokens_kept(tmp_path: Path):
    tokens = harmony(tmp_path, "gpt_oss")
    says = Says(tokens, WHOLE["gpt-oss"])
    async with Front(tokens, says.whole, says.streamed, load("auto", tokens)) as front:
        await front.open("e")
        message = await front.chat("e", **ASKED)
        assert (message["content"], message["reasoning_content"]) == ("Wait.", "hm")
        assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"x": 1}'}
        messages = [*ASKED["messages"], message, {"role": "tool", "content": "3"}]
        await front.chat("e", messages, tools=TOOLS)
        prompt = says.jobs[1].prompt_ids
        assert prompt[: len(says.jobs[0].prompt_ids) + len(says.ids)] == says.jobs[0].prompt_ids + says.ids
        async with front.http.post(front.url + URL, json={**ASKED, "stream": True}) as response:
            lines = [line for line in (await response.text()).split("\n\n") if line.startswith("data: {")]
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "Wait."
    assert [c["function"]["name"] for delta in deltas for c in delta.get("tool_calls", ())] == ["look"]
    assert deltas[-1]["generation_token_ids"] == says.ids


async def test_thinking_behind_content_is_told_by_chat_and_left_out_of_responses_whose_items_are_in_order(
    tmp_path: Path,
):
    tokens = harmony(tmp_path, "gpt_oss")
    answers = load("auto", tokens)
    thought = "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
    first = f"<|channel|>commentary<|message|>Wait.<|end|>{thought}"
    says = Says(tokens, f"{first}<|start|>assistant<|channel|>final<|message|>ok<|return|>")
    job = Job("s", tokens._tokenizer.encode("<|start|>assistant").ids, 1, 1.0, 99, None, (), 0.0)
    generated = await says.whole(job)
    begun = await answers.begun(job.prompt_ids)
    whole = [await answers.parsed(begun, generated.samples[0], None)]
    assert whole == [Parsed("Wait.\nok", "hm")]
    served = Served(
        prompt_ids=job.prompt_ids, samples=generated.samples, answers=whole, held_s=0.0, turn=1, asked=Ask(messages=HI)
    )
    told = []
    for stream in (ChatStream(ChatForm(messages=HI)), ResponsesStream(ResponsesForm(input="hi"))):
        live, draft = Live(), Draft()
        live.follow = partial(answers.follow, begun, None)
        live.drafts = [draft]
        for size in (18, 45, len(says.ids)):
            draft.ids = says.ids[:size]
            told += stream.news(live)
        told += stream.end(served, live)
    deltas = [event["choices"][0]["delta"] for event in told if "choices" in event]
    assert "".join(delta.get("content", "") for delta in deltas) == "Wait.\nok"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    events = [event for event in told if "type" in event]
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == "Wait.\nok"
    assert not [e for e in events if "reasoning" in e["type"]]
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "Wait.\nok")


async def test_the_tokenizers_own_template_is_taken_and_a_prompt_that_begins_no_answer_has_nothing_of_it(
    tmp_path: Path,
):
    mine = {"start_anchor": "<|start|>assistant", "fields": {"thinking": {"open": "<", "close": ">"}, "content": {}}}
    tokens = harmony(tmp_path, "gpt_oss", response_template=mine)
    answers = load("auto", tokens)
    says = Says(tokens, "a>b")
    sample = (await says.whole(Job("s", [1], 1, 1.0, 9, None, (), 0.0))).samples[0]
    ids = tokens._tokenizer.encode("<|start|>assistant<" + "a" * 100, add_special_tokens=False).ids
    assert await answers.parsed(await answers.begun(ids), sample, None) == Parsed("b", "a")
    assert (await answers.parsed(await answers.begun(ids[2:]), sample, None)).content == "a>b"
    hermes = load("hermes", tokens)
    assert await hermes.parsed(await hermes.begun(ids), sample, None) == Parsed("a>b")


@pytest.mark.parametrize("length", [10, 63, 2000, 3 * PIECE, 3 * PIECE + 5])
@pytest.mark.parametrize("anchored", [True, False])
async def test_a_long_prompt_is_read_in_pieces_between_which_others_get_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, anchored: bool
):
    tokens = harmony(tmp_path, "gpt_oss")
    answers = load("auto", tokens)
    text = ("<|start|>assistant" if anchored else "") + "<|channel|>analysis<|message|>" + "ab<|end|>" * (length // 3)
    prompt = tokens._tokenizer.encode(text, add_special_tokens=False).ids
    largest, raw, turns = 0, tokens.raw, 0

    def watched(ids: Any) -> str:
        nonlocal largest
        largest = max(largest, len(ids))
        return raw(ids)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(tokens, "raw", watched)
    task = asyncio.create_task(others())
    assert await answers.begun(prompt) == (text.removeprefix("<|start|>assistant") if anchored else "")
    task.cancel()
    assert largest <= 2 * PIECE
    assert turns >= (len(prompt) // PIECE if len(prompt) > PIECE else 0)


def test_a_tokenizer_whose_template_cannot_be_used_is_named(tmp_path: Path):
    tokens = harmony(tmp_path, "llama", response_template={"fields": {}})
    with pytest.raises(TemplateError, match=r"rollout.response_template=auto: response_template in .*fields"):
        load("auto", tokens)


async def test_a_malformed_call_is_an_answer_and_recorded_with_its_reason(tmp_path: Path):
    tokens = harmony(tmp_path, "gpt_oss")
    says = Says(tokens, gpt("{"))
    async with Front(tokens, says.whole, says.streamed, load("auto", tokens)) as front:
        await front.open("e")
        assert "tool_calls" not in await front.chat("e", **ASKED)
        (turn,) = (await front.finish("e"))["turns"]
        status, body = await front.post(
            "/generate", {"session": "s", "input_ids": [3], "parse": True, "tools": TOOLS,
                          "sampling": {"temperature": 1.0, "max_new_tokens": 99}},
        )  # fmt: skip
    assert [flaw["kind"] for flaw in turn["flaws"]] == ["invalid_tool_call"]
    assert turn["flaws"][0]["what"].startswith("can't be read: Expecting")
    assert (status, body["samples"][0]["parsed"]["flaws"]) == (200, turn["flaws"])
