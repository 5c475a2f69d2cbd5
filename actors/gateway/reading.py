"""From a model's text to what an agent reads, by a response template, with transformers' parser.

What that would swallow or mend is told here, as in `parsing`: a call that it can't read, or that is never closed, stays
in the content and is named, as is text in no field of the template; a field that comes twice is kept, both times.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from actors.gateway.parsing import Flaw, FlawKind, Parsed, Shown, ToolCall, names_of, tool_call, unknown
from actors.gateway.templates import CALLS, CONTENT, FAULTS, OUTSIDE, REASONING, Template, Tools


def read(template: Template, text: str, prefix: str, tools: Tools) -> Parsed:
    """Take `text`, special tokens and all, apart. `prefix`: see `Template.behind`. Without tools, calls are content."""
    return _Reading(template, text, prefix, tools).parsed()


class _Reading:
    """Feeds the text delimiter by delimiter, so that what fails is known by its place."""

    def __init__(self, template: Template, text: str, prefix: str, tools: Tools) -> None:
        self._template, self._tools = template, tools
        self._parser, prefix = template.parser(prefix, tools)
        self._text, self._begin = prefix + text, len(prefix)
        self._names = names_of(tools)
        self._said = _Said(template)
        self._calls: list[ToolCall] = []
        self._flaws: list[Flaw] = []
        self._spans: list[tuple[int, int]] = []
        """Delimiters that did their work, and whole calls, in order."""
        self._thoughts: list[tuple[int, int]] = []
        self._seen: set[str] = set()
        """Fields that had something in them."""
        self._at = 0
        """Where the last delimiter ended, or before."""
        self._open: tuple[str, int, int] | None = None
        """The explicit field that is open, where its delimiter begins and ends."""

    def parsed(self) -> Parsed:
        fed = self._begin
        self._take(self._parser.initial_events)
        for cut in self._cuts():
            if cut <= fed:
                continue
            piece, fed = self._text[fed:cut], cut
            try:
                self._take(self._parser.feed(piece))
            except FAULTS as error:
                fed = self._broken(error)
        try:
            self._take(self._parser.finalize()[1])
        except FAULTS as error:
            self._broken(error)
        self._missing()
        self._strays()
        reasoning = self._said.reasoning() or None
        flaws = sorted(self._flaws, key=lambda flaw: flaw.at)
        return Parsed(self._said.content(), reasoning, tuple(self._calls), tuple(flaws))

    def _cuts(self) -> list[int]:
        """The end of every delimiter, and one more character, by which a pattern knows that it has ended."""
        ends = {len(self._text)}
        for field in self._template.fields.values():
            for pattern in filter(None, (field.open_re, field.close_re)):
                for match in pattern.finditer(self._text):
                    ends |= {match.end(), min(match.end() + 1, len(self._text))}
        return sorted(ends)

    def _take(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            name = event["field"]
            if event["type"] == "region_open":
                self._said.open(name)
                if name in self._template.explicit:
                    self._open = (name, *self._opening(name))
                    self._at = self._open[2]
            elif event["type"] == "region_close":
                self._close(name, event["value"])
            elif events is not self._parser.initial_events:
                self._said.add(name, event["text"])

    def _opening(self, name: str) -> tuple[int, int]:
        match = self._template.fields[name].open_re.search(self._text, self._at)
        return (self._at, self._at) if match is None else match.span()

    def _closing(self, name: str, body: int) -> tuple[int, int] | None:
        """The delimiter that closes a field; none is due where the template has none: the end is one."""
        pattern, end = self._template.fields[name].close_re, len(self._text)
        if pattern is None:
            return end, end
        match = pattern.search(self._text, body)
        return None if match is None else match.span()

    def _close(self, name: str, value: Any) -> None:
        if name not in self._template.explicit:
            if name == OUTSIDE and (stray := self._said.outside()):
                self._flaw("malformed_answer", self._place(stray), f"{stray[:80]!r} is in no field of the template")
            return
        assert self._open is not None
        _, start, body = self._open
        closing, self._open = self._closing(name, body), None
        left, end = closing or (len(self._text),) * 2
        self._at = end
        if end <= self._begin and closing:
            return
        if name == CALLS:
            self._spans.append((start, end))
            self._called(value, start, end, closing is not None)
        else:
            self._spans += [(start, body), (left, end)]
            if name in REASONING:
                self._thought(name, start, body, left, closing is not None)
        self._seen.add(name)

    def _thought(self, name: str, start: int, body: int, left: int, closed: bool) -> None:
        self._thoughts.append((body, left))
        if not closed:
            self._flaw("malformed_thinking", start, f"{name} is never closed")
        if not self._text[max(body, self._begin) : left].strip():
            self._seen.discard(name)
        elif name in self._seen and not self._template.fields[name].repeats:
            self._flaw("malformed_thinking", start, f"{name} again, which the template has once")

    def _called(self, value: Any, start: int, end: int, closed: bool) -> None:
        if self._names is None:
            return self._keep(start, end)
        try:
            if not closed:
                raise ValueError("it is never closed")
            calls = calls_in(value)
        except ValueError as error:
            return self._refuse(error, start, end)
        if calls and CALLS in self._seen and not self._template.fields[CALLS].repeats:
            self._flaw("invalid_tool_call", start, f"{CALLS} again, which the template has once")
        for call in calls:
            if call.name not in self._names:
                self._flaw("invalid_tool_call", start, unknown(call.name, self._names))
        self._calls += calls

    def _broken(self, error: Exception) -> int:
        """The field that is open can't be read: it stays in the content, and reading begins anew behind it, there."""
        name, start, body = self._open or self._next()
        closing = self._closing(name, body)
        end = len(self._text) if closing is None else closing[1]
        self._said.drop(name)
        if self._names is None:
            self._keep(start, end)
        elif end > self._begin:
            self._refuse(ValueError("it is never closed") if closing is None else error.__cause__ or error, start, end)
        self._spans.append((start, end))
        self._open, self._at = None, end
        self._parser, _ = self._template.parser("", self._tools)
        return max(end, self._begin)

    def _next(self) -> tuple[str, int, int]:
        """The field whose opening comes first: the parser opened and closed it in one go."""
        found = []
        for name in self._template.explicit:
            match = self._template.fields[name].open_re.search(self._text, self._at)
            if match is not None:
                found.append((match.start(), -match.end(), name))
        start, end, name = min(found, default=(self._at, -self._at, CALLS))
        return name, start, -end

    def _refuse(self, error: BaseException, start: int, end: int) -> None:
        why = " ".join(str(error).split())[:200]
        self._flaw("invalid_tool_call", start, f"can't be read: {why}")
        self._keep(start, end)

    def _keep(self, start: int, end: int) -> None:
        self._said.keep(self._text[max(start, self._begin) : end])

    def _missing(self) -> None:
        for name in self._template.required:
            if name not in self._seen and not (name == CONTENT and self._said.content()):
                self._flaw("malformed_answer", len(self._text), f"no {name}, which the template requires")

    def _strays(self) -> None:
        """Delimiters that neither opened nor closed anything."""
        ends = self._template.fields[CONTENT].close_re
        for name, field in self._template.fields.items():
            if name not in (*REASONING, CALLS) or (name == CALLS and self._names is None):
                continue
            for pattern in filter(None, (field.open_re, field.close_re)):
                for match in pattern.finditer(self._text):
                    token, at = match.group(), match.end() - 1
                    inside = name == CALLS and _within(self._thoughts, at)
                    if (
                        not token
                        or at < self._begin
                        or inside
                        or _within(self._spans, at)
                        or (ends and ends.fullmatch(token))
                    ):
                        continue
                    kind: FlawKind = "invalid_tool_call" if name == CALLS else "malformed_thinking"
                    self._flaw(kind, match.start(), f"{token[:80]!r} without its other half")

    def _place(self, stray: str) -> int:
        return max(self._at, self._text.find(stray[:40], self._at))

    def _flaw(self, kind: FlawKind, at: int, what: str) -> None:
        self._flaws.append(Flaw(kind, max(0, at - self._begin), what))


