"""Which complete groups are trained next, and how much more the source may issue."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from actors.buffer import samplers
from actors.buffer.samplers import SamplerError
from actors.buffer.state import State, candidate, group_ref
from config.schema import RunConfig
from contracts.core import Emit, Step
from contracts.events import ActorFailed, BatchReady, BufferDepth, CreditGranted
from contracts.sampler import Pool

AHEAD = 1
"""Batches that may wait at the trainer beyond the one in training."""


class Batches:
    """`config`: buffer, steps, sync."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config.buffer
        self.steps = config.steps
        self.staleness = config.staleness
        self.sampler = samplers.load(config.buffer.sampler)
        self.window = config.window

    def choose(self, state: State) -> tuple[State, tuple[int, ...], tuple[Any, ...]]:
        """The groups of the next batch; none while the trainer has enough in hand or too few are complete."""
        if len(state.ready) < self.config.groups:
            return state, (), ()
        step = state.target()
        if state.base is None or state.stopping or state.broken or state.outstanding() > AHEAD or step >= self.steps:
            return state, (), ()
        pool = Pool(
            candidates=tuple(candidate(index, group, step) for index, group in state.ready.items()),
            holes=samplers.holes(state.closed.floor, state.closed.above, tuple(state.ready)),
            count=self.config.groups,
            step=step,
            max_staleness=self.staleness,
            window=self.window,
        )
        try:
            chosen = samplers.choose(self.config.sampler, self.sampler, pool)
        except SamplerError as error:
            failed = ActorFailed(actor="buffer", error="SamplerError", message=str(error), fatal=True)
            return replace(state, broken=True), (), (Emit(failed),)
        return state, chosen if len(chosen) == self.config.groups else (), ()

    def emit(self, state: State, chosen: tuple[int, ...]) -> Step[State]:
        step = state.target()
        lags: dict[int, int] = {}
        groups, flat, ready = [], 0, state.ready.copy()
        for index in chosen:
            held = ready.pop(index)
            group = group_ref(index, held, step)
            groups.append(group)
            flat += held.flat()
            for sample in group.samples:
                if sample.valid:
                    lags[sample.lag] = lags.get(sample.lag, 0) + 1
        batch = BatchReady(batch=state.next_batch, groups=tuple(groups))
        closed = state.closed.add(*chosen)
        state = replace(state, ready=ready, closed=closed, next_batch=state.next_batch + 1)
        depth = BufferDepth(
            batch=batch.batch,
            ready=len(state.ready),
            open=len(state.open) + len(state.issued),
            lags=lags,
            flat_groups=flat,
        )
        return state, (Emit(batch), Emit(depth))

    def grant(self, state: State) -> Step[State]:
        """Let the source issue what can still be trained within the staleness window, and replace what was dropped.

        A task issued now is sampled from the committed version at the oldest, so it must belong to one of the next
        `1 + max_staleness` batches after that version. Up to `window` - 1 younger ones may be trained before it, so
        that many fewer are issued.
        """
        if state.base is None or state.committed is None:
            return state, ()
        ahead = self.config.groups * (state.committed + 1 + self.staleness - state.base) - (self.window - 1)
        total = min(ahead, self.config.groups * (self.steps - state.base)) + state.dropped
        if total <= state.credit:
            return state, ()
        return replace(state, credit=total), (Emit(CreditGranted(total=total)),)
