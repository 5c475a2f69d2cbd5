from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from actors.trainer.packing import Sample, pack
from actors.trainer.rows import deal, row

Make = Callable[..., list[Sample]]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("multiple", [1, 4])
def test_every_trainable_token_is_dealt_once_and_found_behind_the_one_that_predicts_it(
    make_samples: Make, ranks: int, multiple: int
) -> None:
    samples = make_samples(17, seed=3)
    dealt = deal(samples, ranks, 24, multiple=multiple)
    seen = []
    for rows, indices in zip(dealt.rows, dealt.samples, strict=True):
        for packed in rows:
            assert len(packed.ids) == len(packed.positions) == packed.bounds[-1]
            assert len(packed.ids) % multiple == 0
            assert packed.positions[packed.bounds[:-1]].tolist() == [0] * (len(packed.bounds) - 1)
            if packed.micro is None:
                continue
            assert (packed.ids[packed.source + 1] == packed.micro.target).all()
            assert (packed.positions[packed.source] + 1 == packed.micro.position).all()
            places = zip(packed.micro.row, packed.micro.position, strict=True)
            seen += [(indices[packed.micro.samples[at]], int(position)) for at, position in places]
    wanted = [(index, int(at)) for index, sample in enumerate(samples) for at in np.nonzero(sample.loss_mask)[0]]
    assert sorted(seen) == wanted
    assert dealt.tokens == len(wanted)
    assert dealt.sequences == 17


def test_ranks_run_equally_often_and_get_about_as_much(make_samples: Make) -> None:
    for count in (1, 2, 5, 16):
        dealt = deal(make_samples(count, seed=count), 3, 24)
        assert len({len(rows) for rows in dealt.rows}) == 1
        loads = [sum(len(r.ids) for r in rows if r.micro) for rows in dealt.rows]
        assert max(loads) - min(loads) <= 13  # the longest sample


def test_a_rank_without_samples_still_has_a_row_to_run() -> None:
    empty = row(None, 4)
    assert empty.ids.tolist() == [0, 0, 0, 0]
    assert empty.longest == 4
    assert len(deal([], 2, 24).rows[1]) == 1
    assert deal([], 2, 24).tokens == 0


def test_ragged_packing_counts_no_padding_and_fills_what_is_left(make_samples: Make) -> None:
    samples = make_samples(17, seed=3)
    ragged, padded = pack(samples, 26, ragged=True), pack(samples, 26)
    assert len(ragged) < len(padded)
    assert all(micro.tokens == micro.slots <= 26 for micro in ragged)
    assert any(micro.tokens < micro.slots for micro in padded)
    assert sorted(i for micro in ragged for i in micro.samples) == list(range(17))
