"""A pytest kit for plug-ins: what producers and samplers run in their own continuous integration.

    pytest_plugins = ["pipeline.testing"]          # conftest.py

    class TestMine(ProducerContract):               # from pipeline.testing import ProducerContract
        def make(self):
            return Mine(limit=5)

Every test makes a producer of its own, and ends after `DEADLINE_S`. The fixture `scripted` makes sessions with a policy
that says what you tell it, for tests of your own. `check_sampler(sampler)` holds a sampler to `contracts.sampler`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from actors.buffer.kit import check_sampler
from actors.environments import kit
from actors.environments.kit import ScriptedSession

__all__ = ["ProducerContract", "ScriptedSession", "check_sampler", "scripted"]

DEADLINE_S = 60.0
"""Longest that one check may take."""


class ProducerContract:
    """Subclass it as `Test...` and say how to `make` the producer; the tests below are then yours."""

    def make(self) -> Any:
        """A new producer, as a recipe would construct it."""
        raise NotImplementedError("make() must answer a producer")

    def test_it_states_its_contract(self) -> None:
        self._check(kit.states_its_contract)

    def test_it_yields_tasks(self) -> None:
        self._check(kit.yields_tasks)

    def test_the_same_seed_gives_the_same_tasks(self) -> None:
        self._check(kit.repeats_itself)

    def test_it_resumes_behind_any_cursor(self) -> None:
        self._check(kit.resumes)

    def test_it_keeps_evaluation_apart(self) -> None:
        self._check(kit.keeps_evaluation_apart)

    def test_any_answer_gets_a_finite_reward(self) -> None:
        self._check(kit.scores_anything)

    def _check(self, check: Callable[[Any], Awaitable[None]]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(DEADLINE_S):
                made = self.make()
                await check(await made if inspect.isawaitable(made) else made)

        asyncio.run(bounded())


@pytest.fixture
def scripted() -> Callable[..., ScriptedSession]:
    """`scripted("first answer", "second answer")`: a session for `rollout`; `.asked` holds what was asked."""
    return ScriptedSession
