"""A policy that is spread over several processes, seen as one: the trainer is rank 0 and starts the others.

Whatever the ranks do together has a deadline. The death of a rank, its failure or a deadline that is over ends the
whole: the other ranks are killed, and every later call says why. The trainer then fails, is started again, and goes on
from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.trainer import backend, checkpoint, orders
from actors.trainer.backend import Job, World
from actors.trainer.packing import Sample

T = TypeVar("T")

PROGRAM = ("-m", "actors.trainer.rank")
"""What the interpreter runs for each rank beside the trainer's own."""
GRACE_S = 5.0
"""After the first rank's failure, how long others may take to name the cause, or to come out of a collective."""


class RankError(Exception):
    """Ranks of the policy failed together: names the rank, what it did and why."""


class RankedPolicy:
    """All ranks of a policy; a `contracts.policy.PolicyBackend`. Not thread-safe.

    Raises `RankError` from every method once a rank failed, and what rank 0 itself raises. `close` ends every rank.
    """

    def __init__(self, job: Job, *, program: Sequence[str] = PROGRAM) -> None:
        trainer = job.trainer
        self._trainer = trainer
        self._broken: str | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="sluice-ranks-"))
        self._lead = _Lead()
        self._ranks: list[_Rank] = []
        self._part: Any = None
        size = trainer.ranks
        meeting, timeout = str(self._directory / "meeting"), trainer.step_deadline_s
        try:
            job = _with_weights(job, self._directory)
            self._ranks = [_Rank(number, trainer.threads, program) for number in range(1, size)]
            for rank in self._ranks:
                rank.tell(orders.Build(job, World(rank=rank.number, size=size, meeting=meeting, timeout_s=timeout)))
            world = World(rank=0, size=size, meeting=meeting, timeout_s=timeout)
            self._part = self._together("start", lambda: backend.part(job, world), trainer.start_deadline_s)
        except BaseException:
            self.close()
            raise

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._part.step

    @property
    def pids(self) -> list[int]:
        """Processes of the ranks beside this one."""
        return [rank.process.pid for rank in self._ranks]

    def train_step(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        """See `PolicyBackend.train_step`."""
        return self._do("step", orders.Step(orders.packed(samples)), lambda: self._part.train_step(samples))

    def logprobs(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """Log-probability of each trainable token, 0 elsewhere: float32 [length] a sample, at its temperature."""
        return self._do("logprobs", orders.Score(orders.packed(samples)), lambda: self._part.logprobs(samples))

    def export(self) -> Iterator[tuple[str, Any]]:
        """See `PolicyBackend.export`; all of it is gathered within `trainer.export_deadline_s`."""
        gathered = self._do(
            "export", orders.Export(), lambda: list(self._part.export()), self._trainer.export_deadline_s
        )
        return iter(gathered)

    def save(self, path: Path, meta: Mapping[str, Any]) -> int:
        """See `PolicyBackend.save`."""
        return self._do("save", orders.Save(str(path)), lambda: self._part.save(path, meta))

    def load(self, path: Path) -> Mapping[str, Any]:
        """See `PolicyBackend.load`. Raises `checkpoint.CheckpointError`."""
        checkpoint.read_meta(path)
        return self._do("load", orders.Load(str(path)), lambda: self._part.load(path))

    def close(self) -> None:
        """End every rank; idempotent."""
        for rank in self._ranks:
            rank.end()
        part, self._part = self._part, None
        if part is not None:
            futures.wait([self._lead.run(part.close)], timeout=GRACE_S)
        self._broken = self._broken or "the policy is closed"
        self._lead.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _do(self, what: str, order: orders.Order, mine: Callable[[], T], deadline: float | None = None) -> T:
        """Order the others, do rank 0's part, and wait for all."""
        if self._broken is not None:
            raise RankError(self._broken)
        for rank in self._ranks:
            rank.tell(order)
        return self._together(what, mine, self._trainer.step_deadline_s if deadline is None else deadline)

    def _together(self, what: str, mine: Callable[[], T], deadline: float) -> T:
        own = self._lead.run(mine)
        everything: list[Future[Any]] = [own, *(rank.reply for rank in self._ranks)]
        done, busy = futures.wait(everything, timeout=deadline, return_when=futures.FIRST_EXCEPTION)
        failed = any(future.exception() is not None for future in done)
        if not busy and not failed:
            return own.result()
        if failed:
            futures.wait(everything, timeout=GRACE_S)
            error = self._cause(what, own)
        else:
            names = [f"rank {number}" for number, future in enumerate(everything) if not future.done()]
            error = RankError(f"{what}: not done in {deadline:g} s, {', '.join(names)} still at it")
        self._broken = str(error)
        for rank in self._ranks:
            rank.end()
        raise error

    def _cause(self, what: str, own: Future[Any]) -> BaseException:
        """What to raise when ranks failed: a death explains the errors of collectives, not the other way round."""
        failures = [(rank, rank.reply.exception()) for rank in self._ranks if rank.reply.done()]
        told = [f"{what}: rank {rank.number} {error}" for rank, error in failures if error is not None]
        dead = [f"{what}: rank {rank.number} {error}" for rank, error in failures if isinstance(error, _Died)]
        mine = own.exception() if own.done() else None
        if dead:
            return RankError("; ".join(dead))
        if mine is not None and (not told or not isinstance(mine, RuntimeError)):
            return mine
        return RankError("; ".join(told))


class _Died(Exception):
    """A rank's process ended."""


class _Failure(Exception):
    """A rank said why it failed."""


class _Rank:
    """A process of the policy beside this one. One order at a time; `reply` is the future of the last one."""

    def __init__(self, number: int, threads: int, program: Sequence[str]) -> None:
        self.number = number
        self.reply: Future[None] = Future()
        environment = dict(os.environ)
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        self.process = subprocess.Popen(
            [sys.executable, *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._gone: str | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name=f"rank-{number}", daemon=True).start()

    def tell(self, order: orders.Order) -> None:
        """Send an order. That the rank is gone shows in `reply`."""
        with self._lock:
            self.reply = Future()
            if self._gone is not None:
                self.reply.set_exception(_Died(self._gone))
                return
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it died: the listener says so
            orders.send(self.process.stdin, order)

    def end(self) -> None:
        """Kill it, and wait until it is gone; idempotent."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        while True:
            try:
                reply = orders.replies(self.process.stdout)
            except (EOFError, ValueError, msgspec.DecodeError):
                break
            with self._lock:
                if isinstance(reply, orders.Failed):
                    self.reply.set_exception(_Failure(f"failed: {reply.reason}"))
                else:
                    self.reply.set_result(None)
        self.process.kill()
        status = self.process.wait()
        with self._lock:
            self._gone = f"died {_how(status)}"
            if not self.reply.done():
                self.reply.set_exception(_Died(self._gone))


class _Lead:
    """Rank 0's thread: all that torch keeps by thread stays on it. A collective that hangs can't be taken off it, so it
    is no thread that the end of the process waits for."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="rank-0", daemon=True).start()

    def run(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._todo.put((work, future))
        return future

    def stop(self) -> None:
        self._todo.put(None)

    def _work(self) -> None:
        while (item := self._todo.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del work, future, item


def _with_weights(job: Job, directory: Path) -> Job:
    """The job with weights on disk, so that megatron starts from those that the torch backend draws from the seed."""
    source = Path(job.model_dir)
    if job.trainer.backend == "torch" or any(source.glob("*.safetensors")):
        return job
    from actors.trainer.torch_policy import initial_model

    target = directory / "initial"
    initial_model(source, job.seed).save_pretrained(target)
    return msgspec.structs.replace(job, weights_dir=str(target))


def _how(status: int) -> str:
    if status < 0:
        return f"of {signal.Signals(-status).name}"
    return f"with status {status}"
