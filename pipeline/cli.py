"""The command `pipeline`. Exit codes are those of `pipeline.errors.Exit`.

Whatever a command needs is imported when it runs, so that `--help` and bad usage answer at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from pipeline.errors import Exit, PipelineError, writing


class Commands(click.Group):
    """Ends a command with the code and the message of its `PipelineError`."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PipelineError as error:
            click.echo(f"pipeline: {error}", err=True)
            raise click.exceptions.Exit(error.code) from error
        except KeyboardInterrupt as error:
            raise click.exceptions.Exit(Exit.INTERRUPTED) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Asynchronous reinforcement learning of language models, driven by events.

    RUN is a run directory, the name of one under runs/, or left out for the newest.
    """
    _check_installation()


def _check_installation() -> None:
    """A stray config.py beside the caller must not stand in for our packages. Raises `PipelineError` naming it."""
    from importlib.util import find_spec

    ours = Path(__file__).resolve().parent.parent
    for package in ("contracts", "actors", "config"):
        spec = find_spec(package)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin != ours / package / "__init__.py":
            raise PipelineError(
                f"the package {package!r} resolves to {origin or 'nothing'}, not to this installation in {ours}: "
                "rename that file, run from another directory, or set PYTHONSAFEPATH=1",
                Exit.MISSING,
            )


@main.command()
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
@click.option("--resume", metavar="RUN", help="Go on with a run that ended or was interrupted.")
def up(words: tuple[str, ...], resume: str | None) -> None:
    """Run a recipe (default: quickstart), with settings such as steps=200 or run_dir=PATH."""
    from pipeline import launcher

    recipe, overrides = _split(words)
    if resume is None:
        code = launcher.up(recipe or "quickstart", overrides)
    elif recipe is None:
        code = launcher.resume(resume, overrides)
    else:
        raise PipelineError(f"--resume goes on with the run's own recipe: leave out {recipe!r}", Exit.USAGE)
    raise click.exceptions.Exit(code)


def _split(words: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """The recipe, if the first word is one, and the overrides."""
    if words and ("=" not in words[0] or Path(words[0]).is_file()):
        return words[0], words[1:]
    return None, words


@main.command()
def recipes() -> None:
    """List the shipped recipes."""
    from config.loading import recipes as shipped

    found = shipped()
    width = max(len(recipe.name) for recipe in found)
    for recipe in found:
        click.echo(f"{recipe.name:<{width}}  {recipe.description}")


@main.command()
@click.argument("name")
@click.option("--run", metavar="RUN", help="The run that it belongs to.")
def actor(name: str, run: str | None) -> None:
    """Run one actor in the foreground; whoever started it restarts it when it ends with an error."""
    from pipeline import single

    raise click.exceptions.Exit(single.run(name, run))


@main.command()
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
    from pipeline.rundir import RunDir
    from pipeline.selection import Filter

    begin, end = (None if text is None else moments.parse(text) for text in (since, until))
    chosen = Filter(streams, kinds, actors, causes, begin, end)
    for line in eventlog.lines(RunDir.find(run), chosen, follow=follow):
        sys.stdout.buffer.write(line + b"\n")
        if follow:
            sys.stdout.buffer.flush()


@main.command()
@click.argument("run", required=False)
def verify(run: str | None) -> None:
    """Hold a run's archived log to the pipeline's promises (docs/reference/invariants.md)."""
    from pipeline.rundir import RunDir
    from pipeline.verify import verify as check

    directory = RunDir.find(run)
    findings, summary = check(directory)
    if not summary.events:
        raise PipelineError(f"{directory.path} holds no events: nothing was archived", Exit.USAGE)
    for finding in findings:
        click.echo(f"{finding.rule}: {finding.message} (at {finding.event or 'the end'})")
    click.echo(" ".join(f"{name}={getattr(summary, name)}" for name in summary.__struct_fields__))
    raise click.exceptions.Exit(Exit.FAILED if findings else Exit.DONE)


@main.command()
@click.argument("run", required=False)
@click.option("--until", metavar="MOMENT", help="As it was then: an entry, an event's id, a time, or +SECONDS.")
@click.option("--now", metavar="MOMENT", help="Judge as of this time rather than now, or the archive's end.")
@click.option("--patience", metavar="S", type=float, default=15.0, show_default=True, help="Least length of a stall.")
@click.option("--json", "as_json", is_flag=True, help="The whole diagnosis as JSON.")
def why(run: str | None, until: str | None, now: str | None, patience: float, as_json: bool) -> None:
    """Say what a run waits for and why. Exit code 1 if it is stuck."""
    import msgspec

    from pipeline import moments
    from pipeline.launcher import config_of
    from pipeline.rundir import RunDir
    from pipeline.why import load, render

    directory = RunDir.find(run)
    then, at = (moments.parse(text) if text else None for text in (until, now))
    case, found = load.explain(directory, config_of(directory), then, at, patience)
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
    else:
        for line in render.lines(found, case.stopped, ended=case.ended):
            click.echo(line)
    raise click.exceptions.Exit(Exit.FAILED if found.stuck else Exit.DONE)


@main.command()
@click.argument("run", required=False)
@click.option("--until", metavar="MOMENT", help="The moment that is shown; the end if left out.")
@click.option("--actor", metavar="NAME", help="Only this actor, and its whole state.")
@click.option(
    "--step", "steps", metavar="N", type=click.IntRange(1), is_flag=False, flag_value=1, help="Show N steps from there."
)
@click.option("--diff", "other", metavar="MOMENT", help="How states differ between --until and this moment.")
@click.option("--check", is_flag=True, help="Compare every command with the log; exit code 1 at a difference.")
@click.option("--drop", metavar="EVENT", help="What if this event had not come?")
@click.option("--delay", metavar="EVENT", help="What if this event had come later?")
@click.option("--by", "by_s", metavar="S", type=float, default=60.0, show_default=True, help="How much later.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def replay(run: str | None, **how: Any) -> None:
    """Fold a run once more through its real cores, from the archived journals; no GPU work is done again."""
    from pipeline.replay import command
    from pipeline.rundir import RunDir

    code, lines = command.run(RunDir.find(run), command.Request(**how))
    for line in lines:
        click.echo(line)
    raise click.exceptions.Exit(code)


@main.command()
@click.argument("first")
@click.argument("second")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def diff(first: str, second: str, as_json: bool) -> None:
    """Find the first event, by causes, where the run SECOND leaves the way of the healthy run FIRST.

    Exit code 1 if they part.
    """
    import msgspec

    from pipeline import eventlog, parting
    from pipeline.rundir import RunDir

    runs = [RunDir.find(name) for name in (first, second)]
    one, two = (eventlog.numbered(run) for run in runs)
    found = parting.compare(one, two, parting.end_of(runs[1]))
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
    else:
        for line in parting.lines(found, (runs[0].path.name, runs[1].path.name)):
            click.echo(line)
    raise click.exceptions.Exit(Exit.FAILED if found.parting else Exit.DONE)


@main.command()
@click.argument("run", required=False)
@click.option("--port", type=click.IntRange(1, 65535), help="Default: 8686, or any that is free.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--open", "show", is_flag=True, help="Open it in the browser.")
def ui(run: str | None, port: int | None, host: str, show: bool) -> None:
    """Show a run, live or archived, as a web page until Ctrl-C."""
    from pipeline.rundir import RunDir
    from pipeline.ui import command

    command.run(RunDir.find(run), host, port, show=show)


@main.command()
@click.argument("run", required=False)
@click.option("-o", "out", type=click.Path(path_type=Path), help="Where to write; default trace.json in the run.")
def trace(run: str | None, out: Path | None) -> None:
    """Write a run as a Chrome trace, to be opened at https://ui.perfetto.dev."""
    import msgspec

    from pipeline import eventlog
    from pipeline import trace as tracing
    from pipeline.rundir import RunDir

    directory = RunDir.find(run)
    target = out or directory / "trace.json"
    made = tracing.chrome(envelope for _, envelope in eventlog.archived(directory))
    with writing(target):
        target.write_bytes(msgspec.json.encode(made))
    click.echo(f"{target}: {len(made['traceEvents'])} trace events")


