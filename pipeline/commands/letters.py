"""`pipeline dead`: what to do with work that was given up."""

from __future__ import annotations

import click


@click.group()
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
