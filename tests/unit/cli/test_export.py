"""`pipeline export`: what the log says reaches each sink once; a sink that can't be had is named at the start."""

from __future__ import annotations

import inspect
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from story import Story, trained  # pyright: ignore[reportMissingImports] - pytest puts its folder on the path

from contracts import events
from contracts.core import Entry
from contracts.envelope import encode
from pipeline.cli import main
from pipeline.errors import Exit, PipelineError
from pipeline.eventlog import gathered
from pipeline.export import command
from pipeline.export import figures as export_figures
from pipeline.export.figures import figures
from pipeline.export.prometheus import Prometheus
from pipeline.export.telemetry import Telemetry
from pipeline.rundir import RunDir
from pipeline.top.board import Board


def folded(story: Story) -> Board:
    board = Board()
    board.extend(gathered((Entry(e.stream, f"{n}-0", encode(e)), e, n) for n, e in enumerate(story.log, 1)))
    return board


def values(story: Story) -> dict[tuple[str, ...], float]:
    board = folded(story)
    return {(each.name, *each.labels.values()): each.value for each in figures(board, board.at)}


def test_figures_of_one_name_follow_each_other_and_have_the_same_labels() -> None:
    board = folded(trained(3))
    seen: dict[str, tuple[str, ...]] = {}
    last = ""
    for each in figures(board, board.at):
        assert each.name == last or each.name not in seen
        assert seen.setdefault(each.name, tuple(each.labels)) == tuple(each.labels)
        assert each.name.endswith("_total") == (each.kind == "counter")
        last = each.name


def test_figures_tell_what_the_log_tells() -> None:
    found = values(trained(3))
    assert found["sluice_step",] == 3
    assert found["sluice_events_total",] == len(trained(3).log)
    assert found["sluice_engine_state", "engine-0", "serving"] == 1
    assert found["sluice_engine_state", "engine-0", "dead"] == 0
    assert found["sluice_boots_total", "trainer"] == 1
    assert found["sluice_finished",] == 0


def test_counters_never_fall() -> None:
    story, last = trained(4), {}
    for count in range(len(story.log)):
        part = Story()
        part.log = story.log[: count + 1]
        board = folded(part)
        now = {(f.name, *f.labels.values()): f.value for f in figures(board, board.at) if f.kind == "counter"}
        assert all(now[key] >= value for key, value in last.items())
        last = now


# --- prometheus ---


def test_the_dashboard_asks_for_figures_that_exist() -> None:
    text = (Path(__file__).parents[3] / "docs" / "grafana" / "sluice.json").read_text()
    asked = set(re.findall(r"sluice_[a-z_]+", text))
    made = set(re.findall(r"_(?:gauge|count)\(\s*\"([a-z_]+)\"", inspect.getsource(export_figures)))
    made |= set(re.findall(r"\"([a-z_]+)\": \(\"", inspect.getsource(export_figures)))
    assert len(asked) > 15
    assert asked <= {f"sluice_{name}" for name in made}


def test_prometheus_scrapes_the_newest_figures() -> None:
    board = folded(trained(1))
    served = Prometheus("demo", board, Lock(), "127.0.0.1", 0)
    try:
        first = scraped(served.url)
        story = trained(2)
        board.__dict__.update(folded(story).__dict__)
        second = scraped(served.url)
    finally:
        served.close()
    assert (first["sluice_step"], second["sluice_step"]) == ((1.0, "demo"), (2.0, "demo"))
    assert second["sluice_refits_total"][0] >= 1
    with pytest.raises(OSError, match="refused"):
        scraped(served.url)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_figures_of_an_archive_are_served_until_a_signal(number: int, make_run: Callable[..., RunDir]) -> None:
    run = make_run(trained(2))
    words = [sys.executable, "-m", "pipeline", "export", str(run.path), "--prometheus", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        try:
            url = served.stdout.readline().removeprefix("prometheus: ").strip()
            assert "served until Ctrl-C" in served.stdout.readline()
            for _ in range(2):
                assert scraped(url)["sluice_step"][0] == 2.0
            assert served.poll() is None
            served.send_signal(number)
            assert f"{len(trained(2).log)} events read" in served.stdout.read()
            assert served.wait(60) == 0
        finally:
            served.kill()
    with pytest.raises(OSError, match="refused"):
        scraped(url)


def scraped(url: str) -> dict[str, tuple[float, str]]:
    with urllib.request.urlopen(url, timeout=20) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name: (sample.value, sample.labels["run"]) for sample in samples}


def test_a_port_in_use_is_named() -> None:
    served = Prometheus("demo", Board(), Lock(), "127.0.0.1", 0)
    port = served.url.rpartition(":")[2].partition("/")[0]
    try:
        with pytest.raises(PipelineError, match=f"--prometheus 127.0.0.1:{port} can't be served"):
            Prometheus("demo", Board(), Lock(), "127.0.0.1", int(port))
    finally:
        served.close()


# --- opentelemetry ---


def test_steps_and_refits_become_spans_of_their_length() -> None:
    story = trained(2)
    story.add(
        events.RefitRequested(epoch=9, version=3, step=3, engines=(), gateways=(), drain="finish", deadline_at=0.0)
    )
    story.add(events.RefitFailed(epoch=9, version=3, phase="transfer", reason="a rank is absent"), after=2.0)
    spans, reader, board = InMemorySpanExporter(), InMemoryMetricReader(), Board()
    telemetry = Telemetry("demo", board, Lock(), reader, spans)
    for number, envelope in enumerate(story.log, 1):
        rows = board.extend(gathered([(Entry(envelope.stream, f"{number}-0", encode(envelope)), envelope, number)]))
        telemetry.take(envelope, rows[0] if rows else None)
    metrics = reader.get_metrics_data()
    telemetry.close()
    found = spans.get_finished_spans()
    assert [dict(s.attributes or {})["step"] for s in found if s.name == "step"] == [1, 2]
    last = found[-1]
    assert (last.name, last.status.description) == ("refit", "transfer: a rank is absent")
    assert last.end_time is not None
    assert last.start_time is not None
    assert last.end_time - last.start_time == 2_000_000_000
    assert metrics is not None
    names = {metric.name for r in metrics.resource_metrics for s in r.scope_metrics for metric in s.metrics}
    assert {"sluice_step", "sluice_events_total"} <= names


