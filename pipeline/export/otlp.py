"""OTLP over HTTP: the exporters of `Telemetry`, which remember what the collector did not take."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import msgspec
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData, PeriodicExportingMetricReader
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from pipeline.errors import Exit, PipelineError
from pipeline.export.telemetry import CLOSE_S, Telemetry
from pipeline.top.board import Board

PERIOD_S = 10.0
"""Seconds between two exports of metrics."""


class Refused(msgspec.Struct):
    """What did not arrive: spans, which are gone, and the newest metrics, which stand for all before them."""

    spans: int = 0
    metrics: bool = False


class _Spans(OTLPSpanExporter):
    def __init__(self, endpoint: str, refused: Refused) -> None:
        super().__init__(endpoint, timeout=CLOSE_S)
        self._refused = refused

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        self._refused.spans += 0 if result is SpanExportResult.SUCCESS else len(spans)
        return result


class _Metrics(OTLPMetricExporter):
    def __init__(self, endpoint: str, refused: Refused) -> None:
        super().__init__(endpoint, timeout=CLOSE_S)
        self._refused = refused

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        result = super().export(metrics_data, timeout_millis, **kwargs)
        self._refused.metrics = result is not MetricExportResult.SUCCESS
        return result


class Otlp(Telemetry):
    """Exports to the collector at the base URL `endpoint`, such as http://127.0.0.1:4318."""

    def __init__(self, run: str, board: Board, lock: Lock, endpoint: str) -> None:
        base = endpoint.rstrip("/")
        self._endpoint, self._refused = base, Refused(metrics=True)
        exporter = _Metrics(f"{base}/v1/metrics", self._refused)
        reader = PeriodicExportingMetricReader(exporter, PERIOD_S * 1000)
        super().__init__(run, board, lock, reader, _Spans(f"{base}/v1/traces", self._refused))

    def close(self) -> None:
        """Send what is left. Raises `PipelineError` if the collector lacks spans, or the newest metrics."""
        super().close()
        lost = [f"{self._refused.spans:,} spans"] if self._refused.spans else []
        lost += ["the newest metrics"] if self._refused.metrics else []
        if lost:
            text = f"--otlp {self._endpoint}: the collector did not take {' and '.join(lost)}; why is said above"
            raise PipelineError(text, Exit.FAILED)
