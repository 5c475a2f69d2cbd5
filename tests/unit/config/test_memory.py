"""What a run needs of each GPU: counted by hand here, and refused where it can't fit."""

from __future__ import annotations

from typing import Any

import pytest

from config import loading, memory
from config.memory import CONTEXT, GIB, Model
from config.schema import EngineConfig, RunConfig

BILLION = Model(parameters=10**9, kv_values=10**5)
SHARED = ("trainer.device=cuda:0", "engine.device=cuda:0", "engine.count=1", "sync=true", "model.dtype=bfloat16")


def sums(*words: str, free: dict[int, int] | None = None) -> dict[str, dict[int, float]]:
    """Gigabytes (10**9) by moment and GPU, without CUDA's own."""
    config = loading.load("quickstart", [*SHARED, *words])
    found = memory.needs(config, BILLION, free or {})
    return {
        moment: {
            gpu: round(sum(part.size for part in parts if part.size != CONTEXT) / 1e9, 2) for gpu, parts in by.items()
        }
        for moment, by in found.items()
    }


def test_each_moment_holds_what_it_must():
    assert sums() == {"a step": {0: 22.0}, "a refit": {0: 18.0}, "generation": {0: 18.0}}


@pytest.mark.parametrize(
    ("words", "step", "generation"),
    [
        (("engine.release=all",), 20.0, 18.0),
        (("engine.release=kv",), 22.0, 18.0),
        (("trainer.offload=optimizer",), 22.0, 10.0),
        (("trainer.offload=all",), 22.0, 6.0),
        (("trainer.loss.kl_coef=0.1",), 26.0, 22.0),
        (("engine.kind=sglang", "refit.transport=ipc"), 24.0, 20.0),
        (("engine.kind=sglang", "refit.transport=ipc", "refit.receiver=sglang"), 22.0, 18.0),
    ],
)
def test_each_setting_counts(words: tuple[str, ...], step: float, generation: float):
    found = sums(*words)
    assert (found["a step"][0], found["generation"][0]) == (step, generation)


@pytest.mark.parametrize(
    ("words", "trainer", "engine"),
    [
        (("engine.kind=sglang", "refit.receiver=sglang", "refit.transport=nccl"), 2, 2),
        (("engine.kind=sglang", "refit.receiver=sglang", "refit.transport=gloo"), 0, 2),
        (("engine.kind=sglang", "refit.receiver=sglang", "refit.transport=ipc"), 2, 0),
        (("engine.kind=sglang", "refit.transport=nccl"), 0, 0),
        (("refit.transport=nccl",), 2, 1),
        (("refit.transport=ipc",), 2, 0),
        (("refit.transport=gloo",), 0, 0),
    ],
)
def test_buckets_count_in_a_refit_where_they_are_laid_out_and_where_they_are_staged(
    words: tuple[str, ...], trainer: int, engine: int
):
    def more(*more: str) -> dict[int, float]:
        found = sums(*words, *more)
        return {gpu: round(found["a refit"][gpu] - found["generation"][gpu], 2) for gpu in found["a refit"]}

    apart = "engine.device=cuda:1"
    for told, size in (((), 2**24), (("refit.bucket_mib=128",), 2**27), (("refit.bucket_mib=8192",), 2 * 10**9)):
        assert more(*told, apart) == {
            0: pytest.approx(trainer * size / 1e9, abs=0.02),
            1: pytest.approx(engine * size / 1e9, abs=0.02),
        }, "no bucket is greater than the model"
        if "refit.transport=nccl" not in words:
            assert more(*told) == {0: pytest.approx((trainer + engine) * size / 1e9, abs=0.02)}


def test_ranks_share_and_only_the_first_holds_copies():
    found = sums("trainer.ranks=2", "engine.device=cuda:1")
    assert found["a step"] == {0: 12.0, 1: 10.0}


def test_the_cache_counts_as_far_as_sglang_will_take_it():
    args = "engine.args=[--mem-fraction-static,'0.5']"
    words = ("engine.kind=sglang", "engine.max_total_tokens=100000", args)
    # 8 of 40 go to the trainer as it loads; half of the rest is 16, of which weights take 2; 20 are wished for
    assert sums(*words, free={0: 40 * 10**9})["generation"][0] == 18.0 + 14.0
    assert sums(*words, free={0: 400 * 10**9})["generation"][0] == 18.0 + 20.0
    assert sums(*words, free={0: 4 * 10**9})["generation"][0] == 18.0
    assert sums(*words, "engine.release=kv", free={0: 400 * 10**9})["a step"][0] == 22.0


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), None),
        (("--mem-fraction-static", "0.3"), 0.3),
        (("--mem-fraction-static=0.3",), 0.3),
        (("--mem-fraction-static",), None),
        (("--mem-fraction-static", "x"), None),
    ],
)
def test_the_fraction_is_read_from_the_servers_arguments(args: tuple[str, ...], expected: float | None):
    assert memory.fraction(args) == expected