@main.command()
@click.argument("run", required=False)
def top(run: str | None) -> None:
    """Watch a run on the terminal: actors, engines, streams, plots, events; keys move through time."""
    from pipeline.launcher import config_of
    from pipeline.rundir import RunDir

    if not sys.stdout.isatty():
        raise PipelineError("`pipeline top` draws on a terminal; in a pipe use `pipeline log --follow`", Exit.USAGE)
    from pipeline.top.app import Top
    from pipeline.top.feed import Feed

    directory = RunDir.find(run)
    config = config_of(directory)
    Top(Feed(directory, config), config).run()


@main.command()
@click.argument("run", required=False)
@click.option("--prometheus", metavar="[HOST:]PORT", help="Serve /metrics there; without HOST at 127.0.0.1.")
@click.option("--otlp", metavar="URL", help="Base URL of an OpenTelemetry collector (OTLP over HTTP).")
@click.option("--wandb", metavar="PROJECT", help="Log each step to a Weights & Biases project.")
def export(run: str | None, prometheus: str | None, otlp: str | None, wandb: str | None) -> None:
    """Export a run's figures, live or from its archive, until the run has finished."""
    from pipeline.export import command
    from pipeline.launcher import config_of
    from pipeline.rundir import RunDir

    directory = RunDir.find(run)
    targets = command.Targets(prometheus=prometheus, otlp=otlp, wandb=wandb)
    count = command.run(directory, config_of(directory), targets, click.echo)
    click.echo(f"{count:,} events read")


