"""The checksum that a GPU computes in place is one number, whoever computes it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.inside import mix64
from actors.engine.inside.mix64 import Mixer, Piece, checksums, whole


def defined(data: bytes) -> str:
    """As the module describes it, in numpy's unsigned arithmetic."""
    words = np.frombuffer(data + bytes(-len(data) % 8), dtype="<u8")
    one, two, three = (np.uint64(k % 2**64) for k in (mix64.K1, mix64.K2, mix64.K3))
    mixed = words + np.arange(len(words), dtype=np.uint64) * one
    for shift, factor in ((32, two), (29, three), (32, np.uint64(1))):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * factor
    return f"{int(mixed.sum(dtype=np.uint64)):016x}"


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_bytes_have_the_checksum_of_the_definition(data: bytes) -> None:
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    assert checksums([tensor]) == [defined(data)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_layout_and_place_in_memory_change_nothing(dtype: torch.dtype) -> None:
    tensor = (torch.arange(40 * 33).view(40, 33) % 101).to(dtype)
    moved = torch.empty(40 * 33 + 1, dtype=dtype)[1:].view(40, 33).copy_(tensor)
    want = [defined(tensor.view(torch.uint8).numpy().tobytes())] * 3
    assert checksums([tensor, moved, tensor.t().contiguous().t()]) == want


def test_more_than_is_mixed_at_a_time_is_one_checksum() -> None:
    tensor = torch.arange(2 * mix64.HOST_WORDS + 5, dtype=torch.int64)
    assert checksums([tensor]) == [defined(tensor.numpy().tobytes())]


def test_one_bit_and_two_that_change_places_are_seen() -> None:
    tensor = torch.arange(100, dtype=torch.int64)
    flipped, swapped = tensor.clone(), tensor.clone()
    flipped[50] ^= 1
    swapped[[3, 4]] = tensor[[4, 3]]
    assert len(set(checksums([tensor, flipped, swapped]))) == 3


def test_shards_add_up_to_the_whole_and_say_what_they_can_not_read() -> None:
    tensor = torch.randn(64, 48)
    left, right = tensor[:, :20].contiguous(), tensor[:, 20:]
    above, below = tensor[:40], tensor[40:].clone()
    pieces = [
        *(whole(tensor), Piece(left, 0, (48, 1)), Piece(right, 20, (48, 1))),
        *(Piece(above, 0, (48, 1)), Piece(below, 40 * 48, (48, 1)), Piece(tensor[:, :3], 0, (48, 1))),
    ]
    mixer = Mixer(pieces)
    sums = mixer.run()
    assert (sums[1] + sums[2]) % 2**64 == sums[0] == (sums[3] + sums[4]) % 2**64
    assert mixer.unreadable == {5}
    assert 5 not in sums
    right.add_(1)
    assert mixer.run()[2] != sums[2]
