"""Scripts are typed functions: what goes in by name comes out in Lua under that name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import fakeredis
import pytest

from pipeline.bus import Keys
from pipeline.bus.lua import Key, script


@script
def echo(
    one: Key,
    text: str,
    rows: Sequence[tuple[Key, bytes, int]],
    many: Sequence[Key],
    number: int,
    words: Sequence[str],
) -> list[Any]:
    """
    local out = {one, text, number, #rows, #many, #words}
    for _, row in ipairs(rows) do
      for _, cell in ipairs(row) do out[#out + 1] = cell end
    end
    for _, key in ipairs(many) do out[#out + 1] = key end
    for _, word in ipairs(words) do out[#out + 1] = word end
    return out
    """
    ...


async def test_arguments_arrive_under_their_names() -> None:
    rows = [(Key("k1"), b"\x00\xff", 1), (Key("k2"), b"", 2)]
    call = echo(Key("k0"), text="t", rows=rows, many=[Key("k3")], number=7, words=["a", "b c"])
    assert call.keys == ["k0", "k1", "k2", "k3"]
    client = fakeredis.FakeAsyncRedis(protocol=2)
    reply = await client.execute_command("EVAL", call.source, len(call.keys), *call.keys, *call.args)
    assert reply == [b"k0", b"t", b"7", 2, 1, 2, b"k1", b"\x00\xff", b"1", b"k2", b"", b"2", b"k3", b"a", b"b c"]
    await client.aclose()


def test_a_row_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        echo(Key("k0"), "t", [(Key("k1"), b"x")], [], 7, [])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="missing"):
        echo(Key("k0"))  # type: ignore[call-arg]


@pytest.mark.parametrize("run", ["", "a{b", "a}b", "a b", "a*", "-a", "x" * 129])
def test_run_names_that_would_break_the_hash_tag_are_refused(run: str) -> None:
    with pytest.raises(ValueError, match="run name"):
        Keys(run)


def test_all_keys_of_a_run_share_one_hash_tag() -> None:
    keys = Keys("my-run.1")
    named = [keys.stream("tasks"), keys.journal("a"), keys.snapshot("a"), keys.payload("p"), keys.dead("tasks")]
    fixed = [keys.fences, keys.cursors, keys.registers, keys.config, keys.order, keys.tails]
    assert all(key.startswith("sluice:{my-run.1}:") for key in named + fixed)
    assert len(set(named + fixed)) == 11
    assert keys.journal("a") == keys.stream("journal:a")
