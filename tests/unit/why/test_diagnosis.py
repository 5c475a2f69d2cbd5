"""What is called stuck, and the causes that the gallery of stalls does not show."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from actors.trainer import state as trainer
from contracts import events
from contracts.events import GateClosed, TransferOffered
from pipeline.why.diagnosis import cycles, diagnose
from pipeline.why.facts import Engine
from pipeline.why.look import finding, span
from pipeline.why.model import Model
from pipeline.why.result import Edge, Evidence, StoreFacts
from tests.stalls.gallery import PATIENT
from tests.stalls.scene import BASE, Scene
from tests.unit.view.story import Story, batch, booted, committed, stepped, trained


def scene_of(arrange: object = None, config: object = BASE, seconds: float = 120.0) -> Scene:
    scene = Scene(config)  # type: ignore[arg-type]
    if callable(arrange):
        arrange(scene)
    scene.start()
    scene.run(seconds)
    return scene


def test_a_store_that_does_not_answer_is_the_cause_whatever_else_shows():
    scene = scene_of(lambda scene: scene.swallow("trainer", trainer.Train, lambda command: command.step == 3))
    evidence = Evidence(store=StoreFacts(error="connection refused"))
    found = diagnose(scene.model(), BASE, scene.world.now(), evidence)
    assert found.cause is not None
    assert (found.stuck, found.cause.code) == (True, "store_unreachable")


def test_a_trainer_that_does_not_offer_is_told_from_one_that_waits():
    scene = scene_of(
        lambda scene: scene.swallow("trainer", trainer.Offer, lambda command: command.epoch >= 4), config=PATIENT
    )
    found = scene.diagnose()
    assert found.cause is not None
    assert (found.cause.code, found.cause.culprit) == ("trainer_not_offering", "trainer")


def _mute(scene: Scene, name: str, event: type, epoch: int) -> None:
    """Events of a kind never leave the core of an actor from an epoch on."""
    core = scene[name].core
    step = core.step

    def muted(state: object, input: object, now: float) -> tuple[object, list[object]]:
        state, commands = step(state, input, now)
        return state, [c for c in commands if not _is(c, event, epoch)]

    core.step = muted


def _is(command: object, event: type, epoch: int) -> bool:
    emitted = getattr(command, "event", None)
    return isinstance(emitted, event) and getattr(emitted, "epoch", 0) >= epoch


def test_a_gateway_that_never_says_that_its_gate_is_closed_is_named():
    scene = scene_of(lambda scene: _mute(scene, "gateway-0", GateClosed, 4), config=PATIENT)
    found = scene.diagnose()
    assert found.cause is not None
    assert (found.cause.code, found.cause.culprit) == ("gate_not_closed", "gateway-0")


def test_epochs_that_fail_for_no_pattern_are_shown_with_their_reasons():
    def broken(scene: Scene) -> None:
        perform = scene["trainer"].shell.perform

        def performs(actor: object, command: object) -> None:
            if isinstance(command, trainer.Offer) and command.epoch >= 4:
                scene["trainer"].after(0.1, trainer.TransferBroke(command.epoch, "offer", "OSError", "no free port"))
            else:
                perform(actor, command)

        scene["trainer"].shell.perform = performs

    found = scene_of(broken).diagnose()
    assert found.cause is not None
    assert (found.cause.code, found.cause.culprit) == ("refits_fail", "refit")
    assert "no free port" in found.cause.text


def test_a_buffer_that_holds_enough_groups_and_emits_none_is_silent():
    scene = scene_of(lambda scene: _mute(scene, "buffer", events.BatchReady, 0), seconds=90.0)
    found = scene.diagnose()
    assert found.cause is not None
    assert (found.cause.code, found.cause.culprit) == ("actor_silent", "buffer")


@pytest.mark.parametrize("event", [TransferOffered])
def test_the_frontier_lists_who_has_answered_and_who_has_not(event: type):
    scene = scene_of(lambda scene: _mute(scene, "trainer", event, 4), config=PATIENT)
    barrier = scene.diagnose().barrier
    assert barrier is not None
    assert barrier.phase == "drain"
    assert [(each.member, each.event) for each in barrier.missing] == [("trainer", "transfer.offered")]
    assert set(barrier.arrived) == {"gate.closed gateway-0", "engine.drained engine-0", "engine.drained engine-1"}


def test_a_wait_is_no_stall_before_it_takes_a_multiple_of_its_usual_length():
    story = trained(0)
    story.add(events.PolicyReady(version=0, step=0, parent_version=None, trainer_boot=1))
    for number in range(1, 4):
        story.add(events.WaitStarted(actor="trainer", on="buffer", cause="no batch"))
        story.add(events.WaitEnded(actor="trainer", on="buffer", seconds=100.0), after=100.0)
        story.add(batch(number, [1.0]))
        story.add(stepped(number))
    story.add(events.WaitStarted(actor="trainer", on="buffer", cause="no batch"))
    model = Model().apply_all(story.log)
    assert not diagnose(model, BASE, story.now + 390.0).stuck
    assert diagnose(model, BASE, story.now + 430.0).stuck


def test_a_finished_run_is_not_stuck_however_long_ago_it_ended():
    story = trained(3)
    story.add(events.RunStopping(reason="trained"))
    story.add(events.RunFinished(reason="trained"))
    found = diagnose(Model().apply_all(story.log), BASE, story.now + 1e6)
    assert not found.stuck
    assert "finished (trained)" in found.headline


def test_an_empty_log_is_not_stuck():
    assert "has not begun" in diagnose(Model(), BASE, 0.0).headline


def test_trainers_that_are_busy_bound_the_pace():
    model = Model().apply_all(trained(8).log)
    model.step_s = type(model.step_s)([5.5] * 8)
    found = diagnose(model, BASE, model.last_at)
    assert found.pressure is not None
    assert found.pressure.stage == "trainer"
    assert found.pressure.shares["trainer busy"] > 0.7


def test_a_trainer_that_starves_points_to_the_rollouts():
    scene = Scene(replace(BASE, rollout=replace(BASE.rollout, open_groups=1)))
    scene.start()
    scene.run(60.0)
    found = scene.diagnose()
    assert found.pressure is not None
    assert found.pressure.stage in ("collector", "environment")


def test_cycles_are_found_once_each():
    def edge(waiter: str, on: str) -> Edge:
        return Edge(waiter, on, "", 0.0)

    assert cycles([edge("a", "b"), edge("b", "c"), edge("c", "b")]) == (("b", "c"),)
    assert cycles([edge("a", "b"), edge("b", "a")]) == (("a", "b"),)
    assert cycles([edge("a", "b"), edge("b", "c")]) == ()


def test_a_finding_needs_a_known_cause():
    with pytest.raises(KeyError):
        finding("nonsense", "trainer", "text", 0.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1.0, "0.0 s"), (4.26, "4.3 s"), (42.0, "42 s"), (123.0, "2 min 3 s"), (7500.0, "2 h 5 min")]
)
def test_spans_read_like_speech(seconds: float, text: str):
    assert span(seconds) == text


def test_of_two_engines_the_one_that_fell_ill_is_named_not_the_one_with_its_requests():
    scene = scene_of(lambda scene: [_mute(scene, f"collector-{n}", events.TrajectoryFinished, 0) for n in (0,)])
    model = scene.model()
    model.engines["engine-0"] = Engine(boot=1, mode="suspect", since=model.last_at, reason="3 probes unanswered")
    found = diagnose(model, BASE, scene.world.now())
    assert found.cause is not None
    assert (found.cause.code, found.cause.culprit) == ("engine_hangs", "engine-0")
    assert "3 probes unanswered" in found.cause.text
    ended = "the server was ended by signal SIGKILL; /r/logs/engine-0.server.log ends with:\nlast words"
    model.engines["engine-0"] = Engine(boot=1, mode="dead", since=model.last_at, reason=ended)
    found = diagnose(model, BASE, scene.world.now())
    assert found.cause is not None
    assert (found.cause.code, found.cause.culprit) == ("engine_dead", "engine-0")
    assert "(the server was ended by signal SIGKILL; see /r/logs/engine-0.server.log); no sample" in found.cause.text


def dead(boot: int) -> events.EngineDead:
    return events.EngineDead(engine="engine-1", boot=boot, reason="the server exited with status 1")


def health(health: events.Health) -> events.EngineHealth:
    reason = "5 restarts did not help (fleet.restarts)"
    return events.EngineHealth(engine="engine-1", boot=4, was="dead", health=health, reason=reason, ordered=False)


@pytest.mark.parametrize(
    ("after", "code", "words"),
    [
        ([dead(1)], "engine_dead", "and was not started again; it is dead (boot 1)"),
        (
            [dead(1), booted("engine-1", 2), dead(2), booted("engine-1", 3)],
            "engine_dead",
            "was started again 2 times; it is starting (boot 3); it ended last with: the server exited with status 1",
        ),
        ([dead(1), booted("engine-1", 2)], "engine_dead", "was started again 1 time; it is starting (boot 2)"),
        ([dead(1), health("retired")], "engine_retired", "ago: 5 restarts did not help (fleet.restarts)"),
    ],
)
def test_an_engine_that_does_not_come_back_is_named_while_the_others_go_on(
    after: list[events.Event], code: str, words: str
):
    story = trained(3)
    for event in after:
        story.add(event, 10.0)
    story.add(stepped(4), 20.0)
    model = Model().apply_all(story.log)
    found = diagnose(model, BASE, story.now)
    assert not found.stuck
    assert found.headline.endswith("; engine-1 does not serve")
    assert [(each.code, each.culprit) for each in found.also] == [(code, "engine-1")]
    assert words in found.also[0].text
    story.add(committed(9, 4, "engine-0", "engine-1"))
    model.apply(story.log[-1])
    found = diagnose(model, BASE, story.now + 20.0)
    assert (found.also, "does not serve" in found.headline) == ((), False)


def test_an_engine_that_starts_for_the_first_time_or_was_scaled_away_is_not_missed():
    story = trained(3)
    story.add(dead(1))
    story.add(events.FleetScaled(engines=1))
    story.add(stepped(4), 60.0)
    assert diagnose(Model().apply_all(story.log), BASE, story.now).also == ()
    story = Story()
    story.add(booted("engine-0"))
    assert "serve" not in diagnose(Model().apply_all(story.log), BASE, story.now + 20.0).headline


def test_a_run_that_failed_is_explained_by_what_ended_it():
    story = Story()
    story.add(events.RunStarted(config_digest="d"))
    story.add(events.ActorFailed(actor="source", error="ProducerError", message="no dataset 'nosuch'", fatal=True))
    story.add(events.RunStopping(reason="source failed"))
    model = Model()
    model.apply_all(story.log)
    found = diagnose(model, BASE, story.now + 600.0)
    assert found.cause is not None
    assert (found.stuck, found.cause.code, found.cause.culprit) == (True, "actor_failed", "source")
    assert "no dataset 'nosuch'" in found.cause.text
    assert found.headline == "the run failed at step 0: source ended it"
    assert found.also == ()
    model.apply(story.add(events.RunStarted(config_digest="d", resumed=True)))
    assert diagnose(model, BASE, story.now + 1.0).cause is None
