"""`network.host=auto` is one address on all servers of a node: the one that other nodes can reach."""

from __future__ import annotations

import socket

import pytest

from actors import network
from actors.network import address_of


def test_a_named_host_is_taken_as_it_is() -> None:
    assert address_of("203.0.113.7") == "203.0.113.7"
    assert address_of("localhost") == "localhost"


def test_auto_is_an_address_of_this_node_and_sends_nothing() -> None:
    with socket.create_server((address_of("auto"), 0)):
        pass


def test_auto_is_where_the_way_out_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "ELSEWHERE", ("127.0.0.1", 9))
    assert address_of("auto") == "127.0.0.1"


def test_without_a_way_out_the_host_name_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "ELSEWHERE", ("255.255.255.255", 9))
    monkeypatch.setattr(socket, "gethostbyname", lambda name: f"address of {name}")
    monkeypatch.setattr(socket, "gethostname", lambda: "me")
    assert address_of("auto") == "address of me"
