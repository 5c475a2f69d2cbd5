"""What every engine behind Sluice does, whichever server it is: SGLang's native API as real servers behave.

A module that runs it imports everything from here and provides fixtures of module scope: `engine` (a `Client`),
`model_dir` (the served checkpoint: a small Llama in float32 with a context of 2048 and safetensors) and `form` (what
the server's /update_weights_from_tensor reads, see `actors.refit.transports.buffers`). No test needs a server of its
own; each leaves the one it got idle and unpaused, and restores the weights it changed.
"""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world
from torch.distributed.rendezvous import rendezvous
from transformers import LlamaConfig, LlamaForCausalLM

from actors.refit.transports.buffers import Form, HostBuffer
from actors.refit.transports.tensors import spec_of

DEADLINE = 60.0
LONG = 1900  # tokens: a generation that outlasts what a test does to it
PROMPT = [5, 17, 42, 99]
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def checkpoint(path: Path) -> Path:
    """The model of the suite, written to `path`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


class Client:
    """A server at `url`; calls block."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.pool = ThreadPoolExecutor(32)

    def call(self, method: str, path: str, body: Any = None, timeout: float = DEADLINE) -> tuple[int, Any]:
        """(status, JSON or text)."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                status, text = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def get(self, path: str) -> tuple[int, Any]:
        return self.call("GET", path)

    def post(self, path: str, body: Any = None, timeout: float = DEADLINE) -> tuple[int, Any]:
        return self.call("POST", path, body, timeout)

    def later(self, path: str, body: Any) -> Future[tuple[int, Any]]:
        return self.pool.submit(self.post, path, body)

    def generate(self, **body: Any) -> Any:
        status, found = self.post("/generate", {"input_ids": PROMPT, "sampling_params": GREEDY} | body)
        assert status == 200, found
        return found

    def running(self, rid: str, **params: Any) -> Running:
        return Running(self, rid, {"temperature": 0, "max_new_tokens": LONG, "ignore_eos": True} | params)


class Running:
    """A long streamed generation, known to have begun; `end` gives its last event."""

    def __init__(self, client: Client, rid: str, params: Mapping[str, Any]) -> None:
        body = {"input_ids": PROMPT, "rid": rid, "stream": True, "sampling_params": params, "return_logprob": True}
        request = urllib.request.Request(
            client.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        self._response = urllib.request.urlopen(request, timeout=DEADLINE)
        self.first = self._event()
        self._end = client.pool.submit(self._read)

    def end(self) -> dict[str, Any]:
        return self._end.result(DEADLINE)

    @property
    def ended(self) -> bool:
        return self._end.done()

    def _event(self) -> dict[str, Any] | None:
        for line in self._response:
            if line.startswith(b"data: "):
                return None if line.strip() == b"data: [DONE]" else json.loads(line[6:])
        raise AssertionError("the stream ended without [DONE]")

    def _read(self) -> dict[str, Any]:
        last = self.first
        with self._response:
            while (event := self._event()) is not None:
                last = event
        assert last is not None
        return last


class Trainer:
    """Rank 0 of a weight-update group with one engine, made the way SGLang makes it."""

    def __init__(self, engine: Client, group: str) -> None:
        self.engine, self.group = engine, group
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = port = probe.getsockname()[1]
        joined = engine.later(
            "/init_weights_update_group",
            {
                "master_address": "127.0.0.1",
                "master_port": port,
                "rank_offset": 1,
                "world_size": 2,
                "group_name": group,
                "backend": "gloo",
            },
        )
        wait = timedelta(seconds=DEADLINE)
        store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=wait))
        self._pg, _ = _new_process_group_helper(
            2, 0, [], Backend("gloo"), PrefixStore(group, store), group_name=group, timeout=wait
        )
        _world.pg_group_ranks[self._pg] = {0: 0, 1: 1}
        self.joined = joined.result(DEADLINE)

    def announce(self, tensors: Mapping[str, torch.Tensor], **extra: Any) -> Future[tuple[int, Any]]:
        body = {
            "names": list(tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": self.group,
        }
        return self.engine.later("/update_weights_from_distributed", body | extra)

    def send(self, tensors: Mapping[str, torch.Tensor], **extra: Any) -> tuple[int, Any]:
        """Announce and broadcast beside it; (status, answer)."""
        answer = self.announce(tensors, **extra)
        if extra.get("load_format") == "flattened_bucket":
            parts = [t.contiguous().view(-1).view(torch.uint8) for t in tensors.values()]
            dist.broadcast(torch.cat(parts), 0, group=self._pg)
        else:
            for tensor in tensors.values():
                dist.broadcast(tensor.contiguous(), 0, group=self._pg)
        return answer.result(DEADLINE)

    def vanish(self) -> None:
        """Close all connections without a word to the engine."""
        if self._pg is not None:
            dist.destroy_process_group(self._pg)
            self._pg = None

    def leave(self) -> tuple[int, Any]:
        answer = self.engine.post("/destroy_weights_update_group", {"group_name": self.group})
        self.vanish()
        return answer


@contextmanager
def training(engine: Client) -> Iterator[Trainer]:
    trainer = Trainer(engine, f"group-{uuid.uuid4().hex[:8]}")
    try:
        assert trainer.joined[0] == 200, trainer.joined
        assert trainer.joined[1]["success"] is True
        yield trainer
    finally:
        trainer.leave()


@contextmanager
def paused(engine: Client, mode: str) -> Iterator[None]:
    status, _ = engine.post("/pause_generation", {"mode": mode})
    assert status == 200
    try:
        yield
    finally:
        assert engine.post("/continue_generation", {})[0] == 200


def rid() -> str:
    return uuid.uuid4().hex


@pytest.fixture(scope="module")
def weights(model_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(model_dir / "model.safetensors")


@pytest.fixture
def other(engine: Client, weights: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Other weights for all matrices of the model; the original ones are back afterwards."""
    source = torch.Generator().manual_seed(7)
    yield {n: t + 0.05 * torch.randn(t.shape, generator=source) if t.dim() == 2 else t for n, t in weights.items()}
    with training(engine) as trainer:
        assert trainer.send(weights, load_format="flattened_bucket", weight_version="default")[0] == 200


