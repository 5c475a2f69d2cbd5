"""The size of a bucket, by what a refit needs of the sender's GPU and what is free there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.refit.transports.staging import LARGE, LEAST, MIB, ON_CPU, SMALL, NoRoom, Staging, choose, of
from actors.refit.transports.tensors import Sizer
from config import loading

SIZES = [100 * MIB] * 40
"""A model of 4000 MiB."""
BOTH = Staging(sent=2, taken=2, beside=1)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("engine.kind=sglang", "refit.receiver=sglang", "refit.transport=nccl"), Staging(sent=2, taken=2)),
        (("engine.kind=sglang", "refit.transport=nccl"), Staging(taken=1)),
        (("engine.kind=sglang", "refit.transport=ipc", "engine.gpus=[0]"), Staging(whole=True, taken=1, beside=1)),
        (
            ("engine.kind=sglang", "refit.transport=ipc", "refit.receiver=sglang", "engine.gpus=[0]"),
            Staging(sent=2, taken=0, beside=1),
        ),
        (("refit.transport=ipc", "engine.gpus=[0]", "engine.count=3"), Staging(sent=2, taken=0, beside=3)),
        (("refit.transport=gloo", "engine.gpus=[0]"), Staging(taken=1, beside=1)),
        (
            ("engine.kind=external", "engine.urls=['http://a']", "refit.transport=gloo"),
            Staging(taken=2),
        ),
    ],
)
def test_what_is_staged_follows_from_transport_and_receiver(words: tuple[str, ...], expected: Staging):
    base = ["trainer.device=cuda:0", "engine.device=cuda", "engine.gpus=[1]", "engine.count=1"]
    assert of(loading.load("quickstart", [*base, *words])) == expected


def test_needs_are_counted_in_buckets_and_no_bucket_is_greater_than_the_model():
    assert BOTH.needs(200 * MIB, SIZES) == 800 * MIB
    assert BOTH.needs(50 * MIB, SIZES) == 400 * MIB, "a tensor above the limit has a bucket of its own"
    assert BOTH.needs(9000 * MIB, SIZES) == 4 * 4000 * MIB
    assert Staging(whole=True).needs(200 * MIB, SIZES) == 4000 * MIB
    assert Staging(sent=2, taken=2).needs(200 * MIB, SIZES) == 400 * MIB, "receivers elsewhere"


def test_with_room_a_bucket_is_an_eighth_of_what_is_free_within_bounds():
    assert choose(None, 100 * 1024 * MIB, SIZES, BOTH).size == LARGE
    assert choose(None, 2400 * MIB, SIZES, BOTH).size == 300 * MIB
    assert choose(None, 450 * MIB, [MIB] * 40, BOTH).size == SMALL
    assert choose(7, 9000 * MIB, SIZES, BOTH).size == 7


def test_without_room_it_is_smaller_and_says_so():
    few = [MIB] * 4000
    chosen = choose(None, 200 * MIB, few, BOTH)
    assert chosen.size == SMALL // 2
    assert chosen.note == "buckets of 32 MiB instead of 64 MiB, which need 256 MiB: 200 MiB is free"
    assert choose(None, 64 * MIB, few, BOTH).size == LEAST


@pytest.mark.parametrize(
    ("setting", "free", "staging", "words"),
    [
        (None, 399, BOTH, r"needs 400 MiB .*2 buckets of the trainer, 2 of engines on the same GPU; .* up to 100 MiB"),
        (200 * MIB, 700, BOTH, r"needs 800 MiB .*but 700 MiB is free: lower refit.bucket_mib=200"),
        (50 * MIB, 300, BOTH, r"needs 400 MiB .*300 MiB is free: lower engine.max_total_tokens"),
        (None, 3000, Staging(whole=True), r"a copy of the model, 4,000 MiB; .*: use refit.receiver=sglang"),
    ],
)
def test_what_does_not_fit_at_all_is_refused_with_the_fix(setting: int | None, free: int, staging: Staging, words: str):
    with pytest.raises(NoRoom, match=words):
        choose(setting, free * MIB, SIZES, staging)


@given(
    st.integers(0, 2**34),
    st.lists(st.integers(1, 2**30), min_size=1, max_size=20),
    st.builds(Staging, sent=st.integers(0, 2), whole=st.booleans(), taken=st.integers(0, 2), beside=st.integers(0, 8)),
)
def test_an_automatic_bucket_always_fits_or_is_refused(free: int, sizes: list[int], staging: Staging):
    try:
        chosen = choose(None, free, sizes, staging)
    except NoRoom:
        assert staging.needs(LEAST, sizes) > free
    else:
        assert LEAST <= chosen.size <= LARGE
        assert staging.needs(chosen.size, sizes) <= free
        assert bool(chosen.note) == (chosen.size < min(LARGE, max(SMALL, free // 8)))


SHORT = "engine-0 failed in receive: Failed to update parameter online: CUDA out of memory. Tried to allocate 1 GiB"
TENSORS = {"w": torch.zeros(4)}


def test_an_engine_without_memory_halves_an_automatic_bucket_down_to_the_least_and_the_note_says_so_once():
    sizer = Sizer(None, Staging())
    sizes = []
    for _ in range(6):
        chosen = sizer.choose(TENSORS)
        sizes.append(chosen.size)
        assert sizer.choose(TENSORS).note == ""
        sizer.forget("connection reset by peer")
        sizer.forget(SHORT)
        sizer.forget(SHORT)  # told by the failed transfer and by the failed epoch: one failure
    assert sizes == [ON_CPU, ON_CPU // 2, ON_CPU // 4, ON_CPU // 8, LEAST, LEAST]
    sizer = Sizer(None, Staging())
    sizer.choose(TENSORS)
    sizer.forget(SHORT)
    assert sizer.choose(TENSORS).note == "buckets of at most 128 MiB: with 256 MiB somebody ran out of memory"


@pytest.mark.parametrize(("setting", "reason"), [(None, "epoch 3 was abandoned"), (7 * MIB, SHORT)])
def test_other_failures_and_a_bucket_that_is_set_leave_its_size_alone(setting: int | None, reason: str):
    sizer = Sizer(setting, Staging())
    before = sizer.choose(TENSORS)
    sizer.forget(reason)
    assert sizer.choose(TENSORS) == before


def test_what_was_too_large_for_an_engine_bounds_the_choice_by_free_memory_too():
    assert choose(None, 100 * 1024 * MIB, SIZES, BOTH, LARGE // 2).size == LARGE // 2
    assert choose(None, 100 * 1024 * MIB, SIZES, BOTH, LEAST).note == ""
