"""Which node of a cluster a run's connection goes to."""

from __future__ import annotations

from typing import Any

import pytest
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError

from pipeline.bus.address import parse
from pipeline.bus.cluster import RoutedConnection, RoutedSSLConnection, routing

ROWS: list[Any] = [
    [0, 4, [b"10.0.0.1", 1], [b"10.0.0.9", 9]],
    [5, 9, [b"10.0.0.2", 2]],
    [10, 10, [None, 3]],
    [11, 11, ["n", 4]],
]


@pytest.mark.parametrize(
    ("slot", "owner"), [(4, ("10.0.0.1", 1)), (5, ("10.0.0.2", 2)), (10, ("seed", 3)), (11, ("n", 4))]
)
def test_the_master_of_the_slot_is_taken_and_a_nameless_one_is_the_node_that_was_asked(
    slot: int, owner: tuple[str, int]
) -> None:
    assert RoutedConnection((), slot)._owner("seed", ROWS) == owner


def test_a_slot_that_nobody_serves_is_named() -> None:
    with pytest.raises(RedisConnectionError, match="no node of the cluster serves slot 12"):
        RoutedConnection((), 12)._owner("seed", ROWS)


async def test_without_nodes_there_is_nobody_to_ask() -> None:
    with pytest.raises(RedisConnectionError, match="no node of the cluster is known"):
        await RoutedConnection((), 1).connect()


async def test_an_open_connection_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoutedConnection, "is_connected", True)
    await RoutedConnection((), 1).connect()


def test_all_keys_of_a_run_are_in_the_slot_of_its_name() -> None:
    plain, tls = (routing(parse(f"{scheme}+cluster://one,two:1"), "run-7") for scheme in ("redis", "rediss"))
    assert plain == {
        "connection_class": RoutedConnection,
        "nodes": (("one", 6379), ("two", 1)),
        "slot": key_slot(b"run-7"),
    }
    assert tls["connection_class"] is RoutedSSLConnection