# --- generation ---


def test_generate_answers_ids_and_meta_info(engine: Client) -> None:
    own = rid()
    found = engine.generate(rid=own, return_logprob=True, logprob_start_len=0)
    meta = found["meta_info"]
    assert len(found["output_ids"]) == 8
    assert meta["id"] == own
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (4, 8)
    assert 0 <= meta["cached_tokens"] < 4
    assert isinstance(meta["weight_version"], str)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == found["output_ids"]
    assert all(entry[0] <= 0 for entry in meta["output_token_logprobs"])
    assert [entry[1] for entry in meta["input_token_logprobs"]] == PROMPT
    assert meta["input_token_logprobs"][0][0] is None
    assert all(entry[0] <= 0 for entry in meta["input_token_logprobs"][1:])


def test_prompt_logprobs_are_empty_unless_a_start_is_given(engine: Client) -> None:
    assert engine.generate(return_logprob=True)["meta_info"]["input_token_logprobs"] == []


def test_logprobs_are_left_out_unless_asked_for(engine: Client) -> None:
    assert "output_token_logprobs" not in engine.generate()["meta_info"]


def test_greedy_generation_repeats_itself(engine: Client) -> None:
    assert engine.generate()["output_ids"] == engine.generate()["output_ids"]


def test_a_batch_answers_a_list_in_order_equal_to_single_answers(engine: Client) -> None:
    prompts = [PROMPT, [7, 8, 9], [100, 101, 102, 103, 104, 105]]
    rids = [rid() for _ in prompts]
    params = [GREEDY | {"max_new_tokens": n} for n in (3, 4, 5)]
    found = engine.generate(input_ids=prompts, rid=rids, sampling_params=params)
    assert [one["meta_info"]["id"] for one in found] == rids
    for prompt, own, one in zip(prompts, params, found, strict=True):
        assert one["output_ids"] == engine.generate(input_ids=prompt, sampling_params=own)["output_ids"]


def test_several_samples_of_a_prompt_answer_a_list(engine: Client) -> None:
    found = engine.generate(sampling_params={"temperature": 1, "max_new_tokens": 12, "n": 3, "ignore_eos": True})
    assert len(found) == 3
    assert len({tuple(one["output_ids"]) for one in found}) > 1
    assert len({one["meta_info"]["id"] for one in found}) == 3


def test_a_stop_token_ends_generation_and_is_part_of_it(engine: Client) -> None:
    ids = engine.generate()["output_ids"]
    stop = ids[3]
    found = engine.generate(sampling_params={"temperature": 0, "max_new_tokens": 8, "stop_token_ids": [stop]})
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert found["output_ids"] == ids[: ids.index(stop) + 1]


