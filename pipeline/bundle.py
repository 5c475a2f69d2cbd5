"""One file for a bug report: what happened in a run, without secrets, and without its data unless asked for.

The file is a run directory in a tar archive: unpacked, every command that reads a run reads it. Prompts and
trajectories are left out by default; journals are then written anew over the emptied inputs, so that `replay --check`
still holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from actors.recorder import archive
from actors.recorder.archive import Writer
from actors.source.core import FetchedTask
from contracts.core import Delivered
from contracts.envelope import ContractError, decode, encode
from contracts.events import ActorBooted, TaskIssued
from pipeline import eventlog, rundir
from pipeline.errors import Exit, PipelineError
from pipeline.replay import journals
from pipeline.replay.recorded import Log, eras_of
from pipeline.replay.tracks import Track
from pipeline.rundir import BUNDLE, RunDir, config_of
from pipeline.runtime.journal import Journal, Record, fingerprint
from pipeline.secrets import Scrubber
from pipeline.why import load, render

FORMAT = 1
LOG_BYTES = 2 << 20
"""Newest bytes of each actor's log file that are taken."""
MOST_BYTES = 512 << 20
"""A larger archive is not unpacked."""
EMPTY = b"{}"
STACK_S = 10.0

_records = msgspec.msgpack.Decoder(Record)
_encoder = msgspec.msgpack.Encoder()


def make(run: RunDir, out: Path, *, payloads: bool = False, stacks: bool = True) -> dict[str, Any]:
    """Write the bundle of `run` to `out`; answers what is in it. Raises `PipelineError` if it can't be made.

    With `payloads`, prompts and trajectories are taken along. Of a damaged run it takes what can be read, and says
    under `damage` what could not.
    """
    if out.exists():
        raise PipelineError(f"{out} exists: choose another name, or remove it", Exit.USAGE)
    if not out.absolute().parent.is_dir():
        raise PipelineError(f"{out} can't be written: there is no folder {out.parent}; make it first", Exit.USAGE)
    scrub, damage = Scrubber(), list[str]()
    with tempfile.TemporaryDirectory(prefix="sluice-bundle-") as scratch:
        folder = Path(scratch) / "run"
        folder.mkdir()
        facts = _facts(run)
        _texts(run, folder, scrub)
        _events(run, folder, scrub, damage, payloads=payloads)
        _journals(run, folder, scrub, damage, payloads=payloads)
        _why(RunDir(folder) if damage else run, folder, scrub)
        if payloads and (run / "payloads").is_dir():
            shutil.copytree(run / "payloads", folder / "payloads", ignore=shutil.ignore_patterns("lock"))
        facts["stacks"] = _stacks(RunDir(folder), folder) if stacks else "not asked for"
        facts |= {"payloads": payloads, "hidden": scrub.hits, "format": FORMAT, "damage": damage}
        (folder / BUNDLE).write_text(json.dumps(facts, indent=2) + "\n")
        _pack(folder, out)
    return facts


def unpack(file: Path, folder: Path) -> RunDir:
    """Unpack a bundle into `folder`, which must be empty or new. Raises `PipelineError` if it is none, or hostile."""
    try:
        with tarfile.open(file) as tar:
            members = tar.getmembers()
            if sum(member.size for member in members) > MOST_BYTES:
                raise PipelineError(f"{file} holds more than {MOST_BYTES >> 20} MiB", Exit.USAGE)
            tar.extractall(folder, members, filter="data")
    except (tarfile.TarError, OSError) as error:
        raise PipelineError(f"{file} is no bundle: {error}", Exit.USAGE) from error
    return RunDir.open(folder / "run")


