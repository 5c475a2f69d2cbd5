"""What the run needs of its members, and whether an epoch is due: questions to the state of the coordinator."""

from __future__ import annotations

from functools import cache

from actors.refit.state import RefitState, Seat


@cache
def _names(engines: int) -> tuple[str, ...]:
    return tuple(f"engine-{i}" for i in range(engines))


class Needs:
    """Of a run that begins with `engines` engines and `gateways` gateways, and refits every `every` steps."""

    def __init__(self, every: int, engines: int, gateways: int) -> None:
        self._every = every
        self._size = engines
        self._gateways = tuple(f"gateway-{i}" for i in range(gateways))

    def names(self, state: RefitState) -> tuple[str, ...]:
        """The engines that the run is to have."""
        return _names(self._size if state.size is None else state.size)

    def due(self, state: RefitState, now: float) -> bool:
        """A new version is due, the trainer was restored, or members are up that don't serve the last commit.

        Nothing is while the device is the trainer's.
        """
        committed, trainer = state.committed, state.trainer
        if state.stopping or state.halted or state.yielded is not None:
            return False
        if committed is None or state.failures:
            return True
        if trainer is not None and trainer.versions:
            due = trainer.versions[-1][1] - committed.step >= self._every
            if due or trainer.boot != committed.trainer_boot:
                return True
        engines = state.engines.values()
        for engine in engines:
            if engine.up != engine.serving and (engine.serving or engine.eligible_at <= now):
                return True  # it is retired and not yet told by a commit, or it is joining
        return any([g.up and not g.open for g in state.gateways.values()])

    def missing(self, state: RefitState) -> tuple[str, ...]:
        """Who must be ready before an epoch can begin, and isn't: one engine and the trainer, at the start all."""
        names = self.names(state)
        trainer = () if state.trainer is not None and state.trainer.versions else ("trainer",)
        engines = tuple([n for n in names if n not in state.engines or not state.engines[n].up])
        if not state.gathering:
            return (*(engines if len(engines) == len(names) else ()), *trainer)
        gateways = tuple(n for n in self._gateways if n not in state.gateways or not state.gateways[n].up)
        return (*engines, *gateways, *trainer)

    def seats(self, state: RefitState, now: float) -> tuple[Seat, ...]:
        """Engines that are up and not left out for their faults; all that are up when there would be none."""
        up = [(name, e) for name, e in sorted(state.engines.items()) if e.up]
        chosen = [(name, e) for name, e in up if e.eligible_at <= now] or up
        return tuple(Seat(name, e.boot, e.ranks) for name, e in chosen)
