"""Logs: JSON lines in the run directory, and no password anywhere."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from pipeline import logs


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    for handler in list(logging.getLogger().handlers):
        logging.getLogger().removeHandler(handler)
        handler.close()
    structlog.reset_defaults()


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_actor_logs_json_lines_into_its_own_file(tmp_path: Path) -> None:
    logs.configure(tmp_path, "buffer", console=False)
    structlog.get_logger().bind(actor="buffer").info("hello", n=3)
    logging.getLogger("library").warning("from %s", "outside")
    found = lines(tmp_path / "logs" / "buffer.jsonl")
    assert [(line["event"], line["level"]) for line in found] == [("hello", "info"), ("from outside", "warning")]
    assert found[0]["n"] == 3
    assert list(found[0])[:3] == ["timestamp", "level", "event"]


def test_a_restarted_actor_appends(tmp_path: Path) -> None:
    for boot in (1, 2):
        logs.configure(tmp_path, "buffer", console=False)
        structlog.get_logger().info("boot", boot=boot)
    assert [line["boot"] for line in lines(tmp_path / "logs" / "buffer.jsonl")] == [1, 2]


def test_passwords_are_redacted_in_fields_lists_and_tracebacks(tmp_path: Path) -> None:
    logs.configure(tmp_path, "x", console=False)
    log = structlog.get_logger()
    url = "redis://me:hunter2@host:6379/0"
    try:
        raise ValueError(f"can't reach {url}")
    except ValueError:
        log.exception("failed", url=url, tried=[url, {"deep": url}])
    written = (tmp_path / "logs" / "x.jsonl").read_text()
    assert "hunter2" not in written
    assert written.count("redis://me:***@host:6379/0") >= 4


@given(st.from_regex(r"[^\s:@/?#]{0,8}", fullmatch=True), st.from_regex(r"[^\s/?#]{1,12}", fullmatch=True))
def test_no_password_of_a_url_survives(user: str, password: str) -> None:
    marked = f"~secret~{password}"
    assert "~secret~" not in logs.redact(f"at redis://{user}:{marked}@host:1/0 now")


def test_what_holds_no_secret_is_left_alone() -> None:
    for text in ("unix:///tmp/x.sock?db=0", "redis://host:6379/0", "a@b.c: hi", "http://127.0.0.1:80/x?y=1"):
        assert logs.redact(text) == text
    assert logs.redact("unix:///x?password=abc&db=1") == "unix:///x?password=***&db=1"


def test_the_console_can_be_silenced_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(logs.CONSOLE, "none")
    logs.configure(None, "x")
    structlog.get_logger().info("quiet")
    monkeypatch.setenv(logs.CONSOLE, "auto")
    logs.configure(None, "x")
    structlog.get_logger().info("loud")
    printed = capsys.readouterr()
    assert (printed.out, json.loads(printed.err)["event"]) == ("", "loud")


def test_a_terminal_gets_readable_lines() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    logs.configure(None, "x", console=True, stream=terminal)
    structlog.get_logger().info("hello", url="redis://u:p@h")
    assert "hello" in terminal.getvalue()
    assert "***" in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")
    assert sys.stderr is not terminal


READER = """
import sys
from pathlib import Path
import structlog
from pipeline import logs
logs.configure(Path(sys.argv[1]), "driver", console=True, stream=sys.stdout)
log = structlog.get_logger()
log.info("one")
sys.stdin.readline()
for number in range(3):
    log.info("more", number=number)
"""


def test_a_reader_of_the_console_that_leaves_is_no_error_and_the_file_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", READER, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as program:
        assert program.stdout is not None
        assert "one" in program.stdout.readline()
        program.stdout.close()
        program.stdout = None
        _, said = program.communicate("go on\n", timeout=60)
    assert (program.returncode, said) == (0, "")
    assert len(lines(tmp_path / "logs" / "driver.jsonl")) == 4


def test_a_log_file_on_a_full_disk_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(tmp_path, "driver", console=False)
    (tmp_path / "logs" / "driver.jsonl").symlink_to("/dev/full")
    structlog.get_logger().info("one")
    assert capsys.readouterr().err == ""
    logging.getLogger().info("%d", "no number")
    assert "Logging error" in capsys.readouterr().err, "a mistake in a message is still told"
