"""Continuous batching: who shares a batch never shows in an answer, and no stale key or value is used."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from actors.engine.torch_server import protocol
from actors.engine.torch_server.generation import Generation

Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As on the scheduler's thread."""
    with torch.inference_mode():
        yield


def output(g: Generation) -> list[int]:
    return g.tokens[g.prompt :]


def ended(engine: Any) -> list[Generation]:
    found, engine.scheduler._out = engine.scheduler._out, []
    return found


def test_answers_do_not_depend_on_the_company(stepped: Make) -> None:
    """Ragged arrivals and lengths, rows freed and refilled, against each prompt alone."""
    draw = random.Random(4)
    jobs = [([draw.randrange(3, 160) for _ in range(draw.randrange(1, 60))], draw.randrange(1, 12)) for _ in range(40)]
    crowd, alone = stepped(max_running=7), stepped(prefix_tokens=0)
    made = []
    for prompt, new in jobs:
        made.append(crowd.add(prompt, new))
        crowd.step(draw.randrange(0, 3))
        assert [g.row for g in crowd.scheduler.rows] == list(range(len(crowd.scheduler.rows)))
    crowd.run()
    for (prompt, new), g in zip(jobs, made, strict=True):
        single = alone.alone(prompt, new)
        assert output(g) == output(single)
        assert g.logprobs == pytest.approx(single.logprobs, abs=1e-4)


def test_sampling_does_not_depend_on_the_company(stepped: Make) -> None:
    crowd, alone = stepped(), stepped()
    company = [crowd.add([9, i + 3], 9, temperature=0.7) for i in range(5)]
    want = [alone.alone([9, i + 3], 9, temperature=0.7) for i in range(5)]
    crowd.run()
    assert [output(g) for g in company] == [output(g) for g in want]


def test_equal_prompts_of_a_batch_share_one_prefill(stepped: Make) -> None:
    engine = stepped()
    prompt = list(range(3, 23))
    group = [engine.add(prompt, 5, temperature=1.0) for _ in range(6)]
    other = engine.add([8, 9], 5)
    engine.step()
    assert [g.cached for g in group] == [0, 19, 19, 19, 19, 19]
    assert other.cached == 0
    engine.run()
    single = stepped()
    for g in group:
        again = single.alone(g.tokens[:-1], 1)
        assert again.tokens[:-1] == g.tokens[:-1]
    greedy = engine.alone(prompt, 5)
    assert output(greedy) == output(single.alone(prompt, 5))


def test_a_finished_sequence_serves_as_prefix_until_flushed(stepped: Make) -> None:
    engine, plain = stepped(), stepped(prefix_tokens=0)
    first = engine.alone(list(range(3, 73)), 30)
    longer = [*first.tokens, 5, 6]
    shared = engine.alone(longer, 6)
    assert shared.cached == 96
    want = plain.alone(longer, 6)
    assert want.cached == 0
    assert output(shared) == output(want)
    assert shared.logprobs == pytest.approx(want.logprobs, abs=1e-4)
    assert engine.scheduler.flush()
    assert engine.alone(longer, 6).cached == 0


def test_prompt_logprobs_are_complete_despite_a_cached_prefix(stepped: Make) -> None:
    engine = stepped()
    prompt = list(range(3, 103))
    engine.alone(prompt, 4)
    whole, tail = engine.alone(prompt, 4, start=0), engine.alone(prompt, 4, start=70)
    assert (whole.cached, len(whole.prompt_logprobs)) == (0, 99)
    assert (tail.cached, len(tail.prompt_logprobs)) == (64, 29)
    assert tail.prompt_logprobs == pytest.approx(whole.prompt_logprobs[70:], abs=1e-4)


def changed(engine: Any) -> list[tuple[str, torch.Tensor]]:
    source = torch.Generator().manual_seed(11)
    named = engine.weights.named
    return [(n, t + 0.1 * torch.randn(t.shape, generator=source)) for n, t in named.items() if t.dim() == 2]


