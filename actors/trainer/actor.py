"""Performs what the trainer's core decides: a thread each for the policy, offers, a transfer and old checkpoints.

The event loop is never blocked: training, saving and loading run on the policy's thread, a broadcast on a thread that
may be abandoned at its deadline, so that a step and a transfer overlap. What hangs on the policy's thread, such as a
kernel or a disk, ends the process at its deadline.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from actors.startup import uncollected
from actors.trainer.core import TrainerCore
from actors.trainer.state import (
    Abandon,
    Load,
    Loaded,
    LoadFailed,
    Offer,
    Offered,
    Prune,
    Save,
    Saved,
    Send,
    Sent,
    Train,
    Trained,
    TransferBroke,
    Unpruned,
)
from config import nccl
from config.schema import RunConfig
from contracts import plan
from contracts.core import ARCHIVED_CHECKPOINT, Context, Fatal, Overdue
from contracts.policy import PolicyBackend
from contracts.trajectory import decode

T = TypeVar("T")

MARGIN_S = 10.0
"""A process of several ranks has these deadlines of its own, and then says more."""
PRUNE_S = 300.0
"""Longest wait for the removal of old checkpoints."""
LEAVE_S = 10.0
"""Longest wait for it at the end."""
COPIES = 2
"""Versions whose frozen copy is kept: one that may be in transfer, one that the next refit takes."""


class TrainerShell:
    """Rank 0 of the policy; `contracts.core.Shell`."""

    def __init__(self, config: RunConfig) -> None:
        self.core = TrainerCore(config)
        self._config = config
        self._policy: PolicyBackend | None = None
        self._policy_thread = ThreadPoolExecutor(1, thread_name_prefix="policy")
        self._offer_thread = ThreadPoolExecutor(1, thread_name_prefix="offer")
        """One that is late must not replace a later one, so each begins when those before it are over."""
        self._copies: dict[int, list[tuple[str, Any]]] = {}
        self._plan: tuple[Any, str] = (None, "")
        """Buckets of the last offer, and the handle of their plan."""
        self._plans: dict[str, bytes] = {}
        self._pruning: Future[Any] | None = None
        self._overdue = False

    async def start(self, context: Context) -> None:
        with uncollected():
            from actors.refit.transports import choice
            from actors.trainer import backend

        self._context = context
        self._checkpoints = Path(context.run_dir) / "checkpoints"
        try:
            backend.check(self._config.trainer)
            self._sender = choice.sender(self._config)
        except (backend.BackendError, RuntimeError) as error:
            raise Fatal(str(error)) from error
        transport = self._config.refit.transport
        context.log.info("transport", transport=transport, settings=choice.settings(self._config))

    async def perform(self, command: Any) -> Any | None:
        match command:
            case Load():
                what = f"load of version {command.version}"
                return await self._on_policy_thread(what, lambda: self._load(command), "start_deadline_s")
            case Train():
                return await self._train(command)
            case Save():
                return await self._on_policy_thread(f"save of step {command.step}", lambda: self._save(command))
            case Prune():
                return await self._prune()
            case Offer():
                return await self._offer(command)
            case Send():
                return await self._send(command)
            case Abandon():
                await asyncio.to_thread(self._sender.abandon, command.epoch, command.reason)
                return None
        raise TypeError(f"the trainer can't perform {command!r}")

    def payload(self, handle: str) -> bytes:
        return self._plans[handle]

    async def close(self) -> None:
        for thread in (self._policy_thread, self._offer_thread):
            thread.shutdown(wait=False, cancel_futures=True)
        if self._overdue:  # what hangs may be the device, and then so would this
            return
        if self._pruning is not None:
            await asyncio.wait({asyncio.wrap_future(self._pruning)}, timeout=LEAVE_S)
        if hasattr(self, "_sender"):  # not if the start failed
            self._sender.close()
        if self._policy is not None:
            await asyncio.to_thread(self._policy.close)

    async def _on_policy_thread(self, what: str, work: Callable[[], T], *also: str) -> T:
        """Bounded by trainer.step_deadline_s, the settings `also`, and a margin in which ranks say which of them hangs.

        Raises `Overdue`.
        """
        settings = ("step_deadline_s", "export_deadline_s", *also)
        limit = sum(getattr(self._config.trainer, setting) for setting in settings) + MARGIN_S
        future = asyncio.get_running_loop().run_in_executor(self._policy_thread, work)
        done, _ = await asyncio.wait({future}, timeout=limit)
        if not done:
            self._overdue = True
            named = " + ".join(f"trainer.{setting}" for setting in settings)
            raise Overdue(f"{what}: not done in {limit:g} s ({named} + {MARGIN_S:g})")
        return future.result()

    # --- policy ---

    def _load(self, command: Load) -> Loaded | LoadFailed:
        with uncollected():
            from actors import models
            from actors.trainer import backend, checkpoint

        config = self._config
        started = time.perf_counter()
        try:
            model_dir = models.resolve(config.model.source, models.cache_dir(), config.model.params)
        except models.ModelError as error:
            raise Fatal(f"model.source={config.model.source!r}: {error}") from error
        if self._policy is not None:  # its checkpoint was damaged
            self._policy.close()
        try:
            with uncollected():  # a model's own module is imported when it is made
                self._policy = backend.open_policy(backend.job(config, model_dir))
        except backend.BackendError as error:
            raise Fatal(str(error)) from error
        if command.path is not None:
            try:
                self._policy.load(checkpoint.own(self._checkpoints, command.path))
            except checkpoint.CheckpointError as error:
                self._context.log.error("checkpoint damaged", path=command.path, reason=str(error))
                return LoadFailed(version=command.version, reason=str(error))
        self._freeze(command.version)
        self._context.log.info(
            "policy loaded", version=command.version, path=command.path, seconds=round(time.perf_counter() - started, 3)
        )
        return Loaded(version=command.version)

    async def _train(self, command: Train) -> Trained:
        from actors.trainer import batching

        keys = [sample.payload.key for group in command.batch.groups for sample in group.samples]
        payloads = await self._context.payloads(keys)

        def work() -> Trained:
            assert self._policy is not None
            started = time.perf_counter()
            trajectories = dict(zip(keys, map(decode, payloads), strict=True))
            chosen = batching.samples(command.batch, trajectories, self._config.trainer.loss)
            metrics = dict(self._policy.train_step(chosen))
            self._freeze(command.version)
            tokens = sum(len(sample.ids) for sample in chosen)
            return Trained(
                version=command.version, metrics=metrics, seconds=time.perf_counter() - started, tokens=tokens
            )

        return await self._on_policy_thread(f"step {command.step}", work)

    def _save(self, command: Save) -> Saved:
        from actors.trainer import checkpoint

        assert self._policy is not None
        started = time.perf_counter()
        path = checkpoint.directory(self._checkpoints, command.version, command.step)
        meta = {
            "version": command.version,
            "step": command.step,
            "batch": command.batch,
            "positions": {"batches": command.entry},
            "run": self._context.run,
        }
        size = self._policy.save(path, meta)
        return Saved(version=command.version, path=str(path), bytes=size, seconds=time.perf_counter() - started)

    async def _prune(self) -> Unpruned | None:
        """On a daemon thread: a disk that hangs holds up neither a step nor the end. While it does, nothing more."""
        from actors.trainer import checkpoint

        archived = await self._context.register(ARCHIVED_CHECKPOINT)
        if self._pruning is not None and not self._pruning.done():
            return None
        pruning: Future[Any] = Future()

        def work() -> None:
            try:
                pruning.set_result(checkpoint.prune(self._checkpoints, self._config.checkpoint.keep, archived))
            except Exception as error:  # whatever it is, `pruning.result()` raises it
                pruning.set_exception(error)

        self._pruning = pruning
        threading.Thread(target=work, name="prune", daemon=True).start()
        done, _ = await asyncio.wait({asyncio.wrap_future(pruning)}, timeout=PRUNE_S)
        if not done:
            return Unpruned(PRUNE_S)
        pruning.result()
        return None

    def _freeze(self, version: int) -> None:
        """Keep a copy of the weights as they are now: the next step changes them in place."""
        assert self._policy is not None
        self._copies[version] = list(self._policy.export())
        for old in sorted(self._copies)[:-COPIES]:
            del self._copies[old]

    # --- transfer ---

    async def _offer(self, command: Offer) -> Offered | TransferBroke:
        from actors.refit.transports import TransferError

        tensors = self._copies.get(command.version)
        if tensors is None:
            held = ", ".join(map(str, self._copies)) or "none"
            reason = f"version {command.version} is not held any more (held: {held})"
            return TransferBroke(epoch=command.epoch, phase="offer", error="VersionGone", reason=reason)
        try:
            async with asyncio.timeout(command.timeout):
                planned = asyncio.get_running_loop().run_in_executor(self._offer_thread, self._planned, tensors)
                offer, handle, size = await planned
        except TimeoutError:
            reason = f"the copy was not ready in {command.timeout:.3g} s"
            return TransferBroke(epoch=command.epoch, phase="offer", error="Deadline", reason=reason)
        except TransferError as error:
            return self._broke(command.epoch, error)
        if offer.note:
            self._context.log.warning("bucket size", epoch=command.epoch, reason=offer.note)
        self._context.log.info("offered", epoch=command.epoch, buckets=len(offer.buckets), plan_bytes=size)
        return Offered(
            epoch=command.epoch,
            version=command.version,
            address=offer.address,
            port=offer.port,
            bytes=offer.bytes,
            digest=offer.digest,
            checksum=offer.checksum,
            plan=handle,
            plan_bytes=size,
            nccl=nccl.told(os.environ) if self._config.refit.transport == "nccl" else (),
        )

    def _planned(self, tensors: list[tuple[str, Any]]) -> tuple[Any, str, int]:
        """The sender's offer, with handle and size of its plan, which is kept for `payload`."""
        offer = self._sender.offer(tensors)
        buckets, handle = self._plan
        if buckets != offer.buckets:
            data = plan.encode(offer.buckets)
            handle = hashlib.blake2b(data, digest_size=16).hexdigest()
            self._plans = {**dict(list(self._plans.items())[1 - COPIES :]), handle: data}
            self._plan = offer.buckets, handle
        return offer, handle, len(self._plans[handle])

    async def _send(self, command: Send) -> Sent | TransferBroke:
        from actors.refit.transports import TransferError

        started = command.started
        try:
            sent = await asyncio.to_thread(self._sender.send, started, command.timeout)
        except TransferError as error:
            return self._broke(started.epoch, error)
        return Sent(epoch=started.epoch, version=started.version, seconds=sent.seconds, bytes=sent.bytes)

    @staticmethod
    def _broke(epoch: int, error: Any) -> TransferBroke:
        cause = error.__cause__ or error
        return TransferBroke(epoch=epoch, phase=error.phase, error=type(cause).__name__, reason=str(error))


def build(config: RunConfig, actor: str) -> TrainerShell:
    return TrainerShell(config)
