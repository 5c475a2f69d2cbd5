"""The conformance suite against the embedded server, as a real process, and what it promises beyond the suite."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash

from tests.contract.engine_conformance import *  # noqa: F403 - the suite
from tests.contract.engine_conformance import GREEDY, LONG, PROMPT, Client, checkpoint, paused, rid, training

START_DEADLINE = 60.0
DEVICE = os.environ.get("SLUICE_ENGINE_DEVICE", "cpu")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def form() -> str:
    return "shared"


@pytest.fixture(scope="module")
def engine(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    port_file = tmp_path_factory.mktemp("run") / "port"
    command = [sys.executable, "-m", "actors.engine.torch_server", "--model-path", str(model_dir)]
    command += ["--port-file", str(port_file), "--threads", "1", "--group-timeout-s", "10", "--device", DEVICE]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + START_DEADLINE
        while not port_file.exists():
            assert process.poll() is None, "the server ended while starting"
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.02)
        client = Client(f"http://127.0.0.1:{port_file.read_text().strip()}")
        yield client
        assert client.get("/server_info")[1]["internal_states"][0]["running"] == 0
    finally:
        process.terminate()
        assert process.wait(10) == 0


def test_a_token_outside_the_vocabulary_answers_400(engine: Client) -> None:
    for bad in (320, -1):
        status, found = engine.post("/generate", {"input_ids": [1, bad]})
        assert (status, list(found)) == (400, ["error"])


def test_an_update_through_a_group_that_was_never_joined_answers_400(engine: Client) -> None:
    body = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "never"}
    status, found = engine.post("/update_weights_from_distributed", body)
    assert (status, found["success"]) == (400, False)
    engine.generate()


@pytest.mark.parametrize(
    "part", ["gASVBQAAAAAAAAB9lC4=", '{"memory": {"type": "host", "name": "../etc/passwd"}, "tensors": []}']
)
def test_pickles_and_files_that_are_not_shared_memory_are_refused(engine: Client, part: str) -> None:
    body = {"serialized_named_tensors": [part], "load_format": "flattened_bucket"}
    status, found = engine.post("/update_weights_from_tensor", body)
    assert (status, found["success"]) == (400, False)
    engine.generate()


def test_a_wrong_shape_changes_nothing(engine: Client, weights: dict[str, torch.Tensor]) -> None:
    before = engine.post("/weights_checker", {"action": "checksum"})[1]["ranks"]
    good, bad = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    with training(engine) as trainer:
        assert trainer.send({good: weights[good] + 1, bad: torch.ones(3)})[0] == 400
    assert engine.post("/weights_checker", {"action": "checksum"})[1]["ranks"] == before


def test_checksums_equal_the_senders(engine: Client, other: dict[str, torch.Tensor]) -> None:
    with training(engine) as trainer:
        assert trainer.send(other, load_format="flattened_bucket")[0] == 200
    want = {name: xxhash.xxh3_128_hexdigest(tensor.contiguous().numpy().tobytes()) for name, tensor in other.items()}
    assert engine.post("/weights_checker", {"action": "checksum"})[1]["ranks"] == [{"checksums": want}]


def test_health_and_aborts_answer_while_an_update_waits_for_its_sender(
    engine: Client, weights: dict[str, torch.Tensor]
) -> None:
    with training(engine) as trainer:
        own = rid()
        running = engine.running(own)
        with paused(engine, "in_place"):
            waiting = trainer.announce(weights, load_format="flattened_bucket", flush_cache=False)
            engine.post("/abort_request", {"rid": own})
            assert running.end()["meta_info"]["finish_reason"]["type"] == "abort"
        assert engine.get("/health")[0] == 200
        assert not waiting.done()
        trainer.vanish()
        assert waiting.result(30)[0] == 400


def test_a_join_without_its_rank_0_fails_at_the_timeout_and_blocks_nobody(engine: Client) -> None:
    body = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    joining = engine.later("/init_weights_update_group", body | {"group_name": "lonely"})
    assert engine.generate()["output_ids"]
    assert engine.get("/health_generate")[0] == 200
    status, found = joining.result(15)
    assert (status, found["success"]) == (400, False)


def test_an_update_with_a_flush_recomputes_what_a_pause_holds(engine: Client, other: dict[str, torch.Tensor]) -> None:
    """The held generation continues from its tokens as the new weights would: no old keys or values are left."""
    with training(engine) as trainer:
        running = engine.running(rid(), max_new_tokens=400)
        with paused(engine, "in_place"):
            assert trainer.send(other, load_format="flattened_bucket", flush_cache=True)[0] == 200
        ended = running.end()
    ids, entries = ended["output_ids"], ended["meta_info"]["output_token_logprobs"]
    for made in range(1, 400):
        tail = engine.generate(input_ids=PROMPT + ids[:made], return_logprob=True, sampling_params=GREEDY)
        if tail["output_ids"] == ids[made : made + 8]:
            got = [entry[0] for entry in entries[made : made + 8]]
            want = [entry[0] for entry in tail["meta_info"]["output_token_logprobs"]]
            assert got == pytest.approx(want, abs=1e-4)
            return
    pytest.fail("the continuation follows the new weights nowhere")


def test_a_request_held_by_a_pause_can_be_aborted(engine: Client) -> None:
    own = rid()
    with paused(engine, "retract"):
        held = engine.later("/generate", {"input_ids": PROMPT, "rid": own, "sampling_params": GREEDY})
        while not engine.get("/server_info")[1]["held"]:
            assert not held.done()
        engine.post("/abort_request", {"rid": own})
        status, found = held.result(30)
    assert status == 200
    assert found["meta_info"]["finish_reason"]["type"] == "abort"
    assert found["output_ids"] == []


def test_an_id_in_use_is_refused(engine: Client) -> None:
    own = rid()
    running = engine.running(own)
    status, found = engine.post("/generate", {"input_ids": PROMPT, "rid": own})
    assert status == 400
    assert "Duplicate" in found["error"]["message"]
    engine.post("/abort_request", {"rid": own})
    running.end()


def test_a_caller_that_hangs_up_ends_its_generation(engine: Client) -> None:
    with socket.create_connection(("127.0.0.1", int(engine.url.rpartition(":")[2]))) as caller:
        body = json.dumps({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True}})
        caller.sendall(f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        while not engine.get("/server_info")[1]["internal_states"][0]["running"]:
            pass
    steps = engine.get("/server_info")[1]["internal_states"][0]["steps"]
    assert engine.post("/flush_cache?timeout=10")[0] == 200
    assert engine.get("/server_info")[1]["internal_states"][0]["steps"] - steps < LONG - 100