@main.command()
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
            click.echo(bundling.to_test(directory, tests, test, payloads=payloads))
        return
    target = out or Path(f"{directory.path.name}.tar.gz")
    with writing(target):
        facts = bundling.make(directory, target, payloads=payloads, stacks=stacks)
    click.echo(f"{target}: {target.stat().st_size:,} bytes, {facts['hidden']} secrets hidden")
    click.echo("it holds " + ("prompts and trajectories" if payloads else "no prompts and no trajectories"))


@main.command()
@click.option("--seed", default=0, show_default=True, help="Same seed, same log, byte for byte.")
@click.option("--engines", default=2, show_default=True, type=click.IntRange(1, 512))
@click.option("--collectors", default=1, show_default=True, type=click.IntRange(1, 512))
@click.option("--steps", default=20, show_default=True, type=click.IntRange(1))
@click.option("--kills", default=0, show_default=True, type=click.IntRange(0), help="kill -9 of random actors.")
@click.option("--pauses", default=0, show_default=True, type=click.IntRange(0), help="SIGSTOP of random actors.")
@click.option("--out", type=click.Path(path_type=Path), help="Run directory to write: log, journals, configuration.")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
def simulate(
    seed: int, engines: int, collectors: int, steps: int, kills: int, pauses: int, out: Path | None, settings: Any
) -> None:
    """Run the whole protocol on virtual time: real cores, simulated engines, trainer and environments."""
    from config.loading import ConfigError, load
    from pipeline.preflight import sampler
    from pipeline.simulate import archive
    from pipeline.simulate.faults import Faults
    from pipeline.simulate.run import simulate as run

    sizes = [f"engine.count={engines}", f"launch.collectors={collectors}", f"steps={steps}"]
    try:
        config = load("simulated", [*sizes, *settings])
    except ConfigError as error:
        raise PipelineError("\n".join(error.problems), Exit.USAGE) from error
    sampler(config)
    result = run(config, seed, Faults(kills=kills, pauses=pauses))
    if out is not None:
        archive.write(result.world, config, out)
    for finding in result.findings:
        click.echo(f"{finding.rule}: {finding.message} (at {finding.event or 'the end'})")
    summary = result.summary
    click.echo(" ".join(f"{name}={getattr(summary, name)}" for name in summary.__struct_fields__))
    click.echo(f"finished={result.finished} virtual_s={result.seconds:.3f}")
    if result.halted is not None:
        click.echo(f"halted: {result.halted}")
    click.echo(
        f"cpu_s={result.cpu_s:.3f} cpu_ms_per_trajectory={result.cpu_ms_per_trajectory:.3f} "
        f"events_per_cpu_s={result.events_per_cpu_s:.0f}"
    )
    raise click.exceptions.Exit(Exit.DONE if result.ok else Exit.FAILED)


@main.command()
@click.argument("words", nargs=-1, required=True, metavar="[RUN] engines=N")
def scale(words: tuple[str, ...]) -> None:
    """Give a live run another number of engines; each joins or leaves with a refit."""
    from pipeline import scaling
    from pipeline.rundir import RunDir

    *run, word = words
    if len(run) > 1:
        raise PipelineError(f"one run and engines=N, not {' '.join(words)!r}", Exit.USAGE)
    engines = scaling.parse(word)
    click.echo(scaling.scale(RunDir.find(run[0] if run else None), engines))


@main.group()
def chaos() -> None:
    """Break a live run on purpose, to see that it holds."""


@chaos.command()
@click.argument("words", nargs=-1, required=True, metavar="[RUN] ACTOR")
@click.option(
    "--signal", "name", default="KILL", show_default=True, type=click.Choice(["KILL", "STOP", "CONT", "TERM"])
)
def kill(words: tuple[str, ...], name: str) -> None:
    """Send a signal to the process of one actor, on the host where it runs."""
    from pipeline.inject import inject
    from pipeline.rundir import RunDir

    *run, actor = words
    if len(run) > 1:
        raise PipelineError(f"one run and one actor, not {' '.join(words)!r}", Exit.USAGE)
    process = inject(RunDir.find(run[0] if run else None), actor, name)
    click.echo(f"SIG{name} to {actor}, process {process.pid}")


