"""Loading a producer by its registered name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from actors.environments import loading
from actors.environments.loading import ProducerError, is_multi_turn, load
from contracts.producer import CONTRACT_VERSION, GROUP, Outcome, Session, Task


class Chat:
    """A multi-turn producer."""

    contract = CONTRACT_VERSION

    def __init__(self, level: int = 1) -> None:
        if level > 9:
            raise ValueError("level is 1 to 9")
        self.level = level

    async def tasks(self, cursor: str | None, seed: int, split: str) -> AsyncIterator[Task]:
        yield Task(id="t", payload={}, cursor="1")

    async def rollout(self, task: Task, session: Session) -> Outcome:
        return Outcome(reward=1.0)


class Old(Chat):
    contract = CONTRACT_VERSION - 1


class Half:
    contract = CONTRACT_VERSION

    def prompt(self, task: Task) -> str:
        return ""


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    here = "tests.unit.environments.test_loading"
    registered = {
        "chat": f"{here}:Chat",
        "old": f"{here}:Old",
        "half": f"{here}:Half",
        "absent": "no_such_module:X",
        "misspelt": f"{here}:Chatt",
    }
    points = [EntryPoint(name, value, GROUP) for name, value in registered.items()]
    points += [EntryPoint("twice", value, GROUP) for value in (f"{here}:Chat", f"{here}:Half", f"{here}:Half")]
    monkeypatch.setattr(loading, "entry_points", lambda group: EntryPoints(points).select(group=group))


def test_a_registered_producer_is_constructed_with_the_recipes_arguments() -> None:
    producer: Any = load("chat", {"level": 3})
    assert producer.level == 3
    assert is_multi_turn(producer)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("chess", {}, r"'chess' is not registered .* known: absent, chat, half, misspelt, old, twice\."),
        ("twice", {}, r"registered more than once: .*:Chat, .*:Half"),
        ("absent", {}, "can't be imported: No module named 'no_such_module'"),
        ("misspelt", {}, "can't be imported: .*Chatt"),
        ("chat", {"colour": 1}, "'chat' has no setting 'colour'. It takes: level"),
        ("chat", {"levle": 1}, "no setting 'levle', did you mean 'level'. It takes"),
        ("chat", {"level": "high"}, "refuses producer.args={'level': 'high'}: TypeError"),
        ("chat", {"level": 10}, "refuses producer.args={'level': 10}: level is 1 to 9"),
        ("old", {}, f"states contract={CONTRACT_VERSION - 1}, this version speaks {CONTRACT_VERSION}"),
        ("half", {}, r"'half' \(Half\) needs `tasks` and either"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_name_and_the_reason(
    name: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProducerError, match=message):
        load(name, args)


def test_without_any_registration_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "entry_points", lambda group: EntryPoints())
    with pytest.raises(ProducerError, match="known: none"):
        load("x", {})