def test_too_little_is_said_with_gpu_moment_and_parts():
    config = loading.load("quickstart", list(SHARED))
    found = memory.needs(config, BILLION, {})
    assert memory.too_much(found, {0: 40 * GIB}) is None
    assert memory.too_much(found, {}) is None, "nobody could be asked"
    assert memory.too_much(found, {0: 20 * GIB}) == (
        "GPU 0 has 20.0 GiB free, but a step needs 21.5 there without activations: trainer's frozen copies 3.7, "
        "CUDA of the trainer 0.5, trainer's weights 3.7, gradients 3.7, optimizer 7.5, CUDA of engine-0 0.5, "
        "weights of engine-0 1.9"
    )


MEGATRON = "trainer.backend=megatron"


@pytest.mark.parametrize(
    ("words", "step", "generation"),
    [
        # 4 frozen, 2 of the engine; weights 2, gradients 4, moments 8, float32 copies 4
        ((), 24.0, 24.0),
        (("trainer.offload=optimizer",), 24.0, 8.0),
        (("trainer.offload=all",), 24.0, 6.0),
        (("trainer.loss.kl_coef=0.1", "trainer.offload=optimizer"), 26.0, 10.0),
        (("model.dtype=float32", "trainer.offload=optimizer"), 8.0 + 4.0 + 4.0 + 4.0 + 8.0, 16.0),
        # another rank has half of the optimizer, on another GPU
        (("trainer.ranks=2",), 18.0, 18.0),
        (("trainer.ranks=2", "trainer.megatron.tensor_parallel=2"), 15.0, 15.0),
        (("trainer.ranks=2", "trainer.megatron.expert_parallel=2"), 15.0, 15.0),
    ],
)
def test_megatron_keeps_gradients_too_and_weights_in_their_own_dtype(
    words: tuple[str, ...], step: float, generation: float
):
    found = sums(MEGATRON, *words)
    assert (found["a step"][0], found["generation"][0]) == (step, generation)


def test_pipeline_stages_and_engines_elsewhere_are_not_counted():
    config: Any = RunConfig(engine=EngineConfig(kind="external", urls=("http://a",), count=1))
    assert all(not by for by in memory.needs(config, BILLION, {}).values())
    assert sums(MEGATRON, "trainer.ranks=2", "trainer.megatron.pipeline_parallel=2")["a step"] == {0: 2.0}


GIVING = ("sync=true", "trainer.device=cuda:0", "engine.device=cuda:0", "engine.release=all")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("sync=false",), r"engine.release=all keeps .* buffer.max_staleness=1 has them .*: use sync=true"),
        (("engine.device=cuda:1",), r"engine.release=all makes room .*engine.device=cuda:1 .*put them apart"),
        (("trainer.device=cpu",), r"trainer.device=cpu, engine.device=cuda:0 .*: name one GPU for both"),
        (("trainer.device=auto",), r"trainer.device=auto, engine.device=cuda:0"),
        (("engine.device=cuda", "engine.gpus=[0,1]"), r"engine.gpus=\[0, 1\] put them apart"),
        (
            ("engine.kind=external", "engine.urls=['http://a','http://b']"),
            r"engine.release=all can't be asked of engine.kind=external",
        ),
        (
            ("engine.kind=sglang", "engine.device=cpu", "trainer.device=cpu"),
            r"engine.release=all needs a GPU with engine.kind=sglang, but engine.device=cpu",
        ),
        (("refit.drain=in_flight",), r"engine.release=all gives back the cache that refit.drain=in_flight keeps"),
    ],
)
def test_what_can_not_work_is_refused_with_its_fix(words: tuple[str, ...], problem: str):
    with pytest.raises(loading.ConfigError, match=problem):
        loading.load("quickstart", [*GIVING, *words])


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("engine.kind=sglang", "engine.count=1"),
        ("engine.device=cpu", "trainer.device=cpu"),
        ("engine.device=cpu", "trainer.device=auto"),
        ("buffer.max_staleness=0", "sync=false"),
        ("engine.kind=sglang", "engine.device=cuda", "engine.gpus=[0,1]", "engine.count=1"),
        ("trainer.ranks=2", "engine.device=cuda", "engine.gpus=[0,1]"),
        ("refit.drain=interrupt", "trainer.offload=all"),
        ("trainer.backend=megatron", "trainer.offload=optimizer"),
    ],
)
def test_engines_on_the_trainers_device_may_take_turns_with_it(words: tuple[str, ...]):
    assert loading.load("quickstart", [*GIVING, *words]).engine.release == "all"