@main.command()
@click.argument("run", required=False)
def report(run: str | None) -> None:
    """Write a run's report.html from its archive."""
    from pipeline import report as reporting
    from pipeline.rundir import RunDir

    click.echo(reporting.write(RunDir.find(run)))


@main.group()
def dead() -> None:
    """Work that was given up: entries delivered too often, or that can't be read. Needs the run's store.

    LETTER is a name that `pipeline dead list` prints, such as tasks/1764444000123-0.
    """


_as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
_run = click.argument("run")
_letters = click.argument("letters", nargs=-1, metavar="LETTER...")
_all = click.option("--all", "everything", is_flag=True, help="Every dead letter of the run.")


@dead.command("list")
@click.argument("run", required=False)
@click.option("--stream", "streams", multiple=True, metavar="S", help="Only this work stream; may be repeated.")
@_as_json
def dead_list(run: str | None, streams: tuple[str, ...], as_json: bool) -> None:
    """List a run's dead letters: where, when, what, how often delivered, and why given up."""
    from pipeline import dead
    from pipeline.rundir import RunDir

    found = dead.letters(RunDir.find(run), streams)
    for letter in found:
        click.echo(dead.as_json(letter) if as_json else dead.line(letter))
    if not found and not as_json:
        click.echo("no dead letters")


@dead.command("show")
@_run
@_letters
@_all
@_as_json
def dead_show(run: str, letters: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Show dead letters with the event that each holds."""
    from pipeline import dead
    from pipeline.rundir import RunDir

    for letter in dead.find(dead.letters(RunDir.find(run)), letters, everything=everything):
        click.echo(dead.as_json(letter) if as_json else dead.details(letter) + "\n")


@dead.command("requeue")
@_run
@_letters
@_all
def dead_requeue(run: str, letters: tuple[str, ...], everything: bool) -> None:
    """Hand dead letters out again, as new work."""
    from pipeline import dead
    from pipeline.rundir import RunDir

    directory = RunDir.find(run)
    chosen = dead.find(dead.letters(directory), letters, everything=everything)
    for letter, entry in dead.requeue(directory, chosen):
        click.echo(f"{dead.name(letter)} requeued as {letter.stream} {entry}")


@dead.command("drop")
@_run
@_letters
@_all
def dead_drop(run: str, letters: tuple[str, ...], everything: bool) -> None:
    """Forget dead letters; the events stay in the run's archive."""
    from pipeline import dead
    from pipeline.rundir import RunDir

    directory = RunDir.find(run)
    for letter in dead.drop(directory, dead.find(dead.letters(directory), letters, everything=everything)):
        click.echo(f"{dead.name(letter)} dropped")


@main.command()
@click.argument("name", required=False)
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--python", metavar="PATH", help="Interpreter of the environment that has it, if not this one.")
def producers(name: str | None, settings: tuple[str, ...], python: str | None) -> None:
    """List the installed producers; with NAME, hold one to its contract (settings such as limit=5)."""
    from pipeline import producers as plugged

    if name is None:
        listed = plugged.installed()
        for each in listed:
            click.echo(f"{each.name}  {each.target}  ({each.distribution})  {each.problem or 'ok'}")
        raise click.exceptions.Exit(Exit.FAILED if any(each.problem for each in listed) else Exit.DONE)
    failed = 0
    for check, problem in plugged.check(name, settings, python):
        click.echo(f"{'FAIL' if problem else 'ok  '}  {name} {check}{': ' if problem else ''}{problem}")
        failed += bool(problem)
    raise click.exceptions.Exit(Exit.FAILED if failed else Exit.DONE)


@main.group()
def new() -> None:
    """Write the beginnings of something of your own."""


@new.command()
@click.argument("name")
@click.option("--dir", "directory", default=".", type=click.Path(path_type=Path), help="Where its folder goes.")
@click.option("--multi-turn", is_flag=True, help="An environment that drives whole episodes.")
def producer(name: str, directory: Path, multi_turn: bool) -> None:
    """Write a package with an environment, its tests and its registration, ready to be installed."""
    from pipeline import scaffold

    with writing(directory):
        for path in scaffold.producer(name, directory, multi_turn=multi_turn):
            click.echo(path)


@main.command()
def version() -> None:
    """Print the versions of this installation and of what it stands on."""
    from pipeline.rundir import versions

    for package, number in versions().items():
        click.echo(f"{package} {number}")
