"""OpenTelemetry: figures as metrics, optimizer steps and refits as spans."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from threading import Lock

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Status, StatusCode

from actors.recorder.metrics import Row
from contracts import events
from contracts.envelope import Envelope
from contracts.events import Event
from pipeline.export.figures import Figure, figures
from pipeline.top.board import Board

ANNOUNCE_EVERY = 64
"""Events from one look for figures that are new to the next."""
CLOSE_S = 10.0
"""How long a last export may take."""


class Telemetry:
    """Exports to a collector; what it does not take in time is dropped there, and never holds up the reading."""

    def __init__(self, run: str, board: Board, lock: Lock, reader: MetricReader, spans: SpanExporter) -> None:
        resource = Resource.create({"service.name": "sluice", "service.instance.id": run})
        self._board, self._lock = board, lock
        self._meters = MeterProvider([reader], resource)
        self._meter = self._meters.get_meter("sluice")
        self._tracers = TracerProvider(resource=resource)
        self._tracers.add_span_processor(BatchSpanProcessor(spans))
        self._tracer = self._tracers.get_tracer("sluice")
        self._known: set[str] = set()
        self._found: dict[str, list[Observation]] = {}
        """Figure -> its values of this collection, until its instrument has taken them."""
        self._begun: dict[int, tuple[int, int]] = {}
        """Epoch -> (version, ns since the Unix epoch)."""

    def take(self, envelope: Envelope[Event], row: Row | None) -> None:
        """Close the spans that this event ends, and announce figures that are new."""
        if self._board.model.events % ANNOUNCE_EVERY == 1:
            self._announce()
        body, wall_ns = envelope.body, envelope.wall_ns
        match body:
            case events.RefitRequested():
                self._begun[body.epoch] = (body.version, wall_ns)
            case events.RefitCommitted():
                self._refit(
                    body.epoch, wall_ns, None, engines=len(body.engines), bytes=body.bytes, pause_s=body.pause_s
                )
            case events.RefitFailed():
                self._refit(body.epoch, wall_ns, f"{body.phase}: {body.reason}")
            case events.StepFinished():
                begin = wall_ns - int(body.seconds * 1e9)
                reward = {} if row is None or row.reward is None else {"reward": row.reward}
                self._span("step", begin, wall_ns, {"step": body.step, "version": body.version, **reward}, None)

    def _refit(self, epoch: int, end_ns: int, problem: str | None, **facts: float) -> None:
        version, begin = self._begun.pop(epoch, (0, end_ns))
        self._span("refit", begin, end_ns, {"epoch": epoch, "version": version, **facts}, problem)

    def _span(self, name: str, begin: int, end: int, facts: dict[str, float], problem: str | None) -> None:
        span = self._tracer.start_span(name, start_time=begin, attributes=facts)
        if problem is not None:
            span.set_status(Status(StatusCode.ERROR, problem))
        span.end(end)

    def _announce(self) -> None:
        """An instrument for each figure that the board has by now."""
        with self._lock:
            found = self._figures()
        for each in found:
            if each.name not in self._known:
                self._known.add(each.name)
                make = self._meter.create_observable_gauge
                if each.kind == "counter":
                    make = self._meter.create_observable_counter
                make(each.name, [self._observer(each.name)], description=each.help)

    def _observer(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        """A collection asks every instrument once; the first one that finds nothing left makes the figures of all."""

        def observe(_: CallbackOptions) -> Sequence[Observation]:
            if name not in self._found:
                with self._lock:
                    found = self._figures()
                self._found = {known: [] for known in tuple(self._known)}
                for each in found:
                    self._found.setdefault(each.name, []).append(Observation(each.value, dict(each.labels)))
            return self._found.pop(name)

        return observe

    def _figures(self) -> list[Figure]:
        now = self._board.at if self._board.view.finished else time.time()
        return list(figures(self._board, now))

    def close(self) -> None:
        """Send what is left; gives up after `CLOSE_S`."""
        self._announce()
        self._tracers.force_flush(int(CLOSE_S * 1000))
        self._tracers.shutdown()
        self._meters.shutdown(CLOSE_S * 1000)
