"""Commands that show a run, live or from its archive."""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.errors import Exit, PipelineError, writing

if TYPE_CHECKING:
    from pipeline.rundir import RunDir


class Seconds(click.FloatRange):
    """A length of time."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = super().convert(value, param, ctx)
        return seconds if math.isfinite(seconds) else self.fail(f"{value!r} is no length of time.", param, ctx)


SECONDS = Seconds(min=0)


def recorded(run: str | None) -> RunDir:
    """The run that a person means. Raises `PipelineError` if there is none, or its events were removed."""
    from pipeline import eventlog
    from pipeline.rundir import RunDir

    found = RunDir.find(run)
    eventlog.check_kept(found)
    return found


@click.command()
@click.argument("run", required=False)
@click.option("--stream", "streams", multiple=True, metavar="S", help="Only this stream; may be repeated.")
@click.option("--kind", "kinds", multiple=True, metavar="K", help="Only this kind, such as 'refit.*'; may be repeated.")
@click.option("--actor", "actors", multiple=True, metavar="A", help="Only events of this actor; may be repeated.")
@click.option("--cause", "causes", multiple=True, metavar="ID", help="Only this event and what followed from it.")
@click.option("--since", metavar="MOMENT", help="From then on: an entry, an event's id, a time, or +SECONDS.")
@click.option("--until", metavar="MOMENT", help="Up to then.")
@click.option("--follow", "-f", is_flag=True, help="Go on with new events until the run has finished.")
def log(
    run: str | None,
    streams: tuple[str, ...],
    kinds: tuple[str, ...],
    actors: tuple[str, ...],
    causes: tuple[str, ...],
    since: str | None,
    until: str | None,
    follow: bool,
) -> None:
    """Print a run's events, one JSON object a line, in the order in which they were committed."""
    from pipeline import eventlog, moments
    from pipeline.selection import Filter

    begin, end = (None if text is None else moments.parse(text) for text in (since, until))
    chosen = Filter(streams, kinds, actors, causes, begin, end)
    for line in eventlog.lines(recorded(run), chosen, follow=follow):
        sys.stdout.buffer.write(line + b"\n")
        if follow:
            sys.stdout.buffer.flush()


@click.command()
@click.argument("run", required=False)
def verify(run: str | None) -> None:
    """Hold a run's log to the pipeline's promises (docs/reference/invariants.md); exit code 1 if one is broken."""
    from pipeline.verify import told
    from pipeline.verify import verify as check

    directory = recorded(run)
    findings, summary = check(directory)
    if not summary.events:
        raise PipelineError(f"{directory.path} holds no events: nothing was archived", Exit.USAGE)
    for line in told(findings, str(directory.path)):
        click.echo(line)
    click.echo(" ".join(f"{name}={getattr(summary, name)}" for name in summary.__struct_fields__))
    raise click.exceptions.Exit(Exit.FAILED if findings else Exit.DONE)


@click.command()
@click.argument("run", required=False)
@click.option("--until", metavar="MOMENT", help="As it was then: an entry, an event's id, a time, or +SECONDS.")
@click.option("--now", metavar="MOMENT", help="Judge as of this time rather than now, or the archive's end.")
@click.option("--patience", metavar="S", type=SECONDS, default=15.0, show_default=True, help="Least length of a stall.")
@click.option("--json", "as_json", is_flag=True, help="The whole diagnosis as JSON.")
def why(run: str | None, until: str | None, now: str | None, patience: float, as_json: bool) -> None:
    """Say what a run waits for and why. Exit code 1 if it is stuck."""
    import msgspec

    from pipeline import moments
    from pipeline.rundir import config_of
    from pipeline.why import load, render

    directory = recorded(run)
    then, at = (moments.parse(text) if text else None for text in (until, now))
    case, found = load.explain(directory, config_of(directory), then, at, patience)
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
    else:
        for line in render.lines(found, case.stopped, ended=case.ended):
            click.echo(line)
    raise click.exceptions.Exit(Exit.FAILED if found.stuck else Exit.DONE)


