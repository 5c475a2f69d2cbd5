"""Procedurally generated reasoning tasks from the `reasoning-gym` package: verifiable, endless, offline."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

from contracts.producer import CONTRACT_VERSION, DataError, Outcome, Task

SEEDS = 2**32
"""Seeds that the package's datasets accept."""


class ReasoningGym:
    """A `contracts.producer.SingleTurn` over one dataset of `reasoning-gym`.

    `dataset` is the package's name for it, `args` are its settings; `size` is the number of tasks after which the
    dataset is re-seeded, so tasks never end. `prompt_template` is filled with `{question}`. With `chat` the prompt is a
    list of messages, led by `system` if given.

    Held-out tasks come from seeds of their own, `eval_seed` fixes those over runs. A dataset with few questions repeats
    them under any seed: `held_out_every=k` gives one question in k, chosen by its hash, to evaluation and keeps it out
    of training.

    The completion is scored by the dataset itself, on the text between the last `<answer>` tags if there are any, else
    on all of it. Raises `ValueError` for an unknown dataset, refused settings, and a template without a question.
    """

    contract = CONTRACT_VERSION

    def __init__(
        self,
        dataset: str = "count_bits",
        *,
        prompt_template: str = "{question}",
        chat: bool = False,
        system: str | None = None,
        eval_seed: int | None = None,
        held_out_every: int | None = None,
        size: int = 500,
        **args: Any,
    ) -> None:
        if "{question}" not in prompt_template:
            raise ValueError(f"prompt_template={prompt_template!r} lacks {{question}}")
        if system is not None and not chat:
            raise ValueError("system needs chat=true: a plain-text prompt has no system message")
        if held_out_every is not None and held_out_every < 2:
            raise ValueError(f"held_out_every={held_out_every} leaves nothing to train on; 2 or more is expected")
        self._dataset = dataset
        self._template = prompt_template
        self._chat = chat
        self._system = system
        self._eval_seed = eval_seed
        self._held_out_every = held_out_every
        self._size = size
        self._args = args
        self._make = dataset_factory(dataset)
        self._scorer = self._chunk(0)

    async def tasks(self, cursor: str | None, seed: int, split: str) -> AsyncIterator[Task]:
        """Tasks for ever, from behind `cursor` (how many came before). Raises `ValueError` for a foreign cursor."""
        position = _position(cursor)
        if split == "eval" and self._eval_seed is not None:
            seed = self._eval_seed
        name = self._dataset if split == "train" else f"{self._dataset}-{split}"
        while True:
            number, start = divmod(position, self._size)
            chunk = self._chunk(Random(f"{name}/{seed}/{number}").randrange(SEEDS))
            for offset in range(start, self._size):
                entry = chunk[offset]
                position += 1
                if not self._belongs(entry["question"], split):
                    continue
                payload = {
                    "question": entry["question"],
                    "answer": entry["answer"],
                    "metadata": pack(entry["metadata"]),
                }
                yield Task(id=f"{name}-{seed}-{position - 1}", payload=payload, cursor=str(position))

    def _belongs(self, question: str, split: str) -> bool:
        if self._held_out_every is None:
            return True
        digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
        return (int.from_bytes(digest) % self._held_out_every == 0) == (split == "eval")

    def prompt(self, task: Task) -> str | list[dict[str, Any]]:
        """The question in its template, as text or as chat messages."""
        text = self._template.replace("{question}", _field(task, "question"))
        if not self._chat:
            return text
        head = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*head, {"role": "user", "content": text}]

    def score(self, task: Task, completion: str) -> Outcome:
        """The dataset's own score of the answer, 0..1, from the payload alone."""
        entry = {
            "question": _field(task, "question"),
            "answer": task.payload.get("answer"),
            "metadata": unpack(_field(task, "metadata")),
        }
        answer = extract(completion)
        return Outcome(reward=float(self._scorer.score_answer(answer, entry)), info={"answer": answer})

    def _chunk(self, seed: int) -> Any:
        """The dataset under one seed. Raises `ValueError` naming the dataset and what it refuses."""
        try:
            return self._make(seed=seed, size=self._size, **self._args)
        except (TypeError, ValueError, AssertionError) as error:
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            what = f"it has no setting {unknown[1]!r}" if unknown else str(error)
            raise ValueError(f"dataset {self._dataset!r} refuses its settings {self._args!r}: {what}") from error


