"""Performs what the refit coordinator decides: its high-water mark on disk, probes, and its log."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors import atomic
from actors.refit.core import RefitCore
from actors.refit.state import FsyncHigh, HighWritten, Log, Watch
from config.schema import RunConfig
from contracts.core import Context, Fatal

if TYPE_CHECKING:
    from actors.refit.probes import Prober

HIGH = "epoch.high"
"""File of the run directory that holds the highest epoch ever used, as a decimal number."""


class EpochUsed(RuntimeError):
    """A later boot of the coordinator went on. This one ends; its successor finds out whether the store is behind."""


class RefitShell:
    """`contracts.core.Shell` of the coordinator."""

    def __init__(self, config: RunConfig, actor: str) -> None:
        self.core = RefitCore(
            config.refit, config.engine, config.gateway, config.launch, config.fleet, actor, config.trainer
        )
        self._fleet = config.fleet
        self._prober: Prober | None = None

    async def start(self, context: Context) -> None:
        """Raises `Fatal` when the store has forgotten an epoch that was used: its fencing tokens would repeat."""
        self._context = context
        self._high = Path(context.run_dir) / HIGH
        known = max(await context.register("epoch"), context.state().epoch)
        high = await asyncio.to_thread(read_high, self._high)
        if high > known:
            raise Fatal(
                f"the store knows epoch {known}, but {self._high} says that {high} was used: the store lost data, and "
                "engines could take an old epoch for a new one. Start a new run from the last checkpoint"
            )

    async def perform(self, command: Any) -> Any | None:
        match command:
            case FsyncHigh(epoch=epoch):
                await asyncio.to_thread(write_high, self._high, epoch)
                return HighWritten(epoch)
            case Watch():
                if self._prober is None:
                    from actors.refit.probes import Prober  # aiohttp, which a start need not wait for

                    self._prober = Prober(self._fleet, self._context.deliver)
                self._prober.watch(command)
                return None
            case Log(text=text, fields=fields, warning=warning):
                say = self._context.log.warning if warning else self._context.log.info
                say(text, **{name: round(x, 3) if isinstance(x, float) else x for name, x in fields.items()})
                return None
        raise TypeError(f"the refit coordinator can't perform {command!r}")

    def payload(self, handle: str) -> bytes:
        raise KeyError(handle)

    async def close(self) -> None:
        """Probe no more."""
        if self._prober is not None:
            await self._prober.close()


def read_high(path: Path) -> int:
    """The mark, 0 if none was written. Raises `Fatal` when the file holds something else."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return 0
    if not text.strip().isdecimal():
        raise Fatal(f"{path} should hold the highest epoch used, not {text[:40]!r}; restore it or start a new run")
    return int(text)


def write_high(path: Path, epoch: int) -> None:
    """Replace the mark durably. Raises `EpochUsed` when it is not below `epoch`."""
    high = read_high(path)
    if high >= epoch:
        raise EpochUsed(f"{path} says that epoch {high} was used, this boot is about to use {epoch}: it was replaced")
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path, f"{epoch}\n".encode(), durable=True)


def build(config: RunConfig, actor: str) -> RefitShell:
    return RefitShell(config, actor)
