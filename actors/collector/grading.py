"""What malformed answers and left-off conversations do to the outcome of a rollout."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from actors.gateway.client import Divergence
from actors.gateway.parsing import Flaw
from actors.gateway.sessions import describe
from config.schema import RolloutConfig
from contracts.producer import Outcome


def graded(
    outcome: Outcome,
    flaws: Sequence[tuple[int, Flaw]],
    texts: Sequence[str],
    diverged: Divergence | None,
    rules: RolloutConfig,
) -> Outcome:
    """`outcome` with its flaws counted among the components, and penalised or masked as `rules` say.

    `flaws`: turn (from 1) and flaw. `texts`: the answer of each turn, special tokens in it. The place of the first flaw
    of a kind, and of a divergence, is told in `info`.
    """
    found = [*flaws, *_patterned(texts, rules.invalid_tool_call_patterns)]
    components, info = dict(outcome.components), dict(outcome.info)
    reward, mask = outcome.reward, outcome.mask
    for kind, name, rule in (
        ("invalid_tool_call", "invalid_tool_calls", rules.invalid_tool_calls),
        ("malformed_thinking", "malformed_thinking", rules.malformed_thinking),
        ("malformed_answer", "malformed_answer", rules.malformed_answer),
    ):
        places = [f"turn {turn}, character {flaw.at}: {flaw.what}" for turn, flaw in found if flaw.kind == kind]
        if not places:
            continue
        components[name] = float(len(places))
        info[name] = places[0][:300]
        if rule == "penalise":
            reward -= rules.flaw_penalty
        elif rule == "mask":
            mask = mask or f"{name}: {places[0]}"[:300]
    if diverged is not None:
        components["noncontiguous"] = 1.0
        info["noncontiguous"] = describe(diverged)[:300]
    return msgspec.structs.replace(outcome, reward=reward, components=components, mask=mask, info=info)


def _patterned(texts: Sequence[str], patterns: Sequence[str]) -> list[tuple[int, Flaw]]:
    return [
        (turn, Flaw("invalid_tool_call", match.start(), f"matches {pattern!r}"))
        for turn, text in enumerate(texts, 1)
        for pattern in patterns
        for match in re.finditer(pattern, text)
    ]
