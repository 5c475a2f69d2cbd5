"""Buckets keep order, size and alignment."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.refit.transports.plan import ITEM_BYTES, plan, size_of
from contracts.events import TensorSpec

specs = st.lists(
    st.builds(
        TensorSpec,
        name=st.text(min_size=1, max_size=4),
        dtype=st.sampled_from(sorted(ITEM_BYTES)),
        shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    max_size=12,
)


@given(specs, st.integers(1, 400))
def test_buckets_hold_every_tensor_once_in_order_aligned_and_within_the_limit(
    tensors: list[TensorSpec], limit: int
) -> None:
    buckets = plan(tensors, limit)
    assert [spec for bucket in buckets for spec in bucket.tensors] == tensors
    for bucket in buckets:
        assert bucket.size == sum(size_of(spec) for spec in bucket.tensors)
        assert bucket.size <= limit or len(bucket.tensors) == 1 or sum(map(size_of, bucket.tensors[:-1])) == 0
        offset = 0
        for spec in bucket.tensors:
            assert offset % ITEM_BYTES[spec.dtype] == 0
            offset += size_of(spec)


def test_a_bucket_is_filled_before_the_next_begins_and_an_oversized_tensor_stands_alone() -> None:
    tensors = [TensorSpec(name, "float32", (n,)) for name, n in [("a", 2), ("b", 2), ("c", 1), ("d", 9), ("e", 1)]]
    assert [[s.name for s in b.tensors] for b in plan(tensors, 16)] == [["a", "b"], ["c"], ["d"], ["e"]]


def test_a_tensor_that_would_not_be_aligned_begins_a_bucket() -> None:
    tensors = [TensorSpec("scale", "uint8", (3,)), TensorSpec("weight", "float32", (2,))]
    assert [b.size for b in plan(tensors, 1024)] == [3, 8]


def test_size_is_elements_times_element_size() -> None:
    assert size_of(TensorSpec("w", "bfloat16", (3, 5))) == 2 * prod((3, 5))
    assert size_of(TensorSpec("scalar", "float32", ())) == 4


def test_unknown_dtype_and_empty_bucket_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'w'.*'complex64'"):
        plan([TensorSpec("w", "complex64", (1,))], 16)
    with pytest.raises(ValueError, match=r"refit\.bucket_mib"):
        plan([], 0)
