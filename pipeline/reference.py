"""Reference pages made from the source: `python -m pipeline.reference` rewrites them; a test holds them to it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import config.schema
import contracts.events
from config.checks import describe, leaves
from contracts.envelope import STREAM_OF, STREAMS
from contracts.events import Event

HEADER = "<!-- Made by `python -m pipeline.reference` from the source. -->\n\n"
TABLE = "| key | type | default | |\n| --- | --- | --- | --- |\n"


def settings() -> str:
    """Every setting: key, type, default, meaning."""
    tree = ast.parse(Path(config.schema.__file__).read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    lines = [HEADER, "# Settings\n\n", "Set in a recipe, or as `key=value` behind it. Durations are seconds.\n"]
    sections = [("", "RunConfig"), *_sections(classes["RunConfig"], "")]
    nested = [
        ("rollout.attempts", "AttemptsConfig"),
        ("trainer.loss", "LossConfig"),
        ("trainer.megatron", "MegatronConfig"),
    ]
    known = leaves()
    for prefix, name in [*sections, *nested]:
        lines.append(f"\n## {prefix or 'Run'}\n\n{_doc(classes[name])}\n\n{TABLE}")
        lines += [
            f"| `{key}` | {describe(known[key])} | {_cell(default)} | {meaning} |\n"
            for field, annotation, default, meaning in _fields(classes[name])
            if (key := f"{prefix}.{field}".removeprefix(".")) in known
        ]
    return "".join(lines)


def events() -> str:
    """Every event kind: stream, fields, who emits it and what follows."""
    files = (Path(contracts.events.__file__).parent / "_events").glob("*.py")
    trees = [ast.parse(file.read_text()) for file in files]
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    lines = [
        HEADER,
        "# Events\n\n",
        "An entry of a stream is a msgpack `contracts.envelope.Envelope` around one of these.\n",
    ]
    for stream in STREAMS:
        lines.append(f"\n## {stream}\n")
        for event in (member for member in Event.__args__ if STREAM_OF[member] == stream):
            fields = ", ".join(f"`{name}`" for name, *_ in _fields(classes[event.__name__]))
            lines.append(f"\n### {kind_of(event)}\n\n{_doc(classes[event.__name__])}\n\nFields: {fields}\n")
    return "".join(lines)


def kind_of(event: type) -> str:
    """The tag of an event class."""
    return event.__struct_config__.tag  # type: ignore[attr-defined]


def _sections(node: ast.ClassDef, prefix: str) -> Iterator[tuple[str, str]]:
    for field, annotation, _, _ in _fields(node):
        if annotation.endswith("Config"):
            yield prefix + field, annotation


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str, str]]:
    """(name, annotation, default, docstring below it) of each field."""
    for item, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            default = "" if item.value is None else ast.unparse(item.value)
            meaning = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                meaning = " ".join(str(following.value.value).split())
            yield item.target.id, ast.unparse(item.annotation), default, meaning


def _doc(node: ast.ClassDef) -> str:
    return ast.get_docstring(node) or ""


def _cell(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


PAGES = {"settings.md": settings, "events.md": events}


def main(folder: Path = Path("docs/reference")) -> None:
    """Write the pages."""
    for name, page in PAGES.items():
        (folder / name).write_text(page())


if __name__ == "__main__":
    main()