def extract(completion: str) -> str:
    """The text between the last pair of `<answer>` tags, or all of it; stripped."""
    _, tag, tail = completion.rpartition("<answer>")
    answer, end, _ = tail.partition("</answer>")
    return (answer if tag and end else completion).strip()


def _position(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not cursor.isdigit():
        raise ValueError(f"cursor {cursor!r} is not one of reasoning_gym's: a number of tasks is expected")
    return int(cursor)


def _field(task: Task, name: str) -> Any:
    if name not in task.payload:
        raise DataError(f"task {task.id}: payload has no {name!r}; it has {', '.join(task.payload) or 'nothing'}")
    return task.payload[name]


# --- exact JSON: the scorers tell tuples from lists and use integers as keys -----------------------------------------


def pack(value: Any) -> Any:
    """Plain JSON that `unpack` turns back into `value`: tuples and dicts with other keys than strings are tagged."""
    if isinstance(value, tuple):
        return {"()": [pack(item) for item in value]}
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not value.keys() & {"()", "{}"}:
            return {key: pack(item) for key, item in value.items()}
        return {"{}": [[pack(key), pack(item)] for key, item in value.items()]}
    json.dumps(value)
    return value


def unpack(value: Any) -> Any:
    """What `pack` was given."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "()" in value:
        return tuple(unpack(item) for item in value["()"])
    if "{}" in value:
        return {unpack(key): unpack(item) for key, item in value["{}"]}
    return {key: unpack(item) for key, item in value.items()}


# --- import ----------------------------------------------------------------------------------------------------------


def dataset_factory(name: str) -> Any:
    """A callable (settings) -> dataset. Raises `ValueError` for an unknown name, listing close ones.

    The package imports its hundred datasets with sympy and matplotlib in 2 s; the module of one takes 0.1 s, so that
    is tried first.
    """
    _import_alone(name)
    registry = sys.modules.get("reasoning_gym.factory")
    if registry is None or name not in registry.DATASETS:
        importlib.import_module("reasoning_gym")
        registry = sys.modules["reasoning_gym.factory"]
    if name not in registry.DATASETS:
        close = get_close_matches(name, registry.DATASETS, n=5, cutoff=0.3)
        raise ValueError(f"reasoning-gym has no dataset {name!r}; close: {', '.join(close) or 'none'}")
    return partial(registry.create_dataset, name)


def _import_alone(name: str) -> None:
    """Import `reasoning_gym.<category>.<name>`, if there is one, without what the packages above it import."""
    spec = None if "reasoning_gym" in sys.modules else find_spec("reasoning_gym")
    roots = [] if spec is None else [Path(root) for root in spec.submodule_search_locations or ()]
    for path in [path for root in roots for path in root.glob("*/*.py") if path.stem == name]:
        parent = path.parent
        category = f"reasoning_gym.{parent.name}"
        # A module that needs the names of its whole package is imported with it instead.
        with _bare_package("reasoning_gym", parent.parent), _bare_package(category, parent), suppress(ImportError):
            importlib.import_module(f"{category}.{name}")


@contextmanager
def _bare_package(name: str, path: Path) -> Iterator[None]:
    """Stand an empty package in for `name` while its submodules are imported; the real one can be imported later."""
    package = ModuleType(name)
    package.__path__ = [str(path)]
    sys.modules[name] = package
    try:
        yield
    finally:
        del sys.modules[name]