def test_an_update_ends_the_use_of_every_prefix_computed_before(stepped: Make) -> None:
    engine = stepped()
    prompt = list(range(3, 73))
    before = engine.alone(prompt, 8)
    engine.scheduler.apply(changed(engine), "v1", False)
    after = engine.alone(prompt, 8)
    assert after.cached == 0
    assert output(after) != output(before)
    assert (before.version, after.version) == ("default", "v1")


def test_a_sequence_that_spans_an_update_is_never_a_prefix(stepped: Make) -> None:
    engine = stepped()
    spanning = engine.add(list(range(3, 73)), 30)
    engine.step(3)
    engine.scheduler.apply(changed(engine), None, False)
    engine.run()
    assert engine.alone(spanning.tokens, 2).cached == 0


def test_a_retracted_generation_continues_from_its_tokens_under_the_new_weights(stepped: Make) -> None:
    engine = stepped()
    g = engine.add(list(range(3, 73)), 20)
    engine.step(8)
    engine.scheduler.pause("retract")
    partial = list(g.tokens)
    engine.scheduler.apply(changed(engine), None, False)
    engine.scheduler.resume()
    engine.run()
    assert g.retractions == 1
    want = engine.alone(partial, 20 - 8)
    assert g.tokens == want.tokens
    assert g.logprobs[8:] == pytest.approx(want.logprobs, abs=1e-4)


def test_a_retraction_in_the_middle_of_a_prompt_starts_it_over(stepped: Make) -> None:
    engine = stepped(chunk=16)
    g = engine.add(list(range(3, 73)), 4, start=0)
    engine.step(2)
    assert 0 < g.filled < 70
    engine.scheduler.retract()
    engine.run()
    want = stepped().alone(list(range(3, 73)), 4, start=0)
    assert output(g) == output(want)
    assert g.prompt_logprobs == pytest.approx(want.prompt_logprobs, abs=1e-4)


def test_an_abort_frees_the_row_at_once_and_spares_the_others(stepped: Make) -> None:
    engine = stepped(chunk=16, max_running=3)
    keep = [engine.add([5, i + 3], 9, rid=f"b{i}") for i in range(2)]
    gone = engine.add([7, 8], 9, rid="a1")
    waiting = engine.add([9], 9, rid="a2")
    engine.step(3)
    engine.scheduler.abort("a")
    assert engine.scheduler.rows == keep
    assert [g.rid for g in ended(engine)] == ["a1", "a2"]
    assert (len(output(gone)), output(waiting)) == (3, [])
    engine.run()
    alone = stepped()
    assert [output(g) for g in keep] == [output(alone.alone([5, i + 3], 9)) for i in range(2)]


def test_an_abort_in_the_middle_of_a_long_prompt_leaves_the_scheduler_sound(stepped: Make) -> None:
    engine = stepped(chunk=16)
    other = engine.add([5, 6], 12)
    engine.step(2)
    engine.add(list(range(3, 73)), 4, rid="long")
    engine.step()
    engine.scheduler.abort("long")
    engine.run()
    assert output(other) == output(stepped().alone([5, 6], 12))


def test_finishing_while_a_long_prompt_is_half_computed_keeps_its_row_right(stepped: Make) -> None:
    engine, long = stepped(chunk=16), list(range(3, 73))
    for i in range(3):
        engine.add([5, i + 3], 12, rid=f"x{i}")
    engine.step(2)
    g = engine.add(long, 4)
    engine.step(2)
    engine.scheduler.abort("x0")
    engine.run()
    assert output(g) == output(stepped().alone(long, 4))


def test_the_token_budget_bounds_rows_times_reach(stepped: Make) -> None:
    engine = stepped(max_total_tokens=200, prefix_tokens=0)
    made = [engine.add([4] * 30, 10) for _ in range(9)]
    made += [engine.add([4] * 90, 10, rid="long"), engine.add([4], 2)]
    while not engine.scheduler.idle:
        engine.step()
        cache, rows = engine.scheduler.cache, engine.scheduler.rows
        assert cache.rows * cache.length <= 200
        assert len(rows) * max((g.reach for g in rows), default=0) <= 200
    assert all(g.finish == {"type": "length", "length": g.sampling.max_new} for g in made)