def to_test(run: RunDir, folder: Path, name: str, *, payloads: bool = False) -> tuple[Path, list[str]]:
    """Write a bundle and a regression test that replays it into `folder`; answers the test's path, and the damage."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise PipelineError(f"--to-test {name!r}: write lower-case letters, digits and '_'", Exit.USAGE)
    folder.mkdir(parents=True, exist_ok=True)
    test, file = folder / f"test_{name}.py", folder / f"{name}.tar.gz"
    if test.exists():
        raise PipelineError(f"{test} exists: choose another name", Exit.USAGE)
    facts = make(run, file, payloads=payloads, stacks=False)
    with tempfile.TemporaryDirectory() as scratch:
        unpacked = unpack(file, Path(scratch))
        found = load.explain(unpacked, config_of(unpacked))[1]
    cause = None if found.cause is None else (found.cause.code, found.cause.culprit)
    test.write_text(TEST.format(name=name, run=run.info().run, cause=cause))
    return test, facts["damage"]


TEST = '''"""Run {run}, recorded: its cores decide as they did, and its state is explained as it was."""

from __future__ import annotations

from pathlib import Path

from pipeline import bundle
from pipeline.rundir import config_of
from pipeline.replay.check import check
from pipeline.replay.recorded import Recorded
from pipeline.why import load

BUNDLE = Path(__file__).with_name("{name}.tar.gz")


def test_{name}_replays_as_recorded(tmp_path: Path) -> None:
    run = bundle.unpack(BUNDLE, tmp_path)
    assert check(Recorded.read(run, config_of(run))).divergences == ()


def test_{name}_is_explained(tmp_path: Path) -> None:
    run = bundle.unpack(BUNDLE, tmp_path)
    found = load.explain(run, config_of(run))[1].cause
    assert (None if found is None else (found.code, found.culprit)) == {cause!r}
'''


# --- what goes in ----------------------------------------------------------------------------------------------------


def _facts(run: RunDir) -> dict[str, Any]:
    info = run.info()
    here = {"platform": platform.platform(), "python": sys.version.split()[0], "cpus": os.cpu_count()}
    return {"run": info.run, "versions_of_run": info.versions, "versions_here": rundir.versions(), "host": here}


def _texts(run: RunDir, folder: Path, scrub: Scrubber) -> None:
    """Configuration, run.json, metrics, and the ends of the log files."""
    info = scrub.value(msgspec.json.decode((run / "run.json").read_bytes()))
    (folder / "run.json").write_bytes(msgspec.json.format(msgspec.json.encode(info), indent=2))
    (folder / "config.yaml").write_bytes(msgspec.yaml.encode(info["config"]))
    for path in [*sorted(run.logs.glob("*")), run / "metrics.jsonl"]:
        if path.is_file():
            target = folder / path.relative_to(run.path)
            target.parent.mkdir(exist_ok=True)
            target.write_text(scrub.text(_tail(path)))


def _tail(path: Path) -> str:
    """The last bytes of a file, from a whole line on."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_BYTES))
        data = file.read()
    return (data if size <= LOG_BYTES else data.partition(b"\n")[2]).decode("utf-8", "replace")


def _why(run: RunDir, folder: Path, scrub: Scrubber) -> None:
    case, found = load.explain(run, config_of(run))
    text = "\n".join(render.lines(found, case.stopped, ended=case.ended))
    (folder / "why.txt").write_text(scrub.text(text) + "\n")
    (folder / "why.json").write_text(scrub.text(msgspec.json.encode(found).decode()) + "\n")


def _events(run: RunDir, folder: Path, scrub: Scrubber, damage: list[str], *, payloads: bool) -> None:
    try:
        eventlog.check_kept(run)
    except PipelineError as error:
        damage.append(str(error))
    with _writer(run, folder, "events") as writer:
        for entry in archive.salvage(run.events, damage.append):
            try:
                envelope = decode(entry.stream, entry.data)
            except ContractError as error:
                damage.append(f"{run.events}: {entry.entry} of {entry.stream} can't be read: {error}")
                continue
            body = _clean(envelope.body, scrub, entry.data, payloads=payloads)
            data = entry.data
            if body is not envelope.body:
                data = encode(msgspec.structs.replace(envelope, body=body))
            writer.append(entry.stream, entry.entry, data)


def _clean(value: Any, scrub: Scrubber, data: bytes, *, payloads: bool) -> Any:
    """An event, or an input, without secrets and without its data; the same object if nothing had to go."""
    if not payloads:
        value = _emptied(value)
    return scrub.struct(value) if scrub.touches(data) else value


