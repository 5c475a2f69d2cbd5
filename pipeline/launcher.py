"""`pipeline up`: from a recipe to a run directory, whatever happens in between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from actors.trainer import checkpoint
from config import loading
from config.schema import RunConfig
from contracts.core import Entry
from pipeline import logs, preflight, resuming, rundir
from pipeline.broker import Broker, BrokerError, Happening, choose
from pipeline.bus import Bus, BusError, redact
from pipeline.cluster import Cluster
from pipeline.driver import Driver
from pipeline.errors import Exit, PipelineError
from pipeline.invocation import command
from pipeline.outside import Outside
from pipeline.progress import Lines, reporter
from pipeline.rundir import RunDir
from pipeline.runtime.clock import WallClock
from pipeline.verdict import Verdict, judge, log_file
from pipeline.view import View

KEPT = 5000
"""Steps, refits and mishaps that the driver's view holds."""
SIMULATED = (loading.RECIPES / "simulated.yaml").resolve()
AGAIN_S = 0.5
"""A signal that follows the first one sooner is the same once more: `timeout` tells a process, and then its group."""


def up(recipe: str, overrides: Sequence[str]) -> Exit:
    """Run `recipe` to its end; answers the exit code. Raises `PipelineError` for what is wrong before it begins."""
    config = rundir.load_config(recipe, overrides)
    if loading.find(recipe).resolve() == SIMULATED:
        raise PipelineError(
            f"recipe {recipe!r} has the sizes of a simulation and trains nothing: `{command('simulate')}` runs it, "
            f"with the same settings; the smallest run that trains is `{command('up')}`",
            Exit.USAGE,
        )
    config = preflight.absolute(config, Path.cwd())
    preflight.check(config)
    digest = loading.digest(config)
    info = rundir.describe(config.name, config, digest)
    path = None if config.run_dir is None else Path(config.run_dir)
    directory = RunDir.create(path, info, loading.dump(config))
    return Session(config, directory).run()


def resume(run: str, overrides: Sequence[str]) -> Exit:
    """Go on with a run that was interrupted or failed."""
    directory = RunDir.find(run)
    before = rundir.config_of(directory)
    written = resuming.written(directory, before)
    config = preflight.absolute(rundir.load_config(str(directory / "config.yaml"), overrides), Path.cwd())
    edited = {key: value for key, (_, value) in resuming.changes(before, written).items()}
    refused = resuming.refusals(before, config, edited.keys() - resuming.changes(written, config).keys())
    if refused:
        raise PipelineError("\n".join(refused), Exit.USAGE)
    preflight.check(config)
    directory.lock()
    directory.update(pid=os.getpid(), ended=None)
    return Session(config, directory, before=before, edited=edited).run()


