"""An endpoint that Prometheus scrapes: the figures of the newest event, made when they are asked for."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from threading import Lock

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.recorder.metrics import Row
from contracts.envelope import Envelope
from contracts.events import Event
from pipeline.errors import Exit, PipelineError
from pipeline.export.figures import Figure, figures
from pipeline.top.board import Board

CLOSE_S = 5.0
"""How long scrapes under way may take when the endpoint closes."""


class Prometheus:
    """Serves `/metrics` at `host:port` until closed. `live`: the run goes on, so waits grow while nothing happens.

    Raises `PipelineError` if the port can't be had.
    """

    def __init__(self, run: str, board: Board, lock: Lock, host: str, port: int, *, live: bool = True) -> None:
        registry = CollectorRegistry()
        registry.register(_Figures(run, board, lock, live=live))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            code = Exit.MISSING if error.errno == errno.EADDRINUSE else Exit.USAGE
            raise PipelineError(f"--prometheus {host}:{port} can't be served: {error}", code) from error
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def take(self, envelope: Envelope[Event], row: Row | None) -> None:
        """A scrape looks at the board itself."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLOSE_S)


class _Figures(Collector):
    def __init__(self, run: str, board: Board, lock: Lock, *, live: bool) -> None:
        self._run, self._board, self._lock, self._live = run, board, lock, live

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            now = time.time() if self._live and not self._board.view.finished else self._board.at
            found = list(figures(self._board, now))
        return iter(families(found, self._run))


def families(found: list[Figure], run: str) -> list[Metric]:
    """The figures as Prometheus has them: one family a name, each sample labelled with the run."""
    made: dict[str, Metric] = {}
    for each in found:
        labels = {"run": run, **each.labels}
        family = made.get(each.name)
        if family is None:
            kind = CounterMetricFamily if each.kind == "counter" else GaugeMetricFamily
            family = made[each.name] = kind(each.name, each.help, labels=list(labels))
        family.add_sample(each.name, labels, each.value)
    return list(made.values())
