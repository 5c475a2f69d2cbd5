"""Taking secrets out of what leaves a machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import msgspec

HIDDEN = "***"
NAMES = re.compile(
    r"secret|passw(or)?d|passwd|(^|[_-])token$|api_?key|access_?key|credential|private_?key|authorization",
    re.IGNORECASE,
)
"""Names of settings and environment variables whose values are secret. `max_new_tokens` and the like are none."""
PATTERNS = (
    re.compile(r"(?<=://)[^/\s:@\"']*:[^/\s@\"']+(?=@)"),
    re.compile(r"\b(?:sk|pk|hf|ghp|gho|glpat|xox[abp])[-_][A-Za-z0-9_-]{16,}"),
    re.compile(r"\bAKIA[0-9A-Z]{16}\b"),
    re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/=-]{12,}"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL),
)
"""Users and passwords in URLs, keys of well-known services, bearer tokens, private keys."""
SHORTEST = 8
"""A value of the environment that is shorter is not looked for elsewhere: it would hit words."""


class Scrubber:
    """Hides secrets: what looks like one, and the values of this environment's variables that are named like one."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        found = {value for name, value in environment.items() if _secret(name) and len(value) >= SHORTEST}
        self._values = sorted(found, key=len, reverse=True)
        self.hits = 0

    def text(self, text: str) -> str:
        """The text without secrets."""
        for value in self._values:
            if value in text:
                self.hits += text.count(value)
                text = text.replace(value, HIDDEN)
        for pattern in PATTERNS:
            text, count = pattern.subn(HIDDEN, text)
            self.hits += count
        return text

    def touches(self, data: bytes) -> bool:
        """Whether `text` would change anything in these bytes."""
        text = data.decode("utf-8", "replace")
        return any(value in text for value in self._values) or any(pattern.search(text) for pattern in PATTERNS)

    def value(self, value: Any, name: str = "") -> Any:
        """A JSON-like value: strings are scrubbed, and whatever has a secret's name is hidden."""
        if isinstance(value, dict):
            return {key: self.value(each, str(key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(each, name) for each in value]
        if _secret(name) and value not in (None, "", 0, False) and not isinstance(value, bool):
            self.hits += 1
            return HIDDEN
        return self.text(value) if isinstance(value, str) else value

    def struct(self, value: Any) -> Any:
        """A tree of structs and tuples with every string scrubbed."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, tuple):
            return tuple(self.struct(each) for each in value)
        if isinstance(value, dict):
            return {key: self.struct(each) for key, each in value.items()}
        if isinstance(value, msgspec.Struct):
            changes = {field: self.struct(getattr(value, field)) for field in value.__struct_fields__}
            return msgspec.structs.replace(value, **changes)
        return value


def _secret(name: str) -> bool:
    return bool(NAMES.search(name))
