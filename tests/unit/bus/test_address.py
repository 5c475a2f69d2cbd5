"""REDIS_URL: every accepted form means one thing, every other is refused by name, and no password is ever shown."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from pipeline.bus import BusError, redact
from pipeline.bus.address import parse
from pipeline.bus.link import client


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        ("redis://host", {"kind": "tcp", "hosts": (("host", 6379),), "db": 0, "username": None, "password": None}),
        ("redis://host:7000/3", {"hosts": (("host", 7000),), "db": 3}),
        ("redis://host/?db=4", {"db": 4}),
        ("redis://host/3?db=4", {"db": 4}),
        ("redis://[::1]:7000", {"hosts": (("::1", 7000),)}),
        ("redis://:p%40ss@host", {"username": None, "password": "p@ss"}),
        ("redis://me:pass@host", {"username": "me", "password": "pass"}),
        ("rediss://host?ca=/ca.pem&key=/k", {"kind": "tls", "options": {"ca": "/ca.pem", "key": "/k"}}),
        ("unix:///tmp/a%20b.sock?db=1", {"kind": "unix", "path": "/tmp/a b.sock", "db": 1}),
        ("unix://me:pass@/tmp/x.sock", {"path": "/tmp/x.sock", "username": "me", "password": "pass"}),
        ("redis+cluster://me:p@one,two:1", {"kind": "cluster", "hosts": (("one", 6379), ("two", 1)), "tls": False}),
        ("rediss+cluster://one?ca=/ca", {"kind": "cluster", "tls": True, "options": {"ca": "/ca"}}),
        (
            "redis+sentinel://me:pass@one:1,two/mine?db=2&sentinel_user=u&sentinel_password=w",
            {
                "kind": "sentinel",
                "hosts": (("one", 1), ("two", 26379)),
                "master": "mine",
                "db": 2,
                "options": {"sentinel_user": "u", "sentinel_password": "w"},
            },
        ),
    ],
)
def test_an_accepted_form_means_one_thing(url: str, fields: dict[str, object]) -> None:
    address = parse(url)
    assert {name: getattr(address, name) for name in fields} == fields
    assert str(address) == redact(url)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("localhost:6379", "it starts with none of redis://"),
        ("http://localhost", "it starts with none of redis://"),
        ("redis://me:pa#ss@host", "'#' must be percent-encoded"),
        ("redis://", "the host is missing"),
        ("redis://host:secret", "the port is not a number"),
        ("redis://host:123456", "the port is not a number"),
        ("redis://host/zero", "the database is not a number"),
        ("redis://one,two", "several hosts are for redis\\+sentinel:// and redis\\+cluster:// only"),
        ("redis://host?timeout=3", "unknown option 'timeout'; known are db"),
        ("rediss://host?cafile=x", "known are ca, cert, db, key"),
        ("unix://relative/redis.sock", "the socket path must be absolute"),
        ("redis+cluster://one,two/3", "a cluster has no databases"),
        ("redis+cluster://one?ca=x", "unknown option 'ca'; known are none"),
        ("rediss+cluster://one?db=1", "unknown option 'db'; known are ca, cert, key"),
        ("redis+sentinel://host:1", "the name of the master is missing"),
        ("redis://[::1", "Accepted forms"),
    ],
)
def test_another_form_is_refused_by_name(url: str, text: str) -> None:
    with pytest.raises(BusError, match=f"REDIS_URL=.*{text}"):
        parse(url)


@given(st.text(st.sampled_from(string.printable + "ß€漢🔑"), min_size=4).map(lambda text: f"<{text}>"))
def test_no_password_is_ever_shown(password: str) -> None:
    for url in (
        f"redis://me:{password}@host:x",
        f"redis+sentinel://h/m?sentinel_password={password.replace('&', '')}&x=1",
    ):
        with pytest.raises(BusError) as raised:
            parse(url)
        assert password not in str(raised.value)


def test_a_client_takes_over_what_the_address_says() -> None:
    tls = client(parse("rediss://me:pass@host:7000/3?ca=/ca&cert=/cert&key=/key"), "run", "name").connection_pool
    assert tls.connection_class.__name__ == "LeanTLS"
    expected = {"host": "host", "port": 7000, "db": 3, "username": "me", "password": "pass", "ssl_ca_certs": "/ca"}
    expected |= {"ssl_certfile": "/cert", "ssl_keyfile": "/key", "protocol": 2}
    assert expected.items() <= tls.connection_kwargs.items()


def test_a_cluster_is_reached_through_the_master_of_the_runs_slot() -> None:
    pool = client(parse("rediss+cluster://me:pass@one,two:1?ca=/ca"), "run", "name").connection_pool
    assert pool.connection_class.__name__ == "RoutedSSLConnection"
    expected = {"nodes": (("one", 6379), ("two", 1)), "slot": key_slot(b"run"), "ssl_ca_certs": "/ca"}
    assert expected.items() <= pool.connection_kwargs.items()
