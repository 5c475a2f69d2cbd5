"""Which GPUs trainer and engines are on, and what is refused."""

from __future__ import annotations

import pytest

from config import gpus, loading
from config.schema import EngineConfig, RunConfig, TrainerConfig


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (EngineConfig(), [(), ()]),
        (EngineConfig(device="cuda"), [(0,), (0,)]),
        (EngineConfig(device="cuda:3"), [(3,), (3,)]),
        (EngineConfig(device="cuda", gpus=(2,)), [(2,), (2,)]),
        (EngineConfig(device="cuda", gpus=(1, 2)), [(1,), (2,)]),
        (EngineConfig(device="cuda", gpus=(4, 5, 2, 3), kind="sglang"), [(4, 5), (2, 3)]),
        (EngineConfig(device="cuda", kind="external", urls=("http://a", "http://b")), [(), ()]),
    ],
)
def test_gpus_are_shared_out_among_engines_in_order(engine: EngineConfig, expected: list[tuple[int, ...]]):
    config = RunConfig(engine=engine)
    assert [gpus.of_engine(config, index) for index in range(2)] == expected
    assert gpus.of_engines(config) == tuple(sorted({gpu for share in expected for gpu in share}))


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        (TrainerConfig(), ()),
        (TrainerConfig(device="cpu"), ()),
        (TrainerConfig(device="cuda"), (0,)),
        (TrainerConfig(device="cuda:1", ranks=2), (1, 2)),
    ],
)
def test_ranks_of_the_trainer_are_on_gpus_that_follow_each_other(trainer: TrainerConfig, expected: tuple[int, ...]):
    assert gpus.of_trainer(RunConfig(trainer=trainer)) == expected


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["trainer.device=gpu"], r"trainer.device='gpu': expected auto, cpu, cuda or cuda:N"),
        (["engine.device=auto"], r"engine.device='auto': expected cpu, cuda or cuda:N"),
        (["engine.gpus=[1]"], r"engine.gpus=\[1\] needs engine.device=cuda, without a number, but it is cpu"),
        (["engine.gpus=[1]", "engine.device=cuda:1"], r"engine.gpus=\[1\] needs engine.device=cuda, without a number"),
        (["engine.gpus=[1,1]", "engine.device=cuda"], r"engine.gpus=\[1, 1\] names a GPU twice"),
        (["engine.gpus=[1,2,3]", "engine.device=cuda"], r"can't be shared out among engine.count=2"),
        (["engine.gpus=[0,1,2,3]", "engine.device=cuda"], r"several GPUs, which engine.kind=torch has no use for"),
        (
            ["engine.gpus=[0,2]", "engine.device=cuda", "engine.kind=sglang", "engine.count=1"],
            r"the GPUs of one engine must follow each other",
        ),
        (
            ["trainer.device=cuda", "engine.device=cuda", "refit.transport=nccl"],
            r"nccl can't send from a GPU to itself.*share GPU 0: move one",
        ),
    ],
)
def test_an_assignment_that_can_not_be_is_refused_with_what_to_change(words: list[str], problem: str):
    with pytest.raises(loading.ConfigError, match=problem):
        loading.load("quickstart", words)


def test_engines_elsewhere_may_use_the_number_of_the_trainers_gpu():
    words = ["trainer.device=cuda", "engine.device=cuda", "refit.transport=nccl", "launch.ray_address=auto"]
    assert gpus.of_engines(loading.load("quickstart", words)) == (0,)


def test_the_recipe_for_gpus_keeps_trainer_and_engine_apart():
    config = loading.load("smollm2-gpu", [])
    assert (gpus.of_trainer(config), gpus.of_engines(config)) == ((0,), (1,))
