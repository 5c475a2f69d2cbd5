"""Flaws are counted, placed, and penalised or masked by rule; the environment's own verdict is kept otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from actors.collector.grading import graded
from actors.gateway.client import Divergence
from actors.gateway.parsing import Flaw
from config.loading import ConfigError, load
from config.schema import RolloutConfig
from contracts.producer import Outcome

CALL = (2, Flaw("invalid_tool_call", 5, "not JSON"))
THOUGHT = (1, Flaw("malformed_thinking", 0, "no </think>"))
FOUND = Outcome(reward=0.5, components={"exact": 1.0}, info={"a": "b"})


def test_a_flawless_outcome_is_left_alone():
    assert graded(FOUND, [], ["fine"], None, RolloutConfig(invalid_tool_calls="mask")) == FOUND


@pytest.mark.parametrize(
    ("rules", "reward", "mask"),
    [
        ({}, 0.5, None),
        ({"invalid_tool_calls": "penalise"}, -0.5, None),
        ({"invalid_tool_calls": "penalise", "malformed_thinking": "penalise", "flaw_penalty": 0.25}, 0.0, None),
        ({"malformed_thinking": "mask"}, 0.5, "malformed_thinking: turn 1, character 0: no </think>"),
    ],
)
def test_flaws_cost_what_their_rule_says_once_a_kind(rules: Any, reward: float, mask: str | None):
    found = graded(FOUND, [THOUGHT, CALL, CALL], ["", ""], None, RolloutConfig(**rules))
    assert (found.reward, found.mask) == (reward, mask)
    assert found.components == {"exact": 1.0, "invalid_tool_calls": 2.0, "malformed_thinking": 1.0}
    assert found.info["invalid_tool_calls"] == "turn 2, character 5: not JSON"


def test_text_in_no_form_is_counted_and_costs_what_its_rule_says():
    flaw = Flaw("malformed_answer", 4, "'oops' is in no field of the template")
    found = graded(FOUND, [(1, flaw)], [""], None, RolloutConfig(malformed_answer="penalise", flaw_penalty=2.0))
    assert (found.reward, found.components["malformed_answer"]) == (-1.5, 1.0)
    assert graded(FOUND, [(1, flaw)], [""], None, RolloutConfig(malformed_answer="mask")).mask is not None


def test_the_environments_own_mask_is_kept():
    masked = Outcome(reward=0.0, mask="cheated")
    assert graded(masked, [CALL], [], None, RolloutConfig(invalid_tool_calls="mask")).mask == "cheated"


def test_patterns_mark_answers_as_invalid_tool_calls():
    rules = RolloutConfig(invalid_tool_calls="penalise", invalid_tool_call_patterns=(r"<function=\w+",))
    found = graded(FOUND, [], ["fine", "ab <function=f <function=g"], None, rules)
    assert (found.reward, found.components["invalid_tool_calls"]) == (-0.5, 2.0)
    assert found.info["invalid_tool_calls"].startswith("turn 2, character 3")


def test_a_divergence_that_was_survived_is_counted_with_its_place():
    found = graded(FOUND, [], [], Divergence(3, 4, 5, 60, "gone"), RolloutConfig(noncontiguous="truncate"))
    assert found.components["noncontiguous"] == 1.0
    assert "turn 3" in found.info["noncontiguous"]
    assert "token 60" in found.info["noncontiguous"]


def test_a_pattern_that_is_none_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"rollout.invalid_tool_call_patterns: '\(' is no regular expression"):
        load("quickstart", ["rollout.invalid_tool_call_patterns=['(']"])
