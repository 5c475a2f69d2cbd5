"""`pipeline new producer NAME`: a package that works, to be changed into yours."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from pipeline.errors import Exit, PipelineError

_NAME = re.compile(r"[a-z][a-z0-9_]{0,49}")

PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "@DIST@"
version = "0.1.0"
description = "An environment for Sluice."
requires-python = ">=3.11"
dependencies = ["msgspec>=0.19"]

[project.optional-dependencies]
test = ["pytest>=8", "sluice-rl"]

[project.entry-points."sluice.producers"]
@NAME@ = "@NAME@:@CLASS@"

[tool.setuptools.packages.find]
where = ["src"]

[tool.pytest.ini_options]
testpaths = ["tests"]
"""

SINGLE = '''\
"""@CLASS@: additions, scored by their sum. Change it into your environment."""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random

from contracts.producer import CONTRACT_VERSION, DataError, Outcome, Task


class @CLASS@:
    """Two numbers below `limit` to add. Constructed with the recipe's producer.args."""

    contract = CONTRACT_VERSION

    def __init__(self, limit: int = 20) -> None:
        if limit < 2:
            raise ValueError(f"limit={limit}: at least 2 is due")
        self.limit = limit

    async def tasks(self, cursor: str | None, seed: int, split: str) -> AsyncIterator[Task]:
        """Tasks for ever, from behind `cursor`; a function of seed and split, so that a resumed run skips nothing."""
        number = int(cursor or 0)
        while True:
            draw = Random(f"{split}/{seed}/{number}")
            payload = {"a": draw.randrange(self.limit), "b": draw.randrange(self.limit)}
            yield Task(id=f"@NAME@-{split}-{seed}-{number}", payload=payload, cursor=str(number + 1))
            number += 1

    def prompt(self, task: Task) -> str:
        """What the policy reads: text, or a list of chat messages."""
        return f"{task.payload['a']} + {task.payload['b']} ="

    def score(self, task: Task, completion: str) -> Outcome:
        """A number, or an `Outcome` with named components. It may block: it runs in a thread, under a deadline."""
        if "a" not in task.payload:
            raise DataError("no operands: this task can never be used")
        words = completion.split()
        exact = float(bool(words) and words[0] == str(task.payload["a"] + task.payload["b"]))
        return Outcome(reward=exact, components={"exact": exact})
'''

MULTI = '''\
"""@CLASS@: a number to be guessed, with hints. Change it into your environment."""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random
from typing import Any

from contracts.producer import CONTRACT_VERSION, Outcome, Session, Task


class @CLASS@:
    """A number below `limit`, to be found in `turns` guesses. Constructed with the recipe's producer.args."""

    contract = CONTRACT_VERSION

    def __init__(self, limit: int = 20, turns: int = 5) -> None:
        if limit < 2 or turns < 1:
            raise ValueError(f"limit={limit}, turns={turns}: at least 2 and 1 are due")
        self.limit, self.turns = limit, turns

    async def tasks(self, cursor: str | None, seed: int, split: str) -> AsyncIterator[Task]:
        """Tasks for ever, from behind `cursor`; a function of seed and split, so that a resumed run skips nothing."""
        number = int(cursor or 0)
        while True:
            secret = Random(f"{split}/{seed}/{number}").randrange(self.limit)
            yield Task(id=f"@NAME@-{split}-{seed}-{number}", payload={"secret": secret}, cursor=str(number + 1))
            number += 1

    async def rollout(self, task: Task, session: Session) -> Outcome:
        """One episode. Append `answer.message` as it is: its tokens are kept behind the conversation.

        An agent that speaks OpenAI's API gets `await session.endpoint()` instead.
        """
        secret = task.payload["secret"]
        asked = f"Guess a number from 0 to {self.limit - 1}. Answer with the number alone."
        messages: list[dict[str, Any]] = [{"role": "user", "content": asked}]
        for turn in range(1, self.turns + 1):
            answer = await session.chat(messages)
            guess = answer.text.strip()
            if guess == str(secret):
                return Outcome(reward=1.0 / turn, components={"found": 1.0, "turns": float(turn)})
            higher = guess.isascii() and guess.isdigit() and int(guess[:9]) < secret
            hint = "It is higher." if higher else "It is lower, or that was no number."
            messages += [answer.message, {"role": "user", "content": hint}]
        return Outcome(reward=0.0, components={"found": 0.0, "turns": float(self.turns)})
'''

TESTS = '''\
"""The contract that every producer keeps, and what is particular to this one."""

from __future__ import annotations

from pipeline.testing import ProducerContract

from @NAME@ import @CLASS@


class Test@CLASS@(ProducerContract):
    def make(self) -> @CLASS@:
        return @CLASS@()
'''

README = """\
# @DIST@

    pip install -e '.[test]'       # beside Sluice
    pytest                         # the contract
    pipeline producers @NAME@      # the same checks on what is installed
    pipeline up quickstart producer.name=@NAME@

An environment with dependencies that clash with Sluice's goes into a virtual environment of its own, where only this
package and msgspec are needed: `producer.python=/path/to/that/bin/python`.
"""


def producer(name: str, directory: Path, *, multi_turn: bool) -> list[Path]:
    """Write the package `name` into `directory`/NAME; answers the files. Raises `PipelineError` and writes nothing."""
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise PipelineError(
            f"{name!r} can't be a producer: use up to 50 lower-case letters, digits and _, with a letter first",
            Exit.USAGE,
        )
    root = directory / name
    if root.exists():
        raise PipelineError(f"{root} exists already: choose another name, or another --dir", Exit.USAGE)
    words = {"@NAME@": name, "@DIST@": name.replace("_", "-"), "@CLASS@": "".join(p.title() for p in name.split("_"))}
    contents = {
        "pyproject.toml": PYPROJECT,
        "README.md": README,
        # A folder of the package's own name would hide it from whoever stands above.
        f"src/{name}/__init__.py": MULTI if multi_turn else SINGLE,
        "tests/conftest.py": 'pytest_plugins = ["pipeline.testing"]\n',
        "tests/test_contract.py": TESTS,
    }
    written = []
    for path, text in contents.items():
        for word, value in words.items():
            text = text.replace(word, value)
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        written.append(file)
    return written
