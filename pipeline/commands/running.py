"""Commands that start, change or break runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipeline.errors import Exit, PipelineError


@click.command()
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
@click.option("--resume", metavar="RUN", help="Go on with a run that ended or was interrupted.")
def up(words: tuple[str, ...], resume: str | None) -> None:
    """Run a recipe (default: quickstart), with settings such as steps=200 or run_dir=PATH."""
    from actors.startup import absent, uncollected

    with uncollected(), absent("opentelemetry.sdk"):
        from pipeline import launcher

    recipe, overrides = _split(words)
    if resume is None:
        code = launcher.up("quickstart" if recipe is None else recipe, overrides)
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


@click.command()
def recipes() -> None:
    """List the shipped recipes."""
    from config.loading import recipes as shipped

    found = shipped()
    width = max(len(recipe.name) for recipe in found)
    for recipe in found:
        click.echo(f"{recipe.name:<{width}}  {recipe.description}")


@click.command()
@click.argument("name")
@click.option("--run", metavar="RUN", help="The run that it belongs to.")
def actor(name: str, run: str | None) -> None:
    """Run one actor in the foreground; whoever started it restarts it when it ends with an error."""
    from pipeline import single

    raise click.exceptions.Exit(single.run(name, run))


@click.command()
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


@click.command()
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


@click.group()
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