def _emptied(value: Any) -> Any:
    """Without prompts: what a producer hands over stays with the owner of the data.

    Payloads keep their sizes, for these decide too: blanks behind JSON are JSON, and compress to nothing.
    """
    if isinstance(value, TaskIssued | FetchedTask):
        return msgspec.structs.replace(value, payload=EMPTY.ljust(len(value.payload)))
    if isinstance(value, Delivered) and isinstance(value.envelope.body, TaskIssued):
        body = _emptied(value.envelope.body)
        return msgspec.structs.replace(value, envelope=msgspec.structs.replace(value.envelope, body=body))
    tasks = getattr(value, "tasks", None)
    if isinstance(tasks, tuple) and tasks and isinstance(tasks[0], FetchedTask):
        return msgspec.structs.replace(value, tasks=tuple(map(_emptied, tasks)))
    return value


def _journals(run: RunDir, folder: Path, scrub: Scrubber, damage: list[str], *, payloads: bool) -> None:
    """Journals over the cleaned inputs. Where the core answers as recorded, the hash becomes that of its new answer."""
    config = config_of(run)
    if not (run / "journals").is_dir():
        return
    with _writer(run, folder, "journals") as writer:
        for name, found in journals.group(archive.salvage(run / "journals", damage.append)).items():
            try:
                eras = eras_of(name, config, run.info().eras)
            except PipelineError as error:
                damage.append(f"the journal of {name}, {len(found)} steps: {error}")
                continue
            records = _unbroken(name, found, damage)
            track = Track(name, eras, records, Log([]))
            reader, journal = journals.Reader(track.core), Journal(track.core)
            old = new = track.core.initial()
            for record in records:
                core = track.core_of(record.seq)
                input = reader.input(record)
                clean = _clean(input, scrub, bytes(record.input), payloads=payloads)
                old, recorded = core.step(old, input, record.now)
                new, answered = core.step(new, clean, record.now)
                data = journal.record(record.seq, record.now, clean, answered)
                if fingerprint(recorded) != record.commands:
                    data = _encoder.encode(msgspec.structs.replace(_records.decode(data), commands=record.commands))
                writer.append(f"journal:{name}", f"{record.seq}-0", data)


def _unbroken(name: str, records: list[Record], damage: list[str]) -> list[Record]:
    """The records up to the first that is missing: those behind it can't be replayed."""
    for place, record in enumerate(records):
        if record.seq != place + 1:
            text = f"step {place + 1} of {name} is missing from its journal: the {len(records) - place} steps"
            damage.append(f"{text} from {record.seq} on are left out")
            return records[:place]
    return records


@contextlib.contextmanager
def _writer(run: RunDir, folder: Path, name: str) -> Iterator[Writer]:
    """A new archive, closed at the time at which the run's own one was."""
    try:
        closed = [segment.closed_at for segment in archive.read_index(run / name).segments]
    except archive.ArchiveError:
        closed = []
    writer = Writer(folder / name, 0.0)
    try:
        yield writer
    finally:
        writer.close(max(closed, default=0.0))
        (folder / name / "lock").unlink(missing_ok=True)


def _stacks(run: RunDir, folder: Path) -> dict[str, str]:
    """Stacks of the actors that live on this host, by py-spy if it is installed; answers how it went for each."""
    tool = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    pids: dict[str, int] = {}
    for _, envelope in eventlog.archived(run):
        body = envelope.body
        if isinstance(body, ActorBooted) and body.host == socket.gethostname():
            pids[body.actor] = body.pid
    outcome: dict[str, str] = {}
    target = folder / "stacks"
    for name, pid in pids.items():
        if not Path(f"/proc/{pid}").exists():
            outcome[name] = f"process {pid} does not exist"
        elif tool is None:
            outcome[name] = "py-spy is not installed: pip install py-spy"
        else:
            target.mkdir(exist_ok=True)
            outcome[name] = _dump(tool, pid, target / f"{name}.txt")
    return outcome


def _dump(tool: str, pid: int, file: Path) -> str:
    command = [tool, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=STACK_S, check=False)
    except (subprocess.TimeoutExpired, OSError) as error:
        return f"{type(error).__name__}: {error}"
    file.write_text(done.stdout)
    return "taken" if done.returncode == 0 else done.stderr.strip()[:300]


def _pack(folder: Path, out: Path) -> None:
    """Everything below `run/`, whole or not at all."""
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(draft, "w:gz") as tar:
            tar.add(folder, "run")
        os.replace(draft, out)
    finally:
        draft.unlink(missing_ok=True)
