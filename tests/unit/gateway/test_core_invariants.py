"""What holds after every input, in whatever order: searched exhaustively to a depth, and at random beyond."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.gateway.core import GatewayCore
from actors.gateway.state import (
    AbortCall,
    Answered,
    Arrived,
    Call,
    CallFailed,
    Left,
    Part,
    Refuse,
    Reply,
    gate,
    rid,
)
from config.schema import GatewayConfig, RefitConfig
from contracts.core import Booted, Delivered, Emit, Ref, Tick
from contracts.envelope import STREAM_OF, Envelope
from contracts.events import (
    EngineDead,
    EngineQuarantined,
    EngineReady,
    GateClosed,
    GatewayReady,
    Member,
    RefitCommitted,
    RefitFailed,
    RefitRequested,
    WaitEnded,
    WaitStarted,
)

ME = "gateway-0"
ENGINES = ("engine-0", "engine-1")
CORE = GatewayCore(ME, GatewayConfig(retries=1), RefitConfig(deadline_s=20.0, drain_deadline_s=10.0))


def delivered(event: Any) -> Delivered:
    stream = STREAM_OF[type(event)]
    envelope = Envelope(
        id="x:1.0", run="r", stream=stream, actor="x", boot=1, epoch=0, wall_ns=0, mono_ns=0, body=event
    )
    return Delivered(Ref(stream, "1-0"), envelope)


class World:
    """The core amid callers, engines and a coordinator; holds each step to the invariants.

    It keeps its own books (`open`, `flying`, `missing`, ...) from inputs and commands alone.
    """

    def __init__(self) -> None:
        self.state = CORE.initial()
        self.now = 0.0
        self.boot = 0
        self.boots = dict.fromkeys(ENGINES, 1)
        self.dead: set[Member] = set()
        self.epoch = 0
        self.pending = False
        self.commit: RefitCommitted | None = None
        self.next_request = 0
        self.open: dict[int, float] = {}
        self.missing: dict[int, set[int]] = {}
        self.flying: dict[int, Call] = {}
        self.aborted: set[int] = set()
        self.rids: set[str] = set()
        self.closed: set[tuple[int, int]] = set()
        self.waits: set[str] = set()

    def copy(self) -> World:
        twin = World.__new__(World)
        for name, value in vars(self).items():
            setattr(twin, name, value.copy() if isinstance(value, (dict, set)) else value)
        twin.missing = {number: set(samples) for number, samples in self.missing.items()}
        return twin

    # --- actions ---

    def actions(self) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = [
            ("arrive",),
            ("reboot",),
            ("tick",),
            ("request", "finish"),
            ("request", "interrupt"),
        ]
        found += [(what,) for what in ("commit", "fail") if self.pending]
        found += [("die", engine) for engine in ENGINES] + [("quarantine", engine) for engine in ENGINES]
        found += [("leave", number) for number in self.open]
        for call in self.flying:
            found += [(how, call) for how in ("finish", "part", "infra", "not_serving", "data")]
        return found

    def act(self, action: tuple[Any, ...]) -> None:
        getattr(self, f"_do_{action[0]}")(*action[1:])

    def start(self) -> World:
        for engine in ENGINES:
            self.feed(delivered(EngineReady(engine=engine, boot=1, url=f"{engine}/1", ranks=1, seconds=0)))
        self._do_reboot()
        return self

    def _do_arrive(self, n: int = 2, patience: float = 12.0) -> None:
        number = self.next_request
        self.next_request += 1
        self.open[number] = self.now + patience
        self.missing[number] = set(range(n))
        self.feed(Arrived(number, n, f"s{number % 3}", self.now + patience))

    def _do_reboot(self) -> None:
        self.boot += 1
        self.open, self.missing, self.flying, self.aborted = {}, {}, {}, set()
        self.feed(Booted(self.boot))
        assert gate(self.state) == "closed"
        self.feed(delivered(GatewayReady(gateway=ME, boot=self.boot, url="me")))

    def _do_tick(self) -> None:
        wake = CORE.wake(self.state)
        self.now = self.now + 1.0 if wake is None else max(self.now, wake)
        self.feed(Tick())
        again = CORE.wake(self.state)
        assert again is None or again > self.now, "it would tick for ever"

    def _do_request(self, drain: Any) -> None:
        self.epoch, self.pending = self.epoch + 1, True
        self.feed(delivered(RefitRequested(
            epoch=self.epoch, version=10 * self.epoch, step=0, engines=(), gateways=(), drain=drain,
            deadline_at=self.now + 20.0,
        )))  # fmt: skip

    def _do_commit(self) -> None:
        self.pending = False
        members = tuple(Member(engine, self.boots[engine]) for engine in ENGINES)
        self.commit = RefitCommitted(
            epoch=self.epoch, version=10 * self.epoch, step=0, engines=members, world_size=3,
            pause_s=0, drain_s=0, transfer_s=0, bytes=0,
        )  # fmt: skip
        self.dead.clear()
        self.feed(delivered(self.commit))

    def _do_fail(self) -> None:
        self.feed(delivered(RefitFailed(epoch=self.epoch, version=0, phase="transfer", reason="x")))

    def _do_die(self, engine: str) -> None:
        boot = self.boots[engine]
        self.boots[engine] += 1
        self.dead.add(Member(engine, boot))
        self.feed(delivered(EngineDead(engine=engine, boot=boot, reason="x")))
        url = f"{engine}/{boot + 1}"
        self.feed(delivered(EngineReady(engine=engine, boot=boot + 1, url=url, ranks=1, seconds=0)))

    def _do_quarantine(self, engine: str) -> None:
        self.dead.add(Member(engine, self.boots[engine]))
        self.feed(delivered(EngineQuarantined(epoch=self.epoch, engine=engine, boot=self.boots[engine], reason="x")))

    def _do_leave(self, number: int) -> None:
        del self.open[number]
        self.feed(Left(number))

    def _do_finish(self, call: int) -> None:
        self._answer(call, set(self.flying[call].samples))

    def _do_part(self, call: int) -> None:
        self._answer(call, set(self.flying[call].samples[:1]) if len(self.flying[call].samples) > 1 else set())

    def _answer(self, call: int, finished: set[int]) -> None:
        ended = self.flying.pop(call)
        self.missing[ended.request] -= finished
        self.feed(Answered(call, tuple(Part(s, 1, "stop" if s in finished else "abort") for s in ended.samples)))

    def _fail(self, call: int, kind: Any) -> None:
        del self.flying[call]
        self.feed(CallFailed(call, kind, "x"))

    def _do_infra(self, call: int) -> None:
        self._fail(call, "infra")

    def _do_not_serving(self, call: int) -> None:
        self._fail(call, "not_serving")

    def _do_data(self, call: int) -> None:
        self._fail(call, "data")

    # --- invariants ---

    def feed(self, input: Any) -> None:
        self.state, commands = CORE.step(self.state, input, self.now)
        for command in commands:
            match command:
                case Call():
                    self._check_call(command)
                case AbortCall():
                    assert command.call in self.flying, "only what flies is aborted"
                    assert command.call not in self.aborted, "an abort is asked for once"
                    self.aborted.add(command.call)
                case Reply() | Refuse():
                    assert command.request in self.open, "a request ends once"
                    del self.open[command.request]
                    if isinstance(command, Reply):
                        assert not self.missing[command.request], "a reply has all its samples"
                        assert command.held_s >= 0
                case Emit():
                    self._check_event(command.event)
        self._check_books()

    def _check_call(self, call: Call) -> None:
        assert gate(self.state) == "open"
        assert self.commit is not None
        assert not self.pending, "no call while a refit is going on"
        assert (call.epoch, call.version) == (self.commit.epoch, self.commit.version)
        assert Member(call.engine, call.boot) in self.commit.engines
        assert Member(call.engine, call.boot) not in self.dead
        assert call.url == f"{call.engine}/{call.boot}"
        assert set(call.samples) == self.missing[call.request], "what is missing, no more and no less"
        assert call.request in self.open
        assert call.request not in [other.request for other in self.flying.values()], "one call a request at a time"
        ids = {rid(call.rid, sample) for sample in call.samples}
        assert not ids & self.rids, "request ids are never reused"
        self.rids |= ids
        self.flying[call.call] = call

    def _check_event(self, event: Any) -> None:
        match event:
            case GateClosed():
                assert not self.flying, "closed means that nothing flies"
                assert self.pending
                assert (event.epoch, event.boot) == (self.epoch, self.boot)
                assert (event.epoch, event.boot) not in self.closed, "once an epoch and boot"
                self.closed.add((event.epoch, event.boot))
            case WaitStarted():
                assert event.on not in self.waits
                assert event.deadline_at is not None
                self.waits.add(event.on)
            case WaitEnded():
                self.waits.remove(event.on)

    def _check_books(self) -> None:
        assert set(self.state.requests) == set(self.open)
        assert set(self.state.calls) == set(self.flying)
        assert all(deadline > self.now for deadline in self.open.values()), "deadlines are kept"
        wake = CORE.wake(self.state)
        assert not self.open or (wake is not None and wake <= min(self.open.values())), "it wakes for every deadline"
        if self.pending and not self.flying and self.state.current:
            assert (self.epoch, self.boot) in self.closed, "an empty gate is reported at once"
        if gate(self.state) == "closing":
            assert "drain" in self.waits
        self._check_derived()
        held = [number for number in self.open if number not in {c.request for c in self.flying.values()}]
        assert bool(held) == bool(self.waits & {"refit", "engine"}), "a held request is announced as a wait"

    def _check_derived(self) -> None:
        """What the state keeps beside requests and calls is what they say."""
        state, loads = self.state, Counter[str]()
        assert state.waiting == tuple(number for number, request in state.requests.items() if request.pending)
        for call in state.calls.values():
            loads[call.engine] += len(call.samples)
        assert state.loads == loads
        deadlines = [request.deadline_at for request in state.requests.values()]
        assert (state.expire_at is None) == (not deadlines)
        assert state.expire_at is None or state.expire_at <= min(deadlines)

    def settle(self) -> None:
        """Faults stop: a refit commits, engines answer. Then every request must end."""
        if not self.pending:
            self._do_request("interrupt")
        for call in list(self.flying):
            self._do_part(call)
        self._do_commit()
        while self.flying:
            self._do_finish(next(iter(self.flying)))
        assert not self.open
        assert not self.waits


def test_every_short_history_keeps_the_invariants():
    depth = 4
    start = World().start()
    start._do_request("finish")
    start._do_commit()
    start._do_arrive()
    seen: set[bytes] = set()
    layer = [start]
    for _ in range(depth):
        following = []
        for world in layer:
            for action in world.actions():
                twin = world.copy()
                twin.act(action)
                key = msgspec.msgpack.encode((twin.state, twin.now, twin.pending))
                if key not in seen:
                    seen.add(key)
                    following.append(twin)
        layer = following
    assert len(seen) > 2_000
    for world in layer[::7]:
        world.settle()


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_long_histories_keep_the_invariants_and_end(data: st.DataObject):
    world = World().start()
    for _ in range(data.draw(st.integers(1, 60))):
        world.now += data.draw(st.sampled_from((0.0, 0.0, 0.1, 1.0)))
        if any(deadline <= world.now for deadline in world.open.values()):
            world.feed(Tick())
        world.act(data.draw(st.sampled_from(world.actions())))
    world.settle()