def calls_in(value: Any) -> list[ToolCall]:
    """The calls that a field was parsed to. Raises `ValueError` saying what is wrong."""
    calls = []
    for item in value if isinstance(value, list) else [value]:
        function = item.get("function") if isinstance(item, dict) else None
        if not isinstance(function, dict):
            raise ValueError(f"a call is an object with a name, not {type(function or item).__name__}")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except RecursionError as error:
                raise ValueError("arguments are nested too deeply") from error
        calls.append(tool_call(function.get("name"), arguments))
    return calls


# --- an answer on its way --------------------------------------------------------------------------------------------


class Following:
    """What of an answer that grows is certain: nothing any more from a call on that can't be read."""

    def __init__(self, template: Template, prefix: str, tools: Tools) -> None:
        self._said = _Said(template)
        self._names = names_of(tools)
        self._parser: Any = template.parser(prefix, tools)[0]
        self.shown = Shown(None, "")

    def more(self, text: str) -> Shown:
        """Take what follows."""
        if text and self._parser is not None:
            try:
                certain = all(map(self._take, self._parser.feed(text)))
            except FAULTS:
                certain = False
            self._parser = self._parser if certain else None
            self._grow(self._said.reasoning(), self._said.content())
        return self.shown

    def end(self, answer: Parsed) -> Shown:
        """The answer is whole."""
        self._grow(answer.reasoning or "", answer.content)
        return self.shown

    def _grow(self, reasoning: str, content: str) -> None:
        """What was shown stays."""
        before = self.shown.reasoning or ""
        reasoning = reasoning if reasoning.startswith(before) else before
        content = content if content.startswith(self.shown.content) else self.shown.content
        self.shown = Shown(reasoning or None, content)

    def _take(self, event: Mapping[str, Any]) -> bool:
        """Whether what follows is certain too."""
        name, kind = event["field"], event["type"]
        if name == CALLS:
            return self._names is not None and (kind != "region_close" or _readable(event["value"]))
        if kind == "region_open":
            self._said.open(name)
        elif kind == "region_chunk":
            self._said.add(name, event["text"])
        elif name == OUTSIDE:
            self._said.outside()
        return True