class Session:
    """One driver's life in a run directory that it has locked."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDir,
        *,
        before: RunConfig | None = None,
        edited: Mapping[str, Any] | None = None,
    ) -> None:
        """`before`: the settings that a resumed run had so far; `edited`: those that differ in config.yaml."""
        self._config = config
        self._directory = directory
        self._before = before
        self._edited = edited or {}
        self._resumed = before is not None
        self._clock = WallClock()
        self._log = _logger(directory)
        self._reporter = reporter(config, self._log)
        self._view = View(keep=KEPT)
        self._driver: Driver | None = None
        self._signalled_at: float | None = None

    def run(self) -> Exit:
        """Broker, actors, report; everything that was started is ended again."""
        with _terminated():
            return self._run()

    def _run(self) -> Exit:
        last = self._replay() if self._resumed else {}
        if self._before is not None and self._config.steps > self._before.steps:
            self._view.training_finished = False
        done = judge(self._config, self._view, {}, 0.0, 0.0) if self._resumed else None
        if done is not None and done.code is Exit.DONE:
            return self._farewell(done)
        cluster, broker = self._processes(), None
        refused = not self._resumed
        try:
            cluster.prepare()
            broker = self._broker()
            refused = False
            last = self._recover(broker, last)
            self._directory.update(redis_url=_shareable(broker.url))
            with self._aside(), self._reporter:
                cluster.start()
                verdict = asyncio.run(self._drive(broker, cluster, last))
        except (KeyboardInterrupt, SystemExit):  # Ray turns SIGTERM into the latter while it starts
            verdict, refused = Verdict(Exit.INTERRUPTED, "interrupted", "interrupted before the run began"), False
        except BusError as error:
            verdict = Verdict(Exit.BROKER, "broker failed", f"the store: {error}")
        finally:
            cluster.stop()
            if broker is not None:
                broker.stop()
            elif refused:
                self._directory.withdraw()
        try:
            self._directory.update(ended=verdict.reason)
        except OSError as error:
            self._reporter.error(f"{self._directory / 'run.json'} can't be written: {error.strerror}")
        return self._farewell(verdict)

    # --- before ---

    def _processes(self) -> Cluster | Outside:
        if self._config.launch.mode == "external":
            return Outside(self._view, self._directory.events)
        return Cluster(self._config, self._directory.path)

    def _replay(self) -> dict[str, Entry]:
        """Fold the archive of the earlier sessions; answers the last entry of each stream."""
        from pipeline.eventlog import archived

        self._view = View(keep=KEPT)
        last: dict[str, Entry] = {}
        for entry, envelope in archived(self._directory):
            last[entry.stream] = entry
            self._view.apply(envelope)
        return last

    def _recover(self, broker: Broker, last: dict[str, Entry]) -> dict[str, Entry]:
        """Make store and files of a resumed run agree; answers the last entry of each stream that counts."""
        if self._before is None:
            return last
        if self._edited:
            self._reporter.note("config.yaml was edited, and counts", **self._edited)
        from pipeline.recovery import recover

        note = self._reporter.note
        rebuilt = asyncio.run(recover(broker.url, self._directory, self._before, self._config, last, note))
        if rebuilt:
            last = self._replay()
        return last

    def _broker(self) -> Broker:
        try:
            broker = choose(os.environ, self._directory.path, self._config.broker, self._happened)
        except (BrokerError, BusError) as error:
            raise PipelineError(str(error), Exit.BROKER) from error
        self._reporter.note("broker", server=broker.describe())
        return broker

    def _happened(self, happening: Happening) -> None:
        if happening.event == "started":
            self._reporter.note("broker is back", pid=happening.pid)
        else:
            self._reporter.error(f"broker {happening.event}", pid=happening.pid, code=happening.code)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Ray prints to standard output, which is ours: what it says goes to logs/ray.log."""
        with (self._directory.logs / "ray.log").open("a") as file, contextlib.redirect_stdout(file):
            yield

    # --- during ---

    async def _drive(self, broker: Broker, cluster: Cluster | Outside, last: dict[str, Entry]) -> Verdict:
        run = self._directory.info().run
        bus = await Bus.connect(broker.url, run, actor="driver", outage_s=self._config.broker.outage_s)
        loop = asyncio.get_running_loop()
        try:
            await bus.put_config(msgspec.json.encode(self._config))
            driver = Driver(self._config, run, bus, cluster, self._reporter, self._clock, self._view)
            self._driver = driver
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._signalled)
            self._reporter.note("run started", run=run, run_dir=str(self._directory.path), resumed=self._resumed)
            if self._config.launch.mode == "external":
                each = command("actor", "NAME", "--run", self._directory.path)
                self._reporter.note("waiting for actors", each=each)
            digest = loading.digest(self._config)
            cursors = {stream: entry.entry for stream, entry in last.items()}
            return await driver.run(broker.url, digest, cursors, resumed=self._resumed)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            await bus.close()

    def _signalled(self) -> None:
        """The first signal stops in order. A later one ends this process, and with it, at once, whatever it started."""
        assert self._driver is not None
        now = self._clock.now()
        if self._signalled_at is None:
            self._signalled_at = now
            self._reporter.note("stopping in order; press Ctrl-C again to kill the run")
            self._driver.interrupt()
            return
        if now - self._signalled_at < AGAIN_S:
            return
        self._reporter.__exit__(None, None, None)
        ((what, how),) = self._next().items()
        print(f"killed; {what}: {how}", file=sys.stderr, flush=True)
        os._exit(Exit.INTERRUPTED)

    # --- after ---

    def _farewell(self, verdict: Verdict) -> Exit:
        """Write the report and say where everything is."""
        from pipeline import report

        path = self._directory.path
        failed = verdict.code not in (Exit.DONE, Exit.INTERRUPTED)
        if failed:
            self._reporter.error(verdict.message, log=str(log_file(path, verdict)))
        else:
            self._reporter.note(verdict.message)
        places: dict[str, Any] = {"run_dir": str(path), "events": str(self._directory.events)}
        places |= {"metrics": str(path / "metrics.jsonl"), "tensorboard": str(path / "tensorboard")}
        saved = self._view.checkpoint
        if saved is not None and (mine := checkpoint.own(path / "checkpoints", saved.path)).is_dir():
            places["checkpoint"] = str(mine)
        if self._view.rows:
            try:
                places["report"] = str(report.write(self._directory))
            except (PipelineError, OSError) as error:
                self._reporter.error(f"no report: {error}")
        if verdict.code is not Exit.DONE:
            places |= self._next()
        self._say(places)
        return verdict.code

    def _next(self) -> dict[str, str]:
        """How to go on: a resume, after the repair that it needs, if any."""
        lost = self._view.restores.lost(self._directory / "checkpoints")
        if lost is None:
            return {"resume": self._resume_command()}
        return {"no_resume": f"{lost}; once it is put back from a copy: {self._resume_command()}"}

    def _resume_command(self) -> str:
        return command("up", "--resume", self._directory.path)

    def _say(self, places: dict[str, Any]) -> None:
        if isinstance(self._reporter, Lines):
            self._log.info("run ended", **places)
            return
        width = max(len(name) for name in places)
        for name, place in places.items():
            print(f"{name:<{width}}  {place}")


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM interrupts like Ctrl-C, from the start on; only the main thread can see to that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _logger(directory: RunDir) -> Any:
    """The driver's log goes to its file; without a terminal, also to standard output."""
    terminal = sys.stdout.isatty()
    logs.configure(directory.path, "driver", console=not terminal, stream=sys.stdout)
    return structlog.get_logger()


def _shareable(url: str) -> str | None:
    """What run.json may say of the store: a URL with a password is not written down."""
    return url if redact(url) == url else None
