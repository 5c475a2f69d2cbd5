"""S1-S4 hold whatever order things happen in: exhaustively in a small world, by search in larger and harsher ones."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from actors.engine.core import EngineCore
from actors.engine.state import Drained, Lease, Loaded, LoadFailed
from config.schema import EngineConfig, RefitConfig
from contracts.events import RefitFailed, RefitRequested
from tests.unit.engine.world import ME, Moves, Violation, World, core

CONFIGS = EngineConfig(lease_s=10.0), RefitConfig()
MODES = {
    *("starting", "uncertain", "draining", "drained", "loading", "loaded", "resuming", "serving", "lapsed", "dead"),
}


def explore(moves: Moves, limit: int = 1_000_000) -> set[str]:
    """Visit every world that can be reached; answers the modes seen."""
    first = moves.begin()
    seen = {first}
    queue = deque([first])
    while queue:
        assert len(seen) < limit
        for move in moves(queue.popleft()):
            world = move.apply()
            if world not in seen:
                seen.add(world)
                queue.append(world)
    return {world.engine.mode for world in seen}


def walk(moves: Moves, choices: list[tuple[int, int]]) -> list[World]:
    """One run: at each step a fault if the first number is 0, and which move the second number says."""
    worlds = [moves.begin()]
    for fault, choice in choices:
        options = list(moves(worlds[-1]))
        ordinary = [move for move in options if not move.fault]
        faults = [move for move in options if move.fault]
        pool = faults if faults and (fault == 0 or not ordinary) else ordinary
        if not pool:
            break
        worlds.append(pool[choice % len(pool)].apply())
    return worlds


def search(moves: Moves, faults: int) -> None:
    """Many runs in which one move in `faults` is a fault."""
    for seed in range(300):
        source = random.Random(seed)
        walk(moves, [(source.randrange(faults), source.randrange(64)) for _ in range(80)])


CHOICES = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 63)), min_size=40, max_size=100)


def test_one_refit_with_a_restart_exhaustively() -> None:
    assert explore(Moves(core(), epochs=1, boots=2, ordered=True)) == MODES


@pytest.mark.slow
def test_two_refits_exhaustively() -> None:
    assert explore(Moves(core(), epochs=2, boots=1, ordered=True)) == MODES


@settings(max_examples=60, deadline=None)
@given(CHOICES)
def test_long_runs_with_events_in_order(choices: list[tuple[int, int]]) -> None:
    walk(Moves(core(), epochs=6, boots=4, ordered=True), choices)


@settings(max_examples=60, deadline=None)
@given(CHOICES)
def test_long_runs_with_events_late_repeated_and_lost(choices: list[tuple[int, int]]) -> None:
    walk(Moves(core(), epochs=6, boots=4, ordered=False), choices)


# --- each mechanism is necessary: without it, the same search finds a violation --------------------------------------


class NoLease(EngineCore):
    def admits(self, state: Any, epoch: int, lease: Lease, now: float) -> bool:
        return state.mode == "serving" and epoch == state.epoch


class LeaseOfAnyEpoch(EngineCore):
    def admits(self, state: Any, epoch: int, lease: Lease, now: float) -> bool:
        return state.mode == "serving" and epoch == state.epoch and now - lease.seen_at < self.lease_s


class RequestOfAnyEpoch(EngineCore):
    def admits(self, state: Any, epoch: int, lease: Lease, now: float) -> bool:
        return super().admits(state, state.epoch, lease, now)


class LateResultsCount(EngineCore):
    def _local(self, state: Any, input: Any) -> Any:
        return super()._local(state, replace(input, epoch=state.epoch) if hasattr(input, "epoch") else input)


class OlderRequestsCount(EngineCore):
    def _event(self, state: Any, event: Any) -> Any:
        requested = isinstance(event, RefitRequested)
        return self.barriers.requested(state, event) if requested else super()._event(state, event)


class DrainsAtOnce(EngineCore):
    def _event(self, state: Any, event: Any) -> Any:
        after, commands = super()._event(state, event)
        if not isinstance(event, RefitRequested) or after.mode != "draining":
            return after, commands
        after, more = self.barriers.drained(after, Drained(after.epoch, 0.0))
        return after, [*commands, *more]


class PartialLoadsCount(EngineCore):
    def _local(self, state: Any, input: Any) -> Any:
        return super()._local(state, Loaded(input.epoch, "", 0.0) if isinstance(input, LoadFailed) else input)


class ServesWhatWasTornOff(EngineCore):
    def _event(self, state: Any, event: Any) -> Any:
        after, commands = super()._event(state, event)
        if isinstance(event, RefitFailed) and state.mode == "loading":
            after = replace(after, mode="serving", version=state.part.version)
        return after, commands


class RestartsServing(EngineCore):
    def _booted(self, state: Any, boot: int) -> Any:
        after, commands = super()._booted(state, boot)
        if state.mode == "serving":
            after = replace(after, mode="serving", version=state.version)
        return after, commands


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(
    "mutant", [RequestOfAnyEpoch, DrainsAtOnce, PartialLoadsCount, ServesWhatWasTornOff, RestartsServing]
)
def test_the_search_finds_what_the_mechanism_prevents(mutant: type[EngineCore], ordered: bool) -> None:
    with pytest.raises(Violation):
        search(Moves(mutant(ME, *CONFIGS), epochs=6, boots=4, ordered=ordered), faults=16)


def test_the_search_finds_that_older_requests_must_not_count() -> None:
    with pytest.raises(Violation, match="S3"):
        search(Moves(OlderRequestsCount(ME, *CONFIGS), epochs=2, boots=1, ordered=False), faults=4)


def follow(moves: Moves, *labels: str) -> World:
    """The world after the first possible move of each label in turn."""
    world = moves.begin()
    for label in labels:
        found = next((move for move in moves(world) if move.label.startswith(label)), None)
        assert found is not None, f"{label!r} can't happen in {world}"
        world = found.apply()
    return world


READY = ("<- ServerReady", "<- EngineReady")
DRAINED = ("request 1 with boot 1", "<- RefitRequested", "<- TransferOffered", "the drain succeeds")
LOADED = (
    "<- Drained",
    "<- EngineDrained",
    "start 1, new group",
    "<- TransferStarted",
    "buckets arrive",
    "the last one",
)
SERVING = ("<- Loaded", "<- EngineLoaded", "commit 1", "<- RefitCommitted", "generation goes on", "<- Resumed")


@pytest.mark.parametrize("mutant", [NoLease, LeaseOfAnyEpoch])
def test_a_refit_without_an_engine_that_is_deaf_needs_the_lease(mutant: type[EngineCore]) -> None:
    """It never hears of epoch 2, and nobody waits for it beyond the drain deadline."""
    reading = () if mutant is NoLease else ("the registers are read",)
    deaf = ("request 2 with boot 1", "expel boot 1", "start 2 with others", "commit 2 without it")
    script = (*READY, *DRAINED, *LOADED, *SERVING, *deaf, *reading)
    with pytest.raises(Violation, match="S2: admitted under epoch 1, committed is 2"):
        follow(Moves(mutant(ME, *CONFIGS), 2, 1, ordered=True), *script, "a sequence of epoch 1 begins")
    moves = Moves(core(), 2, 1, ordered=True)
    assert not any(move.label.startswith("a sequence") for move in moves(follow(moves, *script)))


def test_a_drain_is_not_proved_by_the_result_of_an_older_one() -> None:
    failing = ("epoch 1 fails", "<- RefitFailed", "request 2 with boot 1", "<- RefitRequested", "<- TransferOffered")
    late = (*READY, *DRAINED, *failing, "<- Drained(epoch=1")
    with pytest.raises(Violation, match="two operations"):
        follow(Moves(LateResultsCount(ME, *CONFIGS), 2, 1, ordered=True), *late, "<- EngineDrained", "start 2", "<- Tr")
    assert follow(Moves(core(), 2, 1, ordered=True), *late).engine.mode == "draining"