def _readable(value: Any) -> bool:
    try:
        calls_in(value)
    except ValueError:
        return False
    return True


class _Said:
    """The text of each field so far, in the pieces that came between delimiters."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._pieces: dict[bool, list[tuple[str, bool]]] = {True: [], False: []}
        """Of thinking (True) and content: text, and whether it stays as it is."""
        self._outside = ""

    def open(self, name: str) -> None:
        if name not in (CALLS, OUTSIDE):
            self._pieces[name in REASONING].append(("", False))

    def add(self, name: str, text: str) -> None:
        if name == OUTSIDE:
            self._outside += text
        elif name != CALLS:
            pieces = self._pieces[name in REASONING]
            if not pieces or pieces[-1][1]:
                pieces.append(("", False))
            pieces[-1] = (pieces[-1][0] + text, False)

    def keep(self, text: str) -> None:
        """Content that no field has, as it is."""
        self._pieces[False].append((text, True))

    def drop(self, name: str) -> None:
        """What was added to a field that is kept as it is."""
        if name != CALLS and self._pieces[name in REASONING]:
            self._pieces[name in REASONING].pop()

    def outside(self) -> str:
        """End what is in no field, and answer it: it becomes content, if it is more than white space and markers."""
        text = self._template.bare(self._template.anchor.sub("", self._outside))
        self._outside = ""
        if not text.strip():
            return ""
        self.keep(text)
        return text.strip()

    def reasoning(self) -> str:
        name = next((name for name in REASONING if name in self._template.fields), None)
        return "" if name is None else self._text(name)

    def content(self) -> str:
        return self._text(CONTENT)

    def _text(self, name: str) -> str:
        field = self._template.fields[name]
        strip = field.content_args.get("strip", True)
        texts = [text if kept else self._template.bare(text) for text, kept in self._pieces[name in REASONING]]
        if field.join is not None:
            texts = [text.strip() for text in texts] if strip else texts
            return field.join.join(text for text in texts if text)
        return "".join(texts).strip() if strip else "".join(texts)


def _within(spans: Sequence[tuple[int, int]], at: int) -> bool:
    index = bisect_right(spans, (at, at + 1)) - 1
    return any(start <= at < end for start, end in spans[max(0, index - 1) : index + 1])
