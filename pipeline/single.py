"""One actor in the foreground: what a container or a service manager starts."""

from __future__ import annotations

import os
import sys

from actors.registry import UnknownActor, kind_of, names
from actors.startup import lean
from contracts.core import Fatal, Overdue
from pipeline.errors import Exit, PipelineError
from pipeline.rundir import RunDir, config_of


def run(name: str, run: str | None) -> Exit:
    """Run actor `name` until its run stops. Raises `PipelineError`; what a restart may cure has the code FAILED."""
    with lean():
        from pipeline.bus import BusError, BusUnavailable
        from pipeline.runtime import run_actor

    directory = RunDir.find(run)
    info = directory.info()
    ended = None if info.ended is None else f"the run has ended ({info.ended})"
    _check(name, directory, ended)
    url = os.environ.get("REDIS_URL") or info.redis_url
    if not url:
        raise PipelineError(f"{directory.path} does not say which store it uses: set REDIS_URL", Exit.BROKER)
    try:
        left = run_actor(name, url, info.run, directory.path)
    except UnknownActor as error:
        raise PipelineError(str(error), Exit.USAGE) from error
    except BusUnavailable as error:
        said = f"{name}: {error}" if ended is None else f"{name}: {ended}, and its store does not answer: {error}"
        raise PipelineError(said, Exit.BROKER) from error
    except BusError as error:
        raise PipelineError(f"{name}: {error}", Exit.BROKER) from error
    except Fatal as error:
        raise PipelineError(f"{name}: {error}", Exit.FAILED) from error
    except Overdue as error:  # the end of the interpreter would wait for the thread that hangs
        print(f"{name}: {error}; start it again", file=sys.stderr, flush=True)
        os._exit(Exit.FAILED)
    if left == "fenced":
        raise PipelineError(f"{name} runs elsewhere: a later start of it has taken over", Exit.FAILED)
    return Exit.DONE


def _check(name: str, directory: RunDir, ended: str | None) -> None:
    """Refuse a name that no actor of the run has, before the store is asked; how many engines there are, it knows."""
    config = config_of(directory)
    if kind_of(name) == "engine" != name:
        return
    if name not in names(config):
        said = str(UnknownActor.of(name, config))
        raise PipelineError(said if ended is None else f"{said}; {ended} besides", Exit.USAGE)
