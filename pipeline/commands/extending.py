"""Commands for what plugs into a run, and for the installation."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.errors import Exit, writing


@click.command()
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


@click.group()
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


@click.command()
def version() -> None:
    """Print the versions of this installation and of what it stands on."""
    from pipeline.rundir import versions

    for package, number in versions().items():
        click.echo(f"{package} {number}")
