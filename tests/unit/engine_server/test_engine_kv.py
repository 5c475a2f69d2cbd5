"""The prefix store: whole blocks, never a wrong prefix, never over its limit."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.torch_server.kv import BLOCK, PrefixStore

LISTS = st.lists(st.lists(st.integers(0, 1), min_size=0, max_size=4 * BLOCK), max_size=12)


@settings(max_examples=60, deadline=None)
@given(LISTS, st.integers(0, 6 * BLOCK))
def test_what_is_found_is_a_stored_prefix_within_the_limit(sequences: list[list[int]], limit: int) -> None:
    store = PrefixStore(limit)
    for number, tokens in enumerate(sequences):
        length, found = store.find(tokens)
        assert length % BLOCK == 0
        if found is not None:
            source = sequences[int(found[0])]
            assert source[:length] == tokens[:length]
        wanted = store.wants(tokens)
        if wanted:
            store.put(tokens[:wanted], torch.tensor([number]))
            assert store.find(tokens)[0] == wanted
        assert store.tokens <= limit


def test_the_least_recently_used_goes_first() -> None:
    store = PrefixStore(2 * BLOCK)
    first, second, third = ([value] * BLOCK for value in (1, 2, 3))
    for tokens in (first, second):
        store.put(tokens, torch.zeros(1))
    store.find(first)
    store.put(third, torch.zeros(1))
    assert [store.find(tokens)[0] for tokens in (first, second, third)] == [BLOCK, 0, BLOCK]


def test_an_entry_evicted_under_an_overlapping_one_takes_only_its_own_keys() -> None:
    store = PrefixStore(4 * BLOCK)
    short, long = [1] * BLOCK, [1] * (3 * BLOCK)
    store.put(short, torch.zeros(1))
    store.put(long, torch.ones(1))
    store.put([2] * BLOCK, torch.zeros(1))  # evicts short
    assert store.find(short)[0] == BLOCK
    assert store.find(long)[0] == 3 * BLOCK
