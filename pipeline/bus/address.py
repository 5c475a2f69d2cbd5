"""Where the store is: REDIS_URL, parsed and made safe to print."""

from __future__ import annotations

import re
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from pipeline.bus.errors import BusError

FORMS = (
    "redis://user:password@host:6379/0, rediss://host:6379/0?ca=ca.pem&cert=client.pem&key=client.key, "
    "unix:///path/to/redis.sock?db=0, redis+sentinel://host:26379,host:26379/master?db=0 or "
    "redis+cluster://host:6379,host:6379 (rediss+cluster:// for TLS)"
)
_KINDS = {
    "redis": "tcp",
    "rediss": "tls",
    "unix": "unix",
    "redis+sentinel": "sentinel",
    "redis+cluster": "cluster",
    "rediss+cluster": "cluster",
}
_TLS = {"ca", "cert", "key"}
_OPTIONS = {
    "tcp": {"db"},
    "tls": {"db"},
    "unix": {"db"},
    "sentinel": {"db", "sentinel_user", "sentinel_password"},
    "cluster": set(),
}


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed REDIS_URL. `str()` shows it without passwords."""

    kind: Literal["tcp", "tls", "unix", "sentinel", "cluster"]
    text: str
    """The URL without passwords."""
    tls: bool = False
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    master: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = None
    options: dict[str, str] = {}

    def __str__(self) -> str:
        return self.text


def redact(url: str) -> str:
    """`url` without its passwords, also if it is malformed."""
    url = re.sub(r"://([^:@/]*):.*@", r"://\1:***@", url, flags=re.DOTALL)
    return re.sub(r"(password=)[^&]*", r"\1***", url)


def parse(url: str) -> Address:
    """Raises BusError naming REDIS_URL (passwords redacted), what is wrong with it, and the accepted forms."""
    try:
        return _parse(url)
    except ValueError as error:
        raise BusError(f"REDIS_URL={redact(url)}: {error}. Accepted forms: {FORMS}") from None


def _parse(url: str) -> Address:
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in _KINDS:
        raise ValueError(f"it starts with none of {', '.join(f'{scheme}://' for scheme in _KINDS)}")
    if "#" in url:
        raise ValueError("'#' must be percent-encoded, as %23")
    kind: Any = _KINDS[scheme]
    parts = urlsplit(url)
    userinfo, _, location = parts.netloc.rpartition("@")
    username, _, password = userinfo.partition(":")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    tls = scheme.startswith("rediss")
    allowed = _OPTIONS[kind] | (_TLS if tls else set())
    unknown = sorted(options.keys() - allowed)
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r}; known are {', '.join(sorted(allowed)) or 'none'}")
    path = unquote(parts.path)
    fields: dict[str, Any] = {}
    if kind == "unix":
        if location or not path.startswith("/"):
            raise ValueError("the socket path must be absolute, with three slashes")
        fields["path"] = path
    else:
        fields["hosts"] = tuple(_host(item, 26379 if kind == "sentinel" else 6379) for item in location.split(","))
        if kind == "sentinel":
            fields["master"] = path.removeprefix("/")
            if not fields["master"]:
                raise ValueError("the name of the master is missing after the last slash")
        elif kind == "cluster":
            if path not in ("", "/"):
                raise ValueError("a cluster has no databases and no master's name: nothing may follow the hosts")
        elif len(fields["hosts"]) > 1:
            raise ValueError("several hosts are for redis+sentinel:// and redis+cluster:// only")
        elif path not in ("", "/"):
            options.setdefault("db", path.removeprefix("/"))
    return Address(
        kind=kind,
        text=redact(url),
        tls=tls,
        db=_number("database", options.pop("db", "0")),
        username=unquote(username) or None,
        password=unquote(password) or None,
        options=options,
        **fields,
    )


def _host(item: str, default: int) -> tuple[str, int]:
    matched = re.fullmatch(r"(\[[0-9a-fA-F:.%a-z]+\]|[^:\[\]]+)(?::(.*))?", item)
    if matched is None:
        raise ValueError("the host is missing or malformed (percent-encode '/', '?' and '@' in passwords)")
    host, port = matched.groups()
    return host.strip("[]"), default if port is None else _number("port", port)


def _number(what: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text):
        raise ValueError(f"the {what} is not a number (percent-encode '/', '?' and '@' in passwords)")
    return int(text)