def test_output_logprobs_are_those_of_the_distribution_at_the_temperature(engine: Client) -> None:
    """At a high temperature the distribution is flat: its logprobs leave the neighbourhood of the unscaled ones."""
    flat = engine.generate(
        sampling_params={"temperature": 100.0, "max_new_tokens": 8, "ignore_eos": True}, return_logprob=True
    )
    spread = {entry[0] for entry in flat["meta_info"]["output_token_logprobs"]}
    assert max(spread) - min(spread) < 0.2


def test_a_stream_is_cumulative_and_ends_with_done(engine: Client) -> None:
    running = engine.running(rid(), max_new_tokens=40)
    assert running.first is not None
    last = running.end()  # raises without [DONE]
    assert last["output_ids"][: len(running.first["output_ids"])] == running.first["output_ids"]
    assert last["meta_info"]["completion_tokens"] == 40
    assert last["meta_info"]["finish_reason"]["type"] == "length"


# --- errors ---


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": PROMPT, "sampling_params": {"temperature": -1}},
        {"input_ids": PROMPT, "sampling_params": {"top_p": 0}},
        {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": -1}},
        {"input_ids": list(range(1, 300)) * 8, "sampling_params": {"max_new_tokens": 1}},
    ],
)
def test_a_semantic_error_answers_400_and_a_message(engine: Client, body: dict[str, Any]) -> None:
    status, found = engine.post("/generate", body)
    assert (status, list(found)) == (400, ["error"])
    assert found["error"]["message"]


@pytest.mark.parametrize("body", [b"{", {"input_ids": "abc", "sampling_params": 3}])
def test_a_schema_error_answers_400_in_the_other_shape(engine: Client, body: Any) -> None:
    status, found = engine.post("/generate", body)
    assert (status, found["object"]) == (400, "error")
    assert found["message"]


def test_an_unknown_sampling_parameter_is_refused(engine: Client) -> None:
    status, _ = engine.post("/generate", {"input_ids": PROMPT, "sampling_params": {"temprature": 1}})
    assert status in (400, 500)


# --- aborts ---