@click.command()
@click.argument("run", required=False)
@click.option("--until", metavar="MOMENT", help="The moment that is shown; the end if left out.")
@click.option("--actor", metavar="NAME", help="Only this actor, and its whole state.")
@click.option(
    "--step", "steps", metavar="N", type=click.IntRange(1), is_flag=False, flag_value=1, help="Show N steps from there."
)
@click.option("--diff", "other", metavar="MOMENT", help="How states differ between --until and this moment.")
@click.option("--check", is_flag=True, help="Compare every command with the log; exit code 1 at a difference.")
@click.option("--drop", metavar="EVENT", help="What if this event had not come? Only those that took it are run again.")
@click.option("--delay", metavar="EVENT", help="What if it had come later? Only those that took it are run again.")
@click.option("--by", "by_s", metavar="S", type=SECONDS, help="How much later: 60 if left out.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def replay(run: str | None, **how: Any) -> None:
    """Fold a run once more through its real cores, from the archived journals; no GPU work is done again."""
    from pipeline.replay import command

    code, lines = command.run(recorded(run), command.Request(**how), partial(click.echo, err=True))
    for line in lines:
        click.echo(line)
    raise click.exceptions.Exit(code)


@click.command()
@click.argument("first")
@click.argument("second")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def diff(first: str, second: str, as_json: bool) -> None:
    """Find the first event, by causes, where the run SECOND leaves the way of the healthy run FIRST.

    Exit code 1 if they part.
    """
    import msgspec

    from pipeline import parting, reading
    from pipeline.replay.states import changes

    runs = [recorded(name) for name in (first, second)]
    one, two = (partial(reading.numbered, run) for run in runs)
    # where a run lies makes no difference to what it does
    ours, theirs = ({name: value for name, value in run.info().config.items() if name != "run_dir"} for run in runs)
    settings = list(changes(ours, theirs))
    found = parting.compare(one, two, parting.end_of(runs[1]), settings)
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
    else:
        for line in parting.lines(found, (runs[0].path.name, runs[1].path.name)):
            click.echo(line)
    raise click.exceptions.Exit(Exit.FAILED if found.parting else Exit.DONE)


@click.command()
@click.argument("run", required=False)
@click.option("--port", type=click.IntRange(1, 65535), help="Default: 8686, or any that is free.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--open", "show", is_flag=True, help="Open it in the browser.")
def ui(run: str | None, port: int | None, host: str, show: bool) -> None:
    """Show a run, live or archived, as a web page until Ctrl-C."""
    from pipeline.ui import command

    command.run(recorded(run), host, port, show=show)


@click.command()
@click.argument("run", required=False)
@click.option("-o", "out", type=click.Path(path_type=Path), help="Where to write; default trace.json in the run.")
@click.option("--epoch", type=click.IntRange(min=1), help="Only this refit, and a second before and after it.")
def trace(run: str | None, out: Path | None, epoch: int | None) -> None:
    """Write a run as a Chrome trace, to be opened at https://ui.perfetto.dev."""
    import msgspec

    from pipeline import eventlog
    from pipeline import trace as tracing

    directory = recorded(run)
    target = out or directory / "trace.json"
    try:
        made = tracing.chrome((envelope for _, envelope in eventlog.archived(directory)), epoch)
    except LookupError as error:
        raise PipelineError(f"--epoch={epoch}: {error}", Exit.USAGE) from error
    with writing(target):
        target.write_bytes(msgspec.json.encode(made))
    click.echo(f"{target}: {len(made['traceEvents'])} trace events")


@click.command()
@click.argument("run", required=False)
def top(run: str | None) -> None:
    """Watch a run on the terminal: actors, engines, streams, plots, events; keys move through time."""
    from pipeline.rundir import config_of

    if not sys.stdout.isatty():
        raise PipelineError("`pipeline top` draws on a terminal; in a pipe use `pipeline log --follow`", Exit.USAGE)
    from pipeline.top.app import Top
    from pipeline.top.feed import Feed

    directory = recorded(run)
    config = config_of(directory)
    Top(Feed(directory, config), config).run()


@click.command()
@click.argument("run", required=False)
@click.option("--prometheus", metavar="[HOST:]PORT", help="Serve /metrics there; without HOST at 127.0.0.1.")
@click.option("--otlp", metavar="URL", help="Base URL of an OpenTelemetry collector (OTLP over HTTP).")
@click.option("--wandb", metavar="PROJECT", help="Log each step to a Weights & Biases project.")
def export(run: str | None, prometheus: str | None, otlp: str | None, wandb: str | None) -> None:
    """Export a run's figures, live or from its archive, until the run has finished."""
    from pipeline.export import command
    from pipeline.rundir import config_of

    directory = recorded(run)
    targets = command.Targets(prometheus=prometheus, otlp=otlp, wandb=wandb)
    count = command.run(directory, config_of(directory), targets, click.echo)
    click.echo(f"{count:,} events read")


@click.command()
@click.argument("run", required=False)
@click.option("-o", "out", type=click.Path(path_type=Path), help="The file; default RUN.tar.gz here.")
@click.option("--payloads", is_flag=True, help="Take prompts and trajectories along.")
@click.option("--stacks/--no-stacks", default=True, show_default=True, help="Stacks of live actors, by py-spy.")
@click.option("--to-test", "test", metavar="NAME", help="Write a regression test that replays the run instead.")
@click.option("--tests", default="tests/regressions", type=click.Path(path_type=Path), help="Where --to-test writes.")
def bundle(run: str | None, out: Path | None, payloads: bool, stacks: bool, test: str | None, tests: Path) -> None:
    """Pack a run into one file for a bug report, without secrets."""
    from pipeline import bundle as bundling
    from pipeline.rundir import RunDir

    directory = RunDir.find(run)
    if test is not None:
        with writing(tests):
            path, damage = bundling.to_test(directory, tests, test, payloads=payloads)
        click.echo(path)
        _left_out(damage)
        return
    target = out or Path(f"{directory.path.name}.tar.gz")
    with writing(target):
        facts = bundling.make(directory, target, payloads=payloads, stacks=stacks)
    click.echo(f"{target}: {target.stat().st_size:,} bytes, {facts['hidden']} secrets hidden")
    _left_out(facts["damage"])
    click.echo("it holds " + ("prompts and trajectories" if payloads else "no prompts and no trajectories"))


def _left_out(damage: list[str]) -> None:
    for line in damage:
        click.echo(f"damaged, and left out: {line}")


@click.command()
@click.argument("run", required=False)
@click.option("--trajectories", is_flag=True, help="With prompts and answers of the newest groups, up to 4 MiB.")
def report(run: str | None, trajectories: bool) -> None:
    """Write a run's report.html from its archive."""
    from pipeline import report as reporting

    path = reporting.write(recorded(run), trajectories=trajectories)
    click.echo(f"{path}, which holds prompts and answers" if trajectories else path)
