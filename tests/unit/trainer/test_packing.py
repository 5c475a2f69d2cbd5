from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from actors.trainer.packing import PackingError, pack, split


@pytest.mark.parametrize("limit", [13, 20, 64, 1000])
def test_every_trainable_token_is_packed_once_within_the_limit(make_samples, limit: int) -> None:
    samples = make_samples(17, seed=3)
    seen = []
    for micro in pack(samples, limit):
        assert micro.ids.size <= limit
        for row, position, target, value in zip(micro.row, micro.position, micro.target, micro.behaviour, strict=True):
            sample = samples[micro.samples[row]]
            assert sample.ids[position] == target == micro.ids[row, position]
            assert sample.loss_mask[position] == 1
            assert sample.behaviour[position] == value
            seen.append((int(micro.samples[row]), int(position)))
    wanted = [(index, int(at)) for index, sample in enumerate(samples) for at in np.nonzero(sample.loss_mask)[0]]
    assert sorted(seen) == wanted


def test_longest_sequences_go_first_and_together(make_samples) -> None:
    batches = pack(make_samples(17), 30)
    widths = [micro.ids.shape[1] for micro in batches]
    assert len(batches) > 2
    assert widths == sorted(widths, reverse=True)


def test_columns_are_only_the_positions_that_predict_a_trainable_token(make_samples) -> None:
    (sample,) = make_samples(
        1,
        loss_mask=np.array([0, 0, 0, 0, 0, 1, 1], dtype=np.uint8)[:7],
        ids=np.arange(7, dtype=np.int32),
        behaviour=np.zeros(7, dtype=np.float32),
    )
    (micro,) = pack([sample], 100)
    assert micro.columns.tolist() == [4, 5]
    assert micro.target.tolist() == [5, 6]


def test_sequences_without_trainable_tokens_are_left_out(make_samples) -> None:
    samples = make_samples(3)
    samples[1] = replace(samples[1], loss_mask=np.zeros_like(samples[1].loss_mask))
    (micro,) = pack(samples, 1000)
    assert sorted(micro.samples.tolist()) == [0, 2]
    assert pack([samples[1]], 1000) == []
    assert pack([], 1000) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": np.zeros(3, dtype=np.uint8)}, "loss_mask has 3 entries"),
        ({"behaviour": np.zeros(3, dtype=np.float32)}, "behaviour has 3 entries"),
        ({"advantage": float("nan")}, "advantage nan"),
        ({"temperature": 0.0}, "temperature 0.0"),
    ],
)
def test_a_broken_sample_is_named_with_its_field(make_samples, change: dict, message: str) -> None:
    samples = make_samples(2)
    with pytest.raises(PackingError, match=f"sample 1: {message}"):
        pack([samples[0], replace(samples[1], **change)], 1000)


def test_a_first_token_can_not_be_trained_on(make_samples) -> None:
    (sample,) = make_samples(1)
    with pytest.raises(PackingError, match="nothing predicts a first token"):
        pack([replace(sample, loss_mask=np.ones_like(sample.loss_mask))], 1000)


def test_a_logprob_that_is_not_finite_is_refused(make_samples) -> None:
    (sample,) = make_samples(1)
    with pytest.raises(PackingError, match="behaviour"):
        pack([replace(sample, behaviour=np.full_like(sample.behaviour, -np.inf))], 1000)


def test_a_sequence_over_the_limit_names_the_setting(make_samples) -> None:
    with pytest.raises(PackingError, match=r"trainer\.microbatch_tokens=2"):
        pack(make_samples(1), 2)


def test_minibatches_partition_the_batch_alike_for_one_seed() -> None:
    parts = split(10, 3, [5, 1])
    assert sorted(np.concatenate(parts).tolist()) == list(range(10))
    assert [len(part) for part in parts] == [4, 3, 3]
    assert all((a == b).all() for a, b in zip(parts, split(10, 3, [5, 1]), strict=True))
    assert any((a != b).any() for a, b in zip(parts, split(10, 3, [5, 2]), strict=True))