def test_an_abort_ends_the_id_and_those_that_begin_with_it_and_keeps_the_partial_output(engine: Client) -> None:
    base = rid()
    hit, longer, spared = (engine.running(f"{base}-{tail}") for tail in ("a-1", "a-12", "b-1"))
    status, body = engine.post("/abort_request", {"rid": f"{base}-a-1"})
    assert (status, body) in ((200, ""), (200, None))
    for one in (hit, longer):
        ended = one.end()
        assert ended["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(ended["output_ids"]) < LONG
        assert len(ended["meta_info"]["output_token_logprobs"]) == len(ended["output_ids"])
    assert not spared.ended
    engine.post("/abort_request", {"rid": f"{base}-b-1"})
    assert spared.end()["meta_info"]["finish_reason"]["type"] == "abort"


def test_an_abort_of_what_is_no_id_does_nothing_even_if_ids_begin_with_it(engine: Client) -> None:
    own = rid()
    running = engine.running(own, max_new_tokens=200)
    assert engine.post("/abort_request", {"rid": own[:-1]})[0] == 200
    assert running.end()["meta_info"]["finish_reason"]["type"] == "length"


def test_an_abort_of_an_unknown_id_is_no_error(engine: Client) -> None:
    assert engine.post("/abort_request", {"rid": rid()})[0] == 200


def test_abort_all_ends_everything(engine: Client) -> None:
    running = [engine.running(rid()) for _ in range(3)]
    assert engine.post("/abort_request", {"abort_all": True})[0] == 200
    assert [one.end()["meta_info"]["finish_reason"]["type"] for one in running] == ["abort"] * 3


# --- cache, health, information ---


def test_a_flush_fails_while_busy_and_succeeds_when_idle(engine: Client) -> None:
    own = rid()
    running = engine.running(own)
    status, text = engine.post("/flush_cache")
    assert status == 400
    assert "Flush cache failed." in text
    engine.post("/abort_request", {"rid": own})
    running.end()
    assert engine.post("/flush_cache?timeout=10")[0] == 200


def test_a_flush_with_a_timeout_waits_for_idle(engine: Client) -> None:
    own = rid()
    running = engine.running(own)
    flush = engine.pool.submit(engine.post, "/flush_cache?timeout=30")
    engine.post("/abort_request", {"rid": own})
    assert flush.result(DEADLINE)[0] == 200
    running.end()


def test_a_flush_gives_up_at_its_timeout(engine: Client) -> None:
    own = rid()
    running = engine.running(own)
    with paused(engine, "in_place"):
        assert engine.post("/flush_cache?timeout=1")[0] == 400
    engine.post("/abort_request", {"rid": own})
    running.end()


def test_health_says_200_when_serving(engine: Client) -> None:
    assert engine.get("/health")[0] == 200
    assert engine.get("/health_generate")[0] == 200


def test_the_version_label_shows_in_answers_and_in_model_info(engine: Client) -> None:
    body = {"new_version": "label-7", "abort_all_requests": False}
    status, found = engine.post("/update_weight_version", body)
    assert (status, found["success"]) == (200, True)
    assert engine.get("/model_info")[1]["weight_version"] == "label-7"
    assert engine.generate()["meta_info"]["weight_version"] == "label-7"
    engine.post("/update_weight_version", body | {"new_version": "default"})


def test_model_info_names_the_model(engine: Client, model_dir: Path) -> None:
    assert engine.get("/model_info")[1]["model_path"] == str(model_dir)


# --- pauses ---


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause_holds_new_requests_until_continue(engine: Client, mode: str) -> None:
    want = engine.generate()["output_ids"]
    with paused(engine, mode):
        assert engine.post("/pause_generation", {"mode": mode})[0] == 200  # twice is no error
        held = engine.later("/generate", {"input_ids": PROMPT, "sampling_params": GREEDY})
        assert engine.get("/health")[0] == 503
        assert not held.done()
    assert held.result(DEADLINE)[1]["output_ids"] == want
    assert engine.post("/continue_generation", {})[0] == 200


def test_pause_abort_ends_what_runs_and_lets_the_cache_be_flushed(engine: Client) -> None:
    running = engine.running(rid())
    with paused(engine, "abort"):
        ended = running.end()
        assert ended["meta_info"]["finish_reason"]["type"] == "abort"
        assert ended["output_ids"]
        assert engine.post("/flush_cache?timeout=10")[0] == 200


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_held_generation_continues_as_if_never_paused(engine: Client, mode: str) -> None:
    want = engine.generate(sampling_params={"temperature": 0, "max_new_tokens": 600, "ignore_eos": True})
    running = engine.running(rid(), max_new_tokens=600)
    with paused(engine, mode):
        assert not running.ended
        assert engine.post("/flush_cache")[0] == 400
    ended = running.end()
    assert ended["output_ids"] == want["output_ids"]
    assert ended["meta_info"]["finish_reason"]["type"] == "length"
    if mode == "retract":
        assert ended["meta_info"]["num_retractions"] >= 1


# --- weights ---


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_an_update_changes_outputs_to_the_new_weights(
    engine: Client, weights: dict[str, torch.Tensor], other: dict[str, torch.Tensor], load_format: str | None
) -> None:
    before = engine.generate()["output_ids"]
    with training(engine) as trainer:
        status, found = trainer.send(other, load_format=load_format, weight_version="v1")
        assert (status, found["success"]) == (200, True)
        after = engine.generate()
        assert after["output_ids"] != before
        assert after["meta_info"]["weight_version"] == "v1"
        name = "model.layers.0.mlp.down_proj.weight"
        rows = engine.post("/get_weights_by_name", {"name": name, "truncate_size": 2})[1]
        torch.testing.assert_close(torch.tensor(rows), other[name][:2])
        assert trainer.send(weights, load_format=load_format, weight_version="default")[0] == 200
        assert engine.generate()["output_ids"] == before


def test_buckets_of_an_update_add_up(engine: Client, other: dict[str, torch.Tensor]) -> None:
    items = list(other.items())
    with training(engine) as trainer:
        assert engine.post("/flush_cache?timeout=10")[0] == 200
        with paused(engine, "abort"):
            for start in range(0, len(items), 5):
                part = dict(items[start : start + 5])
                extra = {"load_format": "flattened_bucket", "flush_cache": False, "weight_version": "v2"}
                assert trainer.send(part, **extra)[0] == 200
            assert engine.post("/flush_cache?timeout=10")[0] == 200
        several = engine.generate()["output_ids"]
        assert trainer.send(other, load_format="flattened_bucket")[0] == 200
        assert engine.generate()["output_ids"] == several


def test_buckets_of_shared_memory_are_loaded_while_paused_and_can_be_filled_again(
    engine: Client, weights: dict[str, torch.Tensor], form: Form
) -> None:
    want = engine.generate()["output_ids"]
    source = torch.Generator().manual_seed(8)
    changed = {n: t + 0.05 * torch.randn(t.shape, generator=source) if t.dim() == 2 else t for n, t in weights.items()}
    size = 4 * max(5 * tensor.numel() for tensor in weights.values())
    buffer = HostBuffer(size)
    try:
        for tensors, version in ((changed, "v3"), (weights, "default")):
            assert engine.post("/flush_cache?timeout=10")[0] == 200
            with paused(engine, "in_place"):
                for start in range(0, len(tensors), 5):
                    part = dict(list(tensors.items())[start : start + 5])
                    buffer.fill(part.values(), time.monotonic() + DEADLINE)
                    body = {
                        "serialized_named_tensors": [buffer.part([spec_of(n, t) for n, t in part.items()], form)],
                        "load_format": "flattened_bucket",
                        "flush_cache": False,
                        "weight_version": version,
                    }
                    status, found = engine.post("/update_weights_from_tensor", body)
                    assert (status, found["success"]) == (200, True)
                buffer.fill([torch.zeros(size // 4)], time.monotonic() + DEADLINE)
                assert engine.post("/flush_cache?timeout=10")[0] == 200
            found = engine.generate()
            assert (found["output_ids"] == want) == (version == "default")
            assert found["meta_info"]["weight_version"] == version
    finally:
        buffer.close()


def test_an_unknown_name_is_ignored_with_success(engine: Client) -> None:
    want = engine.generate()["output_ids"]
    with training(engine) as trainer:
        status, found = trainer.send({"model.no.such.weight": torch.ones(3)}, load_format="flattened_bucket")
        assert (status, found["success"]) == (200, True)
    assert engine.generate()["output_ids"] == want


def test_a_wrong_shape_answers_400_and_the_engine_goes_on(engine: Client, other: dict[str, torch.Tensor]) -> None:
    with training(engine) as trainer:
        status, found = trainer.send({"model.norm.weight": torch.ones(3)})
        assert status == 400
        assert "partially updated" in json.dumps(found)
        assert trainer.send(other, load_format="flattened_bucket")[0] == 200
    engine.generate()


def test_a_second_group_of_the_same_name_is_refused(engine: Client) -> None:
    with training(engine) as trainer:
        body = {"master_address": "127.0.0.1", "master_port": trainer.port, "rank_offset": 1, "world_size": 2}
        status, found = engine.post(
            "/init_weights_update_group", body | {"group_name": trainer.group, "backend": "gloo"}
        )
        assert (status, found["success"]) == (400, False)


def test_a_trainer_that_leaves_in_mid_update_costs_400_and_the_engine_recovers(
    engine: Client, other: dict[str, torch.Tensor]
) -> None:
    want = engine.generate()["output_ids"]
    with training(engine) as trainer:
        broken = trainer.announce(other, load_format="flattened_bucket")
        trainer.vanish()
        status, found = broken.result(DEADLINE)
        assert (status, found["success"]) == (400, False)
    assert engine.generate()["output_ids"] == want
    with training(engine) as trainer:
        assert trainer.send(other, load_format="flattened_bucket")[0] == 200


def test_an_update_waits_for_running_requests_when_not_paused(engine: Client, other: dict[str, torch.Tensor]) -> None:
    """Without a flush: a real server that is asked for one in the moment in which a request ends may die of it."""
    want = engine.generate(sampling_params={"temperature": 0, "max_new_tokens": 300, "ignore_eos": True})
    with training(engine) as trainer:
        running = engine.running(rid(), max_new_tokens=300)
        assert trainer.send(other, load_format="flattened_bucket", flush_cache=False)[0] == 200
        assert running.end()["output_ids"] == want["output_ids"]
    assert engine.post("/flush_cache?timeout=10")[0] == 200


def test_checksums_come_by_rank_and_change_with_the_weights(engine: Client, other: dict[str, torch.Tensor]) -> None:
    def ask() -> list[dict[str, dict[str, str]]]:
        status, found = engine.post("/weights_checker", {"action": "checksum"})
        assert (status, found["success"]) == (200, True)
        return found["ranks"]

    before = ask()
    assert ask() == before
    assert all(isinstance(value, str) for value in before[0]["checksums"].values())
    with training(engine) as trainer:
        trainer.send(other, load_format="flattened_bucket")
    assert ask() != before


def test_an_unknown_parameter_name_answers_400(engine: Client) -> None:
    assert engine.post("/get_weights_by_name", {"name": "no.such", "truncate_size": 1})[0] == 400