def test_the_figures_are_made_once_a_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(board: Board, now: float) -> list[Any]:
        made.append(now)
        return list(figures(board, now))

    monkeypatch.setattr("pipeline.export.telemetry.figures", counted)
    board, reader = folded(trained(2)), InMemoryMetricReader()
    telemetry = Telemetry("demo", board, Lock(), reader, InMemorySpanExporter())
    telemetry._announce()
    before = len(made)
    for _ in range(3):
        data = reader.get_metrics_data()
        assert data is not None
        assert sum(len(s.metrics) for r in data.resource_metrics for s in r.scope_metrics) > 15
    assert len(made) - before == 3
    telemetry.close()


@pytest.fixture
def collector() -> Iterator[SimpleNamespace]:
    """A collector that keeps what is posted to it; `refuses` names a path that it answers with 400."""
    posted: list[tuple[str, bytes]] = []
    made = SimpleNamespace(posted=posted, refuses="")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(400 if self.path == made.refuses else 200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_port}"
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


def exported(*words: str) -> Result:
    return CliRunner().invoke(main, ["export", *words])


def test_an_archive_is_exported_to_a_collector(
    collector: SimpleNamespace, make_run: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_COMPRESSION", raising=False)
    done = exported(str(make_run(trained(2)).path), "--otlp", f"{collector.url}/")
    assert done.exit_code == 0, done.output
    assert f"{len(trained(2).log)} events read" in done.output
    traces = [ExportTraceServiceRequest.FromString(body) for path, body in collector.posted if path == "/v1/traces"]
    names = [s.name for t in traces for r in t.resource_spans for scope in r.scope_spans for s in scope.spans]
    assert names.count("step") == 2
    metrics = [ExportMetricsServiceRequest.FromString(b) for path, b in collector.posted if path == "/v1/metrics"]
    last = {m.name: m for r in metrics[-1].resource_metrics for scope in r.scope_metrics for m in scope.metrics}
    assert last["sluice_step"].gauge.data_points[0].as_double == 2


@pytest.mark.parametrize(("refuses", "lost"), [("/v1/traces", "[0-9]+ spans"), ("/v1/metrics", "the newest metrics")])
def test_an_export_that_the_collector_refused_has_failed(
    refuses: str, lost: str, collector: SimpleNamespace, make_run: Callable[..., RunDir]
) -> None:
    collector.refuses = refuses
    done = exported(str(make_run(trained(2)).path), "--otlp", collector.url)
    assert done.exit_code == Exit.FAILED
    assert re.search(f"--otlp {collector.url}: the collector did not take {lost}; why", done.output)


# --- weights & biases ---


class FakeRun:
    """What `wandb.init` answers, as far as it is used."""

    def __init__(self, step: int) -> None:
        self.step, self.url, self.dir, self.finished = step, None, "offline", False
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.lines.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.mark.parametrize(("logged", "versions"), [(0, [1, 2, 3]), (3, [3])])
def test_a_second_export_goes_on_where_the_first_ended(
    logged: int, versions: list[int], make_run: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, asked = FakeRun(logged), {}

    def init(**options: Any) -> FakeRun:
        asked.update(options)
        return made

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    run = make_run(trained(3))
    assert exported(str(run.path), "--wandb", "grpo").exit_code == 0
    assert [step for step, _ in made.lines] == versions
    assert made.lines[0][1]["version"] == versions[0]
    assert (asked["project"], asked["id"], asked["resume"]) == ("grpo", run.info().run, "allow")
    assert made.finished


# --- what can't be ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nowhere to export to: give --prometheus, --otlp or --wandb"),
        (("--prometheus", "nine"), "--prometheus 'nine': write PORT or HOST:PORT"),
        (("--prometheus", "²"), "--prometheus '²': write PORT or HOST:PORT"),
        (("--prometheus", "99999"), "--prometheus '99999': write PORT or HOST:PORT"),
        (("--otlp", "127.0.0.1:4318"), "--otlp '127.0.0.1:4318': write a base URL"),
    ],
)
def test_a_target_that_makes_no_sense_is_named(
    words: tuple[str, ...], message: str, make_run: Callable[..., RunDir]
) -> None:
    done = exported(str(make_run(trained(1)).path), *words)
    assert done.exit_code == Exit.USAGE
    assert message in done.output


def test_a_missing_package_is_named_and_what_was_opened_is_closed(
    make_run: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    done = exported(str(make_run(trained(1)).path), "--prometheus", "0", "--wandb", "grpo")
    assert done.exit_code == Exit.MISSING
    assert "the package 'wandb' is not installed" in done.output
    url = done.output.split("prometheus: ")[1].split()[0]
    with pytest.raises(OSError, match="refused"):
        scraped(url)


def test_an_address_is_at_loopback_unless_a_host_is_given() -> None:
    assert command.address("9109") == ("127.0.0.1", 9109)
    assert command.address("0.0.0.0:9109") == ("0.0.0.0", 9109)
    assert command.address("[::1]:9109") == ("::1", 9109)
