"""The reasoning_gym producer: stable tasks, exact payloads, the dataset's own scores."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from actors.environments.loading import is_multi_turn, load
from actors.environments.reasoning_gym import ReasoningGym, dataset_factory, extract, pack, unpack
from contracts.producer import DataError, SingleTurn, Task


async def take(
    producer: ReasoningGym, count: int, cursor: str | None = None, seed: int = 3, split: str = "train"
) -> Any:
    tasks: list[Task] = []
    async for task in producer.tasks(cursor, seed, split):
        tasks.append(task)
        if len(tasks) == count:
            return tasks


def over_the_wire(task: Task) -> Task:
    """The task as another process sees it."""
    return Task(id=task.id, payload=json.loads(json.dumps(task.payload)), cursor="")


def test_it_is_the_registered_single_turn_producer() -> None:
    producer = load("reasoning_gym", {"dataset": "count_bits"})
    assert isinstance(producer, SingleTurn)
    assert not is_multi_turn(producer)


async def test_the_same_seed_gives_the_same_tasks_and_another_seed_others() -> None:
    first, again, other = [await take(ReasoningGym(), 5, seed=seed) for seed in (3, 3, 4)]
    assert first == again
    assert [task.id for task in first] == [f"count_bits-3-{n}" for n in range(5)]
    assert not {task.payload["question"] for task in first} & {task.payload["question"] for task in other}


async def test_a_cursor_resumes_right_behind_its_task_over_reseeding_too() -> None:
    producer = ReasoningGym(size=3)
    tasks = await take(producer, 8)
    assert len({task.payload["question"] for task in tasks}) == 8
    for position in range(7):
        assert await take(producer, 1, cursor=tasks[position].cursor) == [tasks[position + 1]]


async def test_held_out_tasks_are_others_and_can_be_fixed_over_seeds() -> None:
    train = await take(ReasoningGym(), 20)
    held_out = await take(ReasoningGym(), 20, split="eval")
    assert not {task.payload["question"] for task in train} & {task.payload["question"] for task in held_out}
    assert not {task.id for task in train} & {task.id for task in held_out}
    fixed = [await take(ReasoningGym(eval_seed=9), 3, seed=seed, split="eval") for seed in (1, 2)]
    assert fixed[0] == fixed[1] != held_out[:3]


async def test_held_out_questions_of_a_small_dataset_are_never_trained_on() -> None:
    producer = ReasoningGym(max_n=60, held_out_every=4)
    train = await take(producer, 200)
    held_out = await take(producer, 20, split="eval")
    questions = {task.payload["question"] for task in train}
    assert len(questions) > 20
    assert not questions & {task.payload["question"] for task in held_out}
    assert await take(producer, 1, cursor=train[6].cursor) == [train[7]]


@pytest.mark.parametrize("cursor", ["x", "-1", "1.5"])
async def test_a_foreign_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(ValueError, match="cursor"):
        await take(ReasoningGym(), 1, cursor=cursor)


@pytest.mark.parametrize("dataset", ["count_bits", "chain_sum", "letter_counting", "graph_color", "rotate_matrix"])
async def test_the_score_needs_nothing_but_the_payload(dataset: str) -> None:
    tasks = await take(ReasoningGym(dataset), 3)
    scorer = ReasoningGym(dataset)
    for task in tasks:
        answer = task.payload["answer"]
        if answer is None:
            answer = json.dumps(unpack(task.payload["metadata"])["possible_answer"])
        assert scorer.score(over_the_wire(task), f"It is\n<answer> {answer} </answer>").reward == 1.0
        assert scorer.score(over_the_wire(task), "no idea").reward < 0.5


async def test_the_prompt_is_text_or_chat_messages() -> None:
    (task,) = await take(ReasoningGym(), 1)
    question = task.payload["question"]
    assert ReasoningGym().prompt(task) == question
    assert ReasoningGym(prompt_template="Q: {question}\nA:").prompt(task) == f"Q: {question}\nA:"
    assert ReasoningGym(chat=True).prompt(task) == [{"role": "user", "content": question}]
    assert ReasoningGym(chat=True, system="Be brief.").prompt(task) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": question},
    ]


@pytest.mark.parametrize("missing", ["question", "metadata"])
async def test_a_payload_without_its_fields_is_a_data_error_that_names_them(missing: str) -> None:
    (task,) = await take(ReasoningGym(), 1)
    broken = Task(id="t", payload={k: v for k, v in task.payload.items() if k != missing}, cursor="")
    with pytest.raises(DataError, match=f"no '{missing}'"):
        ReasoningGym().score(broken, "3")


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (" 7\n", "7"),
        ("<answer>1</answer> no, <answer> 2 </answer>.", "2"),
        ("<answer>3", "<answer>3"),
        ("</answer>4<answer>", "</answer>4<answer>"),
        ("", ""),
    ],
)
def test_the_answer_is_between_the_last_tags_or_everything(completion: str, answer: str) -> None:
    assert extract(completion) == answer


@pytest.mark.parametrize(
    "value", [(1, (2, [3])), {1: "a", (2, 3): [()]}, {"()": 1}, {"{}": {"x": None}}, {"a": [1.5, True, "s"]}]
)
def test_packing_keeps_tuples_and_keys_through_json(value: Any) -> None:
    assert unpack(json.loads(json.dumps(pack(value)))) == value


def test_packing_refuses_what_json_does_not_have() -> None:
    with pytest.raises(TypeError, match="set"):
        pack({"a": {1}})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"dataset": "count_bit"}, "close: count_bits"),
        ({"min_n": 5, "max_n": 1}, "dataset 'count_bits' refuses its settings"),
        ({"colour": 1}, "colour"),
        ({"prompt_template": "hello"}, "lacks {question}"),
        ({"system": "x"}, "chat=true"),
        ({"held_out_every": 1}, "held_out_every=1"),
    ],
)
def test_wrong_settings_are_refused_by_name(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("{", r"\{")):
        ReasoningGym(**args)


def test_one_dataset_is_imported_without_the_hundred_others_and_does_not_disturb_them() -> None:
    script = """
import sys
from actors.environments.reasoning_gym import dataset_factory
assert dataset_factory("count_bits")(seed=1)[0]["answer"]
assert "sympy" not in sys.modules and "matplotlib" not in sys.modules
import reasoning_gym
assert reasoning_gym.create_dataset("count_bits", seed=1)[0] == dataset_factory("count_bits")(seed=1)[0]
assert len(sys.modules["reasoning_gym.factory"].DATASETS) > 100
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_dataset_in_a_module_of_another_name_is_found() -> None:
    assert dataset_factory("syllogism")(seed=1)[0]["question"]
