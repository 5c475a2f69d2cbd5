"""What a resume puts right before any actor starts: a lost store, changed settings, and files that the log disowns."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors import atomic, registry
from actors.recorder import archive
from actors.recorder.actor import KEPT, PAYLOADS, Payload
from actors.recorder.ordering import number
from actors.refit.actor import HIGH, read_high
from actors.trainer import checkpoint
from config.schema import RunConfig
from contracts.core import Entry
from contracts.envelope import STREAMS, ContractError, decode
from contracts.events import PolicyReady, StepFinished
from pipeline.bus import Bus
from pipeline.bus.keys import Keys
from pipeline.bus.link import Link
from pipeline.bus.packing import pack
from pipeline.cores import core_of
from pipeline.errors import Exit, PipelineError
from pipeline.rebuild import Eras, NotRebuildable, Plan, plan
from pipeline.rundir import Era, RunDir
from pipeline.runtime.journal import Journal, JournalDiverged
from pipeline.runtime.machine import GROUP

REBUILDING = "rebuilding"
"""Key that is set while a store is filled: one that has it is not whole."""
CONNECT_S = 10.0
PAGE = 200
"""Commands sent in one round trip."""

Note = Callable[..., None]


class Recovery:
    """One resume of the run in `directory`, whose lock this process holds; `config` is what it ran with so far."""

    def __init__(self, directory: RunDir, config: RunConfig, link: Link, note: Note) -> None:
        self._directory = directory
        self._config = config
        self._link = link
        self._note = note
        self._info = directory.info()
        self._keys = Keys(self._info.run)

    async def run(self, last: Mapping[str, Entry]) -> bool:
        """Make store and files agree; answers whether the store was rebuilt. `last`: where each archived stream ends.

        Raises `PipelineError` when the store is lost and the archive can't replace it.
        """
        loss = await self._loss(last)
        if loss is not None:
            await self._rebuild(loss)
        newest = await self._newest_version(last)
        self._set_aside(newest)
        await self._remember_epoch()
        return loss is not None

    async def adopt(self, config: RunConfig) -> None:
        """Let the run go on under other settings: what they decide begins behind what the old ones decided.

        Every core's state is stored as it is now, so that no journalled step is ever taken again by another core.
        """
        seqs: dict[str, int] = {}
        fields = (field.decode() for field in await self._link.command("HKEYS", self._keys.fences))
        for name in sorted(field.removesuffix("/seq") for field in fields if field.endswith("/seq")):
            bus = Bus(self._link, self._info.run, name)
            await bus.boot()
            core = core_of(self._config, name)
            snapshot = await bus.snapshot()
            records = await bus.journal(after=0 if snapshot is None else snapshot[0])
            try:
                seq, state = Journal(core).fold(snapshot, records)
            except JournalDiverged as error:
                raise PipelineError(
                    f"{name}: {error}. Resume without new settings, under the release that run.json names", Exit.FAILED
                ) from error
            await self._put_state(name, seq, Journal(core).snapshot(state))
            seqs[name] = seq
        self._directory.adopt(config, Era(msgspec.to_builtins(self._config), seqs))

    # --- the store ---

    async def _loss(self, last: Mapping[str, Entry]) -> str | None:
        """Why the store is not the one that the archive was made from; None if it is."""
        if await self._link.command("EXISTS", self._keys.prefix + REBUILDING):
            return "an earlier rebuild of the store was interrupted"
        if not last:
            return None
        end = max(number(entry.entry) for entry in last.values())
        order = int(await self._link.command("GET", self._keys.order) or 0)
        if not order:
            return "the store holds nothing of this run"
        if order < end:
            return f"the store ends at event {order}, the archive at {end}"
        for stream, entry in last.items():
            found = await self._link.command("XRANGE", self._keys.stream(stream), entry.entry, entry.entry)
            if found and found[0][1][1] != entry.data:
                return f"event {entry.entry} of {stream} is another one in the store than in the archive"
        return None

    async def _rebuild(self, loss: str) -> None:
        self._note("rebuilding the store from the archive", reason=loss)
        begun = time.monotonic()
        with contextlib.ExitStack() as held:
            folders = [self._directory / name for name in ("payloads", "journals", "events")]
            for folder in folders:
                _hold(held, folder)
            wanted = self._plan(loss)
            payloads = self._payloads(wanted, loss)
            self._cut(wanted)
        await self._fill(wanted, payloads)
        self._note(
            "store rebuilt",
            events=wanted.cut,
            tasks_in_hand=sum(len(held.pending) for held in wanted.work.values()),
            payloads=len(payloads),
            seconds=round(time.monotonic() - begun, 3),
        )

    def _plan(self, loss: str) -> Plan:
        journals: dict[str, list[bytes]] = {}
        for entry in _read(self._directory / "journals"):
            stream, _, actor = entry.stream.partition(":")
            if stream == "journal":
                journals.setdefault(actor, []).append(entry.data)
        try:
            return plan(_read(self._directory.events), journals, self._cores(journals))
        except NotRebuildable as error:
            raise PipelineError(f"{loss}, and it can't be rebuilt: {error}", Exit.FAILED) from error

    def _cores(self, actors: Iterable[str]) -> dict[str, Eras]:
        """Of the run's actors, and of those that it had for a time only."""
        past = [(msgspec.convert(era.config, RunConfig), era.seqs) for era in self._info.eras]
        names = {*actors, *registry.names(self._config)}
        return {
            name: [
                *((seqs.get(name, 0), core_of(config, name)) for config, seqs in past),
                (None, core_of(self._config, name)),
            ]
            for name in names
            if name != "recorder"
        }

    def _payloads(self, wanted: Plan, loss: str) -> dict[str, bytes]:
        needed, found = set(wanted.payloads), dict[str, bytes]()
        decoder = msgspec.msgpack.Decoder(Payload)
        for entry in _read(self._directory / "payloads", {PAYLOADS}) if needed else ():
            payload = decoder.decode(entry.data)
            if payload.key in needed and payload.data is not None:
                found[payload.key] = payload.data
        if missing := sorted(needed - found.keys()):
            why = "" if self._config.recorder.payloads else " (it was recorded with recorder.payloads=false)"
            raise PipelineError(
                f"{loss}, and the archive lacks {len(missing)} of {len(needed)} trajectories that are not trained and "
                f"covered yet, such as {missing[0]}{why}: start a new run, with model.source={self._checkpoint()}",
                Exit.FAILED,
            )
        return found

    def _checkpoint(self) -> str:
        newest = checkpoint.latest(self._directory / "checkpoints")
        return "its newest checkpoint" if newest is None else str(newest)

    def _cut(self, wanted: Plan) -> None:
        """Take out of the archive what lies behind the cut: its numbers will be used again."""
        seqs = {f"journal:{actor}": seq for actor, (seq, _) in wanted.states.items()}
        archive.cut(self._directory.events, dict.fromkeys(STREAMS, wanted.cut))
        archive.cut(self._directory / "payloads", {PAYLOADS: wanted.cut})
        archive.cut(self._directory / "journals", seqs)
        cut_metrics(self._directory / "metrics.jsonl", wanted.version)
        (self._directory / KEPT).unlink(missing_ok=True)

    async def _fill(self, wanted: Plan, payloads: Mapping[str, bytes]) -> None:
        """Replace everything under the run's keys. Boots go beyond all that were used: who still lives is fenced."""
        keys = self._keys
        await self._link.command("SET", keys.prefix + REBUILDING, 1)
        await self._clear(keys.prefix + REBUILDING)
        commands: list[Sequence[Any]] = [["SET", keys.payload(key), pack(data)] for key, data in payloads.items()]
        commands += [["XADD", keys.stream(e.stream), e.entry, "e", e.data] for e in wanted.events]
        for stream, held in wanted.work.items():
            key = keys.stream(stream)
            commands.append(["XGROUP", "CREATE", key, GROUP, f"{held.delivered}-0", "MKSTREAM"])
            for at, owner in held.pending:
                commands.append(["XCLAIM", key, GROUP, owner, 0, f"{at}-0", "RETRYCOUNT", 1, "FORCE", "JUSTID"])
        for actor, (seq, state) in (wanted.states | self._begun(wanted)).items():
            commands.append(["HSET", keys.fences, f"{actor}/seq", seq])
            commands.append(["HSET", keys.snapshot(actor), "seq", seq, "state", state])
        commands += [["HSET", keys.fences, f"{actor}/boot", boot + 1] for actor, boot in wanted.boots.items()]
        commands += [
            ["HSET", keys.cursors, f"{actor}/{stream}", entry]
            for actor, cursors in wanted.cursors.items()
            for stream, entry in cursors.items()
        ]
        commands += [["HSET", keys.registers, name, value] for name, value in wanted.registers.items()]
        commands += [["SET", keys.order, wanted.cut], ["UNLINK", keys.prefix + REBUILDING]]
        for start in range(0, len(commands), PAGE):
            await self._link.pipeline(commands[start : start + PAGE])

    def _begun(self, wanted: Plan) -> dict[str, tuple[int, bytes]]:
        """First states, behind the steps that the log names: ids of events are made of steps, and are used once."""
        cores = {actor: core_of(self._config, actor) for actor in wanted.begun}
        return {actor: (wanted.begun[actor], Journal(core).snapshot(core.initial())) for actor, core in cores.items()}

    async def _clear(self, spare: str) -> None:
        pattern, cursor = self._keys.prefix.replace("[", "\\[") + "*", b"0"
        while True:
            cursor, found = await self._link.command("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            doomed = [key for key in found if key.decode() != spare]
            if doomed:
                await self._link.command("UNLINK", *doomed)
            if cursor in (b"0", 0):
                return

    async def _put_state(self, actor: str, seq: int, state: bytes) -> None:
        await self._link.command("HSET", self._keys.snapshot(actor), "seq", seq, "state", state)

    # --- files ---

    async def _newest_version(self, last: Mapping[str, Entry]) -> int:
        """The highest version that archive or store know."""
        since = "(" + last["policy"].entry if "policy" in last else "-"
        rows = await self._link.command("XRANGE", self._keys.stream("policy"), since, "+")
        found = [last["policy"].data] if "policy" in last else []
        newest = -1
        for data in [*found, *(fields[1] for _, fields in rows)]:
            with contextlib.suppress(ContractError):
                event = decode("policy", data).body
                if isinstance(event, PolicyReady | StepFinished):
                    newest = max(newest, event.version)
        return max(newest, self._archived_version())

    def _archived_version(self) -> int:
        newest = -1
        for entry in _read(self._directory.events, {"policy"}):
            with contextlib.suppress(ContractError):
                newest = max(newest, getattr(decode(entry.stream, entry.data).body, "version", -1))
        return newest

    def _set_aside(self, newest: int) -> None:
        """A checkpoint of a version that the log does not know: that number will be given to other weights."""
        for path in checkpoint.set_aside(self._directory / "checkpoints", newest):
            self._note("checkpoint set aside: the log does not know its version", path=str(path), newest=newest)

    async def _remember_epoch(self) -> None:
        """An epoch that was used and is forgotten by the store is not used again: everybody's next one is higher."""
        high = read_high(self._directory / HIGH)
        if high > int(await self._link.command("HGET", self._keys.registers, "epoch") or 0):
            await self._link.command("HSET", self._keys.registers, "epoch", high)


async def recover(
    url: str, directory: RunDir, config: RunConfig, changed: RunConfig, last: Mapping[str, Entry], note: Note
) -> bool:
    """Prepare store and files for a resume under `changed`; answers whether the store was rebuilt.

    Raises `PipelineError`, and `BusError` when the store can't be reached.
    """
    link = await Link.open(url, directory.info().run, "recovery", config.broker.outage_s, CONNECT_S)
    try:
        recovery = Recovery(directory, config, link, note)
        rebuilt = await recovery.run(last)
        if changed != config:
            await recovery.adopt(changed)
        return rebuilt
    finally:
        await link.close()


def cut_metrics(path: Path, newest: int) -> None:
    """Drop the rows of versions above `newest`."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and msgspec.json.decode(line)["version"] <= newest]
    if len(kept) < len(lines):
        atomic.write(path, b"".join(kept))


def _read(folder: Path, streams: set[str] | None = None) -> list[Entry]:
    try:
        return list(archive.read(folder, streams)) if folder.is_dir() else []
    except archive.ArchiveError as error:
        raise PipelineError(str(error), Exit.FAILED) from error


def _hold(held: contextlib.ExitStack, folder: Path) -> None:
    """Be the archive's writer for a moment: what an earlier one left open is closed."""
    try:
        writer = archive.Writer(folder, time.time())
    except archive.ArchiveError as error:
        raise PipelineError(str(error), Exit.FAILED) from error
    held.callback(lambda: writer.close(time.time()))