def test_a_stop_token_ends_it_and_a_minimum_defers_the_end(stepped: Make) -> None:
    engine = stepped()
    free = output(engine.alone([5, 6, 7], 8))
    stop = free[2]
    hit = engine.alone([5, 6, 7], 8, stops=frozenset([stop]))
    assert output(hit) == free[: free.index(stop) + 1]
    assert hit.finish == {"type": "stop", "matched": stop}
    deferred = engine.alone([5, 6, 7], 8, stops=frozenset([stop]), min_new=6)
    assert stop not in output(deferred)[:5]
    assert len(output(deferred)) >= 6


def test_weights_that_are_not_finite_end_generations_and_poison_nothing_later(stepped: Make) -> None:
    engine = stepped()
    good = {name: tensor.clone() for name, tensor in engine.weights.named.items()}
    prompt = list(range(3, 73))
    want = output(engine.alone(prompt, 6))
    engine.scheduler.apply([("model.norm.weight", torch.full((64,), float("nan")))], None, False)
    assert engine.alone(prompt, 6).finish == {"type": "abort", "message": "logits are not finite"}
    broken = torch.full_like(good["model.layers.0.self_attn.v_proj.weight"], float("nan"))
    engine.scheduler.apply([("model.layers.0.self_attn.v_proj.weight", broken)], None, False)
    assert output(engine.alone(prompt, 6)) == []
    engine.scheduler.apply(list(good.items()), None, False)
    assert output(engine.alone([5], 6)) != []
    assert output(engine.alone(prompt, 6)) == want


def test_tokens_are_told_apart_by_the_weights_that_sampled_them(stepped: Make) -> None:
    """Held still over an update, a sequence keeps its keys and values, which no later prompt is offered."""
    engine = stepped()
    long = list(range(5, 25))
    g, late = engine.add(long, 6), engine.add([7, 8], 4)
    engine.step(3)
    before = output(g)
    engine.scheduler.pause("in_place")
    engine.scheduler.apply(changed(engine), "v1", False)
    engine.scheduler.apply([], "v1", False)
    assert output(g) == before
    engine.scheduler.resume()
    engine.run()
    fresh = engine.alone(long, 6)
    found = [protocol.answer(each, "v1")["meta_info"]["weight_version_spans"] for each in (g, late, fresh)]
    assert found == [[(0, 3, "default"), (3, 6, "v1")], [(0, 3, "default"), (3, 4, "v1")], [(0, 6, "v1")]]
    assert fresh.cached == 0
    assert protocol.answer(engine.add([5]), "v1")["meta_info"]["weight_version_spans"] == []


def test_a_flush_is_refused_while_anything_is_held(stepped: Make) -> None:
    engine = stepped()
    engine.add([5], 4)
    assert not engine.scheduler.flush()
    engine.step()
    engine.scheduler.pause("retract")
    assert not engine.scheduler.flush()
    engine.scheduler.abort(None)
    assert engine.scheduler.flush()


def test_an_error_in_a_step_is_reported_and_ends_the_thread(stepped: Make) -> None:
    scheduler, seen = stepped().scheduler, SimpleQueue()
    scheduler.connect(lambda generations: None, seen.put)
    scheduler.start()
    scheduler.call(lambda: setattr(scheduler, "_step", lambda: 1 / 0)).result(10)
    scheduler.submit([Generation("a", [5], stepped().add([5]).sampling, 0, False, -1, False, None)])
    assert isinstance(seen.get(timeout=10), ZeroDivisionError)
    scheduler.stop(10)


def test_a_flush_waits_for_idle_and_one_given_up_never_happens(stepped: Make) -> None:
    engine = stepped()
    scheduler, published = engine.scheduler, SimpleQueue()
    scheduler.connect(published.put, published.put)
    scheduler.start()
    scheduler.call(lambda: scheduler.pause("in_place")).result(10)
    engine.add([5], 4)
    given_up, waiting = scheduler.flush_when_idle(), scheduler.flush_when_idle()
    assert given_up.cancel()
    assert scheduler.call(scheduler.flush).result(10) is False
    assert not waiting.done()
    scheduler.call(scheduler.resume).result(10)
    assert waiting.result(10) is True
    assert [g.finish["type"] for g in published.get(timeout=10)] == ["length"]
    scheduler.stop(10)
