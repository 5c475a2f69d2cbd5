"""Answers are taken apart without repairing anything, and what is wrong with them is named with its place."""

from __future__ import annotations

import pytest

from actors.gateway.parsing import Flaw, Parsed, ToolCall, message_of, names_of, parse

GOOD = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def kinds(parsed: Parsed) -> list[tuple[str, int]]:
    return [(flaw.kind, flaw.at) for flaw in parsed.flaws]


def test_plain_text_is_content_to_the_letter():
    assert parse(" hi\n", ["f"]) == Parsed(" hi\n")


def test_thinking_calls_and_content_are_told_apart():
    parsed = parse(f"<think>\nhm\n</think>\n\nLook: {GOOD}{GOOD} done", ["f"])
    assert parsed == Parsed("Look:  done", "hm", (ToolCall("f", '{"x": 1}'),) * 2)
    assert message_of(parsed) == {
        "role": "assistant",
        "content": "Look:  done",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": f"call_{k}", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
            for k in range(2)
        ],
    }


def test_calls_are_left_alone_unless_tools_are_offered():
    assert parse(GOOD) == Parsed(GOOD)


def test_arguments_may_be_left_out_and_keep_their_letters():
    assert parse('<tool_call>{"name": "f"}</tool_call>', ["f"]).tool_calls == (ToolCall("f", "{}"),)
    text = '<tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call>'
    assert parse(text, ["f"]).tool_calls == (ToolCall("f", '{"x": "é"}'),)


@pytest.mark.parametrize(
    ("block", "what"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON object is due, not list"),
        ('{"arguments": {}}', "name is None"),
        ('{"name": ""}', "name is ''"),
        ('{"name": "f", "arguments": "x"}', "arguments of 'f' are str"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', "name or arguments of 'f' have half a character"),
        ('{"name": "f", "arguments": {"x": NaN}}', "arguments of 'f' are not JSON"),
        ("[" * 100_000, "not JSON that can be read"),
    ],
)
def test_a_broken_call_stays_in_the_content_and_is_named(block: str, what: str):
    text = f"ab <tool_call>{block}</tool_call> {GOOD}"
    parsed = parse(text, ["f"])
    assert parsed.tool_calls == (ToolCall("f", '{"x": 1}'),)
    assert f"<tool_call>{block}</tool_call>" in parsed.content
    assert kinds(parsed) == [("invalid_tool_call", 3)]
    assert parsed.flaws[0].what.startswith(what)


def test_a_tool_that_was_not_offered_is_passed_on_and_named():
    parsed = parse(GOOD, ["g"])
    assert [call.name for call in parsed.tool_calls] == ["f"]
    assert parsed.flaws == (Flaw("invalid_tool_call", 0, "no tool 'f' was offered, only g"),)


@pytest.mark.parametrize("text", ["ab <tool_call>{", "ab </tool_call>"])
def test_half_a_call_is_named(text: str):
    parsed = parse(text, ["f"])
    assert (parsed.content, kinds(parsed)) == (text, [("invalid_tool_call", 3)])


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content", "at"),
    [
        ("<think>hm", False, "hm", "", [7]),
        ("hm", True, "hm", "", [0]),
        ("hm</think>ok", False, "hm", "ok", [2]),
        ("ok <think>hm</think>", False, "ok <think>hm", "", [3, 12]),
        ("ok <think>hm", False, None, "ok <think>hm", [3]),
        ("<think>a<think>b</think>ok", False, "a<think>b", "ok", [8]),
        ("<think>a</think>ok</think>", False, "a", "ok</think>", [18]),
        ("<think>a</think>ok", True, "a", "ok", [0]),
    ],
)
def test_thinking_tags_that_do_not_pair_up_are_named(
    text: str, opened: bool, reasoning: str | None, content: str, at: list[int]
):
    parsed = parse(text, ["f"], opened)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)
    assert kinds(parsed) == [("malformed_thinking", place) for place in at]


def test_thinking_that_the_prompt_opened_is_well_formed():
    assert parse("hm</think>\n\nok", [], thinking=True) == Parsed("ok", "hm")


def test_only_named_functions_can_be_offered():
    assert names_of([{"type": "function", "function": {"name": "f"}}]) == ["f"]
    assert names_of([]) is None
    for tool in ({"type": "web_search"}, {"type": "function"}, {"type": "function", "function": {}}):
        with pytest.raises(ValueError, match="can't be offered"):
            names_of([tool])
