"""Continuous batching on one thread: admit and prefill what waits, else decode one token of every running row.

Commands (aborts, pauses, new weights, flushes) run between two forwards, so no forward ever sees half of one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeVar

import torch

from actors.engine.torch_server.admission import Admission, Follower
from actors.engine.torch_server.generation import ABORTED, NOT_FINITE, DecodeState, Generation
from actors.engine.torch_server.kv import KVCache, PrefixStore
from actors.engine.torch_server.model import Model
from actors.engine.torch_server.sampling import sample
from actors.engine.torch_server.weights import BadWeights

T = TypeVar("T")
PauseMode = Literal["abort", "retract", "in_place"]
KV, WEIGHTS = TAGS = ("kv_cache", "weights")
"""Parts of the memory that can be given back."""
SCORED = 1024  # rows of logits held at once while scoring a prompt


class MemoryMisuse(ValueError):
    """Memory is to be released or resumed that is in use, or not there."""


class Scheduler:
    """Owns model, cache and running generations. Only `submit`, `call`, `flush_when_idle` and `stop` are for other
    threads; all else runs on the scheduler's own thread (inside a function given to `call`)."""

    def __init__(
        self,
        model: Model,
        max_running: int,
        max_total_tokens: int,
        prefix_tokens: int,
        chunk: int,
        threads: int,
    ) -> None:
        """`max_total_tokens` bounds rows x longest reach (prompt + max_new_tokens) of what runs together; `chunk`
        the prompt tokens of one forward."""
        self.model = model
        self.chunk, self.threads = chunk, threads
        weights = model.weights
        self.cache = KVCache(model.config, weights.dtype, weights.device, max_total_tokens)
        self.prefixes = PrefixStore(prefix_tokens)
        self.admission = Admission(max_running, self.cache.limit, chunk, self.prefixes)
        self.version = "default"
        self.paused = False
        self.released: set[str] = set()
        """Of `TAGS`; nothing runs meanwhile."""
        self.steps = self.generated = 0
        self.waiting: deque[Generation] = deque()
        self.rows: list[Generation] = []
        self._publish: Callable[[list[Generation]], None] = lambda generations: None
        self._crashed: Callable[[BaseException], None] = lambda error: None
        self._partial: Generation | None = None  # its prompt is longer than a chunk; nothing decodes meanwhile
        self._epoch = 0  # weights the cache is computed from
        self._state: DecodeState | None = None
        self._out: list[Generation] = []
        self._flushes: list[Future[bool]] = []
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # --- from any thread ---

    def connect(self, publish: Callable[[list[Generation]], None], crashed: Callable[[BaseException], None]) -> None:
        """Before `start`: `publish` gets, at most once a step, what ended or (streams) moved on; `crashed` the error
        that ended the thread."""
        self._publish, self._crashed = publish, crashed

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """End after the running step; waits up to `timeout` seconds."""
        self._inbox.put(self._stop)
        self._thread.join(timeout)

    def submit(self, generations: Sequence[Generation]) -> None:
        self._inbox.put(lambda: self.waiting.extend(generations))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` between two steps; its result or error arrives in the future."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # belongs to the caller
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def flush_when_idle(self) -> Future[bool]:
        """Drop all cached prefixes as soon as nothing runs or waits. Cancel it to give up."""
        future: Future[bool] = Future()
        self._inbox.put(lambda: self._flushes.append(future))
        return future

    # --- on the scheduler's thread ---

    @property
    def idle(self) -> bool:
        return not self.rows and not self.waiting

    def flush(self) -> bool:
        """Drop all cached prefixes; False (and nothing happens) while generations run or wait."""
        if self.idle:
            self.prefixes.clear()
        return self.idle

    def pause(self, mode: PauseMode) -> None:
        self.paused = True
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            self.retract()

    def resume(self) -> None:
        self.paused = False

    def abort(self, prefix: str | None) -> None:
        """End all generations whose id starts with `prefix` (None: all) with the tokens they have."""
        hit = [g for g in (*self.rows, *self.waiting) if prefix is None or g.rid.startswith(prefix)]
        self.end(hit)

    def end(self, generations: Iterable[Generation]) -> None:
        """End exactly these, where they still live, with the tokens they have."""
        hit = [g for g in generations if g.finish is None]
        for g in hit:
            g.finish = ABORTED
        if hit:
            self.waiting = deque(g for g in self.waiting if g.finish is None)
            self._leave(hit)

    def retract(self) -> None:
        """Back to the queue: prompt and partial output are computed anew when it is their turn."""
        for g in self.rows:
            g.requeue()
        self.waiting.extendleft(reversed(self.rows))
        self.rows, self._partial, self._state = [], None, None

    def apply(self, tensors: Sequence[tuple[str, torch.Tensor]], version: str | None, flush: bool) -> int:
        """Copy new weights in; answers how many names the model knows. Raises `BadWeights` and changes nothing when
        a shape differs. No prefix computed before is offered afterwards; with `flush` running rows start over too."""
        weights = self.model.weights
        if WEIGHTS in self.released:
            raise BadWeights("the memory of the weights is released: resume it first")
        weights.check((name, tensor.shape) for name, tensor in tensors)
        known = sum(weights.assign(name, tensor) for name, tensor in tensors)
        self._epoch += 1
        self.prefixes.clear()
        if flush:
            self.retract()
        if not self.rows:
            self.cache.release()
        if version is not None:
            self.version = version
        return known

    def give_back(self, tags: Sequence[str]) -> None:
        """Free the memory that `tags` name, until `take`. Raises `MemoryMisuse`, and changes nothing, while generations
        run or wait, and for what is not held."""
        if not self.idle:
            raise MemoryMisuse("release_memory_occupation should be called only when server is idle.")
        if not self.released.isdisjoint(tags):
            raise MemoryMisuse(f"{', '.join(sorted(self.released & set(tags)))}: already released")
        self.released.update(tags)
        self._epoch += 1
        self.prefixes.clear()
        if KV in tags:
            self.cache.release()
        if WEIGHTS in tags:
            self.model.weights.give_back()
        if self.cache.device.type == "cuda":
            torch.cuda.empty_cache()

    def take(self, tags: Sequence[str]) -> None:
        """Have the memory again; weights are to be loaded before anything is generated. Raises `MemoryMisuse`."""
        if not self.released.issuperset(tags):
            raise MemoryMisuse(f"{', '.join(sorted(set(tags) - self.released))}: not released")
        if WEIGHTS in tags:
            self.model.weights.take()
        self.released.difference_update(tags)

    def label(self, version: str) -> None:
        """Name the weights; nothing else changes."""
        self.version = version

    def stats(self) -> dict[str, Any]:
        return {
            "running": len(self.rows),
            "waiting": len(self.waiting),
            "paused": self.paused,
            "steps": self.steps,
            "generated_tokens": self.generated,
            "prefix_tokens": self.prefixes.tokens,
            "cache_tokens": self.cache.rows * self.cache.length,
            "cache_bytes": self.cache.bytes,
            "weight_bytes": self.model.weights.bytes,
            "released": sorted(self.released),
        }

    def _run(self) -> None:
        torch.set_num_threads(self.threads)  # OpenMP keeps it by thread
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._take()
                    self._settle()
                    if self._busy and not self._stopping:
                        self._step()
                        self._settle()
        except BaseException as error:  # whatever ended this thread must end the process
            self._crashed(error)

    @property
    def _busy(self) -> bool:
        return not self.paused and not self.released and not self.idle

    def _take(self) -> None:
        if not self._busy:
            self._inbox.get()()
        while True:
            try:
                command = self._inbox.get_nowait()
            except Empty:
                return
            command()

    def _settle(self) -> None:
        if self._out:
            self._publish(self._out)
            self._out = []
        if self._flushes and self.flush():
            for future in self._flushes:
                if future.set_running_or_notify_cancel():
                    future.set_result(True)
            self._flushes = []

    def _stop(self) -> None:
        self.abort(None)
        self._stopping = True

    def _step(self) -> None:
        self.steps += 1
        if self._partial is not None:
            self._prefill([self._partial], [])
            return
        leaders, followers = self.admission.next(self.waiting, self.rows, self._epoch)
        self._place(leaders, followers)
        if leaders:
            self._prefill(leaders, followers)
        else:
            self._decode()

    def _place(self, leaders: list[Generation], followers: list[Follower]) -> None:
        """Give them rows behind those that run."""
        used = len(self.rows)
        for g, leader in followers:
            g.begin(self._epoch, len(leader.tokens) - 1, None)
        fresh = leaders + [g for g, _ in followers]
        if not fresh:
            return
        self.rows += fresh
        self._state = None
        self.cache.reserve(len(self.rows), max(len(g.tokens) for g in self.rows), used)
        for row, g in enumerate(fresh, used):
            g.row = row
            if g.stored is not None:
                self.cache.write_row(row, g.stored, g.filled)
                g.stored = None

    def _prefill(self, leaders: list[Generation], followers: list[Follower]) -> None:
        pieces = [g.tokens[g.filled : g.filled + self.chunk] for g in leaders]
        starts = [g.filled for g in leaders]
        batch = self.model.prefill_batch(self.cache, leaders[0].row, pieces, starts)
        hidden = self.model.forward(self.cache, batch)
        ends: dict[int, int] = {}
        offset = 0
        for g, piece in zip(leaders, pieces, strict=True):
            if g.scores_prompt:
                self._score(g, hidden[offset : offset + len(piece)])
            g.filled += len(piece)
            offset += len(piece)
            ends[g.row] = offset - 1
        self._partial = leaders[0] if leaders[0].filled < len(leaders[0].tokens) else None
        if self._partial is not None:
            return
        for g in leaders:
            self._retain(g)
        for g, leader in followers:
            g.filled = leader.filled
        length = max(g.filled for g in leaders)
        self.cache.move([leader.row for _, leader in followers], [g.row for g, _ in followers], length)
        fresh = leaders + [g for g, _ in followers]
        last = [ends[g.row] for g in leaders] + [ends[leader.row] for _, leader in followers]
        logits = self.model.logits(hidden[torch.tensor(last, device=hidden.device)])
        self._sample(fresh, logits, DecodeState.of(fresh, hidden.device))

    def _decode(self) -> None:
        device = self.cache.device
        state = self._state or DecodeState.of(self.rows, device)
        self.cache.reserve(len(self.rows), state.span, len(self.rows))
        batch = self.model.decode_batch(self.cache, state.tokens, state.positions, state.span)
        hidden = self.model.forward(self.cache, batch)
        for g in self.rows:
            g.filled += 1
        self._state = state
        ids = self._sample(self.rows, self.model.logits(hidden), state)
        if self._state is not None:  # nobody left: the next step continues from these tensors
            state.advance(ids)

    def _sample(self, generations: list[Generation], logits: torch.Tensor, state: DecodeState) -> torch.Tensor:
        banned = [(i, t) for i, g in enumerate(generations) if g.guarded for t in g.sampling.stops]
        if banned:
            where = torch.tensor(banned, device=logits.device)
            logits[where[:, 0], where[:, 1]] = -float("inf")
        ids, logprobs = sample(logits, state.sampling, state.counts)
        tokens, values = torch.stack((ids.double(), logprobs.double())).tolist()  # the step's one transfer
        done: list[Generation] = []
        for g, token, logprob in zip(generations, tokens, values, strict=True):
            if logprob != logprob:
                g.finish = NOT_FINITE
                self.cache.wipe(g.row)
            else:
                g.accept(int(token), logprob, self.version)
            if g.finish is not None:
                done.append(g)
            elif g.stream:
                self._out.append(g)
        self.generated += len(generations)
        if done:
            for g in done:
                if g.finish is not NOT_FINITE:
                    self._retain(g)
            self._leave(done)
        return ids

    def _score(self, g: Generation, hidden: torch.Tensor) -> None:
        """Logprobs of the prompt tokens after `logprob_start`, from hidden states of positions filled.. on."""
        first = max(g.filled, g.logprob_start)
        last = min(g.filled + hidden.shape[0], g.prompt - 1)
        for start in range(first, last, SCORED):
            end = min(start + SCORED, last)
            logits = self.model.logits(hidden[start - g.filled : end - g.filled])
            targets = torch.tensor(g.tokens[start + 1 : end + 1], device=hidden.device)
            g.prompt_logprobs += logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1).tolist()

    def _retain(self, g: Generation) -> None:
        if g.epoch != self._epoch:
            return
        length = self.prefixes.wants(g.tokens[: g.filled])
        if length:
            self.prefixes.put(g.tokens[:length], self.cache.read_row(g.row, length))

    def _leave(self, gone: list[Generation]) -> None:
        """Free the rows of finished generations and close the gaps from the end; hand the generations over."""
        for g in gone:
            g.leave(self.version)
        self._out += gone
        kept = sum(g.finish is None for g in self.rows)
        if kept == len(self.rows):
            return
        holes = [g.row for g in self.rows[:kept] if g.finish is not None]
        movers = [g for g in self.rows[kept:] if g.finish is None]
        length = max((g.filled for g in movers), default=0)
        self.cache.move([g.row for g in movers], holes, length)
        for g, row in zip(movers, holes, strict=True):
            self.rows[row] = g
            g.row = row
        del self.rows[kept:]
        self._state = None
        if self._partial is not None and self._partial.finish is not None:
            self._partial = None
