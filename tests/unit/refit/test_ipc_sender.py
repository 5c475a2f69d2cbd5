"""The colocated sender against receivers that speak its protocol, in threads of this process."""

from __future__ import annotations

import base64
import os
import pickle
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from actors.engine.torch_server import shared
from actors.leftovers import BUCKET, sweep
from actors.refit.transports import Offer, Sent, TransferError, ipc
from actors.refit.transports.buffers import Form, HostBuffer
from actors.refit.transports.ipc import IpcSender
from actors.refit.transports.tensors import checksum, spec_of
from contracts.events import Rank, TransferStarted
from contracts.handles import DIRECTORY, Filled, Hello, Message, Refused, Taken, line, parse
from contracts.weights import digest

FAR = 60.0
"""A deadline that no test may come near."""
CPU = torch.device("cpu")


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ("embed", torch.randn(33, 17, generator=generator)),
        ("scale", torch.randn((), generator=generator)),
        ("half", torch.randn(5, 3, generator=generator).to(torch.bfloat16)),
        ("transposed", torch.randn(64, 32, generator=generator).t()),
        ("large", torch.randn(64, 64, generator=generator)),
        ("last", torch.randn(7, generator=generator)),
    ]


def started(epoch: int, count: int, ranks: int = 1) -> TransferStarted:
    members = tuple(Rank(f"engine-{i}", 1, 1 + i * ranks, ranks) for i in range(count))
    world = 1 + count * ranks
    return TransferStarted(epoch=epoch, version=1, group="g", fresh=True, members=members, world_size=world)


class Receiver:
    """One sidecar: `run` takes every bucket, handing each `Filled` to `load` before it says so."""

    def __init__(self, offer: Offer, hello: Hello) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(FAR)
        self.socket.connect(offer.address.removeprefix("unix:"))
        self.lines = self.socket.makefile("rb")
        self.count = len(offer.buckets)
        self.say(hello)

    def say(self, message: Message) -> None:
        self.socket.sendall(line(message))

    def next(self) -> Filled:
        message = parse(self.lines.readline())
        assert isinstance(message, Filled)
        return message

    def run(self, load: Callable[[Filled], None]) -> None:
        for index in range(self.count):
            filled = self.next()
            assert filled.index == index
            load(filled)
            self.say(Taken(index))


def load(form: Form, into: dict[str, torch.Tensor]) -> Callable[[Filled], None]:
    def one(filled: Filled) -> None:
        (part,) = filled.parts
        if form == "shared":
            with shared.opened(shared.parse([part]), CPU) as tensors:
                into.update({name: tensor.clone() for name, tensor in tensors})
            return
        bucket = pickle.loads(base64.b64decode(part))  # as SGLang does
        for meta in bucket["metadata"]:
            data = bucket["flattened_tensor"][meta.start_idx : meta.end_idx]
            into[meta.name] = data.view(meta.dtype).reshape(meta.shape).clone()

    return one


def leftovers() -> set[Path]:
    return {*DIRECTORY.glob("sluice-*")}


@pytest.fixture(params=["shared", "pickle"])
def form(request: pytest.FixtureRequest) -> Form:
    return request.param


@pytest.fixture
def sender() -> Iterator[IpcSender]:
    before = leftovers()
    made = IpcSender(bucket_bytes=6000, form="shared")
    yield made
    made.close()
    assert leftovers() <= before


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_every_tensor_arrives_as_it_was_and_the_next_transfer_uses_the_same_memory(
    form: Form, background: ThreadPoolExecutor
) -> None:
    before = leftovers()
    sender = IpcSender(bucket_bytes=6000, form=form)
    held = set()
    for epoch in (1, 2):
        offer = sender.offer(weights(epoch))
        assert len(offer.buckets) > 2
        assert offer.digest == digest({name: checksum(tensor) for name, tensor in weights(epoch)})
        sending = background.submit(sender.send, started(epoch, 2), FAR)
        found: list[dict[str, torch.Tensor]] = [{}, {}]
        receivers = [Receiver(offer, Hello(f"engine-{i}", 1, epoch)) for i in range(2)]
        runs = [background.submit(r.run, load(form, into)) for r, into in zip(receivers, found, strict=True)]
        for run in runs:
            run.result(FAR)
        assert sending.result(FAR).bytes == offer.bytes
        for into in found:
            assert {n: (t.dtype, t.tolist()) for n, t in into.items()} == {
                n: (t.dtype, t.tolist()) for n, t in weights(epoch)
            }
        assert not Path(offer.address.removeprefix("unix:")).exists()
        held |= leftovers() - before
    assert len(held) == 2
    sender.close()
    assert leftovers() <= before


def test_nobody_but_this_user_can_reach_the_offer_or_the_memory(sender: IpcSender) -> None:
    offer = sender.offer(weights(1))
    directory = Path(offer.address.removeprefix("unix:")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    buffer = HostBuffer(100)
    (file,) = (path for path in leftovers() if path.stat().st_size == 100)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    buffer.close()


def test_each_rank_of_a_server_gets_a_part_of_its_own(sender: IpcSender, background: ThreadPoolExecutor) -> None:
    offer = sender.offer(weights(1))
    sending = background.submit(sender.send, started(1, 1, ranks=3), FAR)
    counts = []
    Receiver(offer, Hello("engine-0", 1, 1)).run(lambda filled: counts.append(len(filled.parts)))
    sending.result(FAR)
    assert set(counts) == {3}


def test_a_buffer_is_not_filled_again_before_all_have_taken_it(
    sender: IpcSender, background: ThreadPoolExecutor
) -> None:
    offer = sender.offer(weights(1))
    sending = background.submit(sender.send, started(1, 2), FAR)
    fast, slow = (Receiver(offer, Hello(f"engine-{i}", 1, 1)) for i in range(2))
    for index in range(2):
        fast.next()
        fast.say(Taken(index))
    fast.socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        fast.lines.readline()
    found: dict[str, torch.Tensor] = {}
    load("shared", found)(slow.next())
    assert found["embed"].tolist() == weights(1)[0][1].tolist()
    sender.abandon()
    with pytest.raises(TransferError):
        sending.result(FAR)


def failure(sending: Future[Sent]) -> TransferError:
    with pytest.raises(TransferError) as caught:
        sending.result(FAR)
    return caught.value


def test_a_receiver_that_never_comes_is_named_at_the_deadline(
    sender: IpcSender, background: ThreadPoolExecutor
) -> None:
    offer = sender.offer(weights(1))
    sending = background.submit(sender.send, started(1, 2), 0.5)
    Receiver(offer, Hello("engine-1", 1, 1))
    error = failure(sending)
    assert error.phase == "join"
    assert "never came: engine-0" in error.reason


def test_a_receiver_that_does_not_load_is_named_at_the_deadline(
    sender: IpcSender, background: ThreadPoolExecutor
) -> None:
    offer = sender.offer(weights(1))
    sending = background.submit(sender.send, started(1, 1), 0.5)
    receiver = Receiver(offer, Hello("engine-0", 1, 1))
    receiver.next()
    error = failure(sending)
    assert error.phase == "send"
    assert "engine-0 did not load bucket 0 in time" in error.reason


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda r: r.say(Refused(0, "no such shape")), "engine-0 refused bucket 0: no such shape"),
        (lambda r: r.say(Taken(1)), "engine-0 answered Taken(index=1) to bucket 0"),
        (lambda r: r.socket.sendall(b"garbage\n"), "engine-0, bucket 0"),
        (lambda r: r.socket.shutdown(socket.SHUT_RDWR), "engine-0, bucket "),
    ],
)
def test_a_receiver_that_fails_ends_the_transfer_with_its_reason(
    sender: IpcSender, background: ThreadPoolExecutor, act: Callable[[Receiver], None], said: str
) -> None:
    offer = sender.offer(weights(1))
    sending = background.submit(sender.send, started(1, 1), FAR)
    receiver = Receiver(offer, Hello("engine-0", 1, 1))
    receiver.next()
    act(receiver)
    assert said in failure(sending).reason
    again = sender.offer(weights(2))
    sending = background.submit(sender.send, started(2, 1), FAR)
    Receiver(again, Hello("engine-0", 1, 2)).run(lambda _: None)
    sending.result(FAR)


def test_strangers_are_turned_away_and_the_transfer_goes_on(sender: IpcSender, background: ThreadPoolExecutor) -> None:
    offer = sender.offer(weights(1))
    sending = background.submit(sender.send, started(1, 1), FAR)
    for hello in (Hello("engine-0", 2, 1), Hello("engine-0", 1, 7), Hello("engine-9", 1, 1), Taken(0)):
        assert Receiver(offer, hello).lines.readline() == b""  # type: ignore[arg-type]
    garbage = Receiver(offer, Hello("engine-9", 1, 1))
    assert garbage.lines.readline() == b""
    Receiver(offer, Hello("engine-0", 1, 1)).run(lambda _: None)
    sending.result(FAR)


@pytest.mark.parametrize("joined", [False, True])
def test_an_abandoned_transfer_ends_at_once(sender: IpcSender, background: ThreadPoolExecutor, joined: bool) -> None:
    offer = sender.offer(weights(1))
    begun = threading.Event()

    def send() -> Sent:
        begun.set()
        return sender.send(started(3, 1), FAR)

    sending = background.submit(send)
    begun.wait(FAR)
    receiver = Receiver(offer, Hello("engine-0", 1, 3)) if joined else None
    if receiver is not None:
        receiver.next()
    while sender._attempt is None:
        time.sleep(0.001)
    sender.abandon(2)
    assert not sending.done()
    sender.abandon(3)
    error = failure(sending)
    assert "epoch 3 was abandoned" in error.reason


def test_nothing_is_sent_that_was_not_offered(sender: IpcSender) -> None:
    with pytest.raises(TransferError, match="nothing is offered for epoch 1"):
        sender.send(started(1, 1), FAR)


def test_a_newer_offer_replaces_an_older_one(sender: IpcSender) -> None:
    first = sender.offer(weights(1))
    sender.offer(weights(2))
    with pytest.raises(FileNotFoundError):
        Receiver(first, Hello("engine-0", 1, 1))


def test_memory_that_can_not_be_had_is_a_clear_error(sender: IpcSender, monkeypatch: pytest.MonkeyPatch) -> None:

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    sender.offer(weights(1))
    with pytest.raises(TransferError, match=r"No space left.*lower refit\.bucket_mib"):
        sender.send(started(1, 1), FAR)


def test_a_gpu_without_memory_fails_the_offer_and_the_next_one_is_made(
    sender: IpcSender, monkeypatch: pytest.MonkeyPatch
) -> None:

    def exhausted(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(ipc, "checksums", exhausted)
        with pytest.raises(TransferError, match=r"can't offer weights .*out of memory") as caught:
            sender.offer(weights(1))
    assert caught.value.phase == "offer"
    assert sender.offer(weights(1)).bytes > 0


# --- what an engine of ours opens ---


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "../etc/passwd"}, "no name of shared memory"),
        ({"name": "sluice-bucket-" + "0" * 32}, "No such file"),
    ],
)
def test_only_shared_memory_of_ours_is_opened(change: dict[str, str], said: str) -> None:
    specs = [spec_of("w", torch.zeros(4))]
    buffer = HostBuffer(16)
    described = msgspec.json.decode(buffer.part(specs, "shared"))
    described["memory"] |= change
    try:
        with (
            pytest.raises(ValueError, match=said),
            shared.opened(shared.parse([msgspec.json.encode(described).decode()]), CPU),
        ):
            pass
    finally:
        buffer.close()


def test_a_description_that_reaches_beyond_the_memory_is_refused() -> None:
    buffer = HostBuffer(16)
    try:
        place = shared.parse([buffer.part([spec_of("w", torch.zeros(5))], "shared")])
        with pytest.raises(ValueError, match="has 16 bytes, the tensors 20"), shared.opened(place, CPU):
            pass
    finally:
        buffer.close()


@pytest.mark.parametrize("parts", [[], ["gASVBQ=="], ["{}"], ["a", "b"]])
def test_anything_but_one_description_is_refused(parts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"serialized_named_tensors|description of shared memory"):
        shared.parse(parts)


# --- what a killed trainer leaves ------------------------------------------------------------------------------------

TRAINER = """
import time, torch
from actors.refit.transports.ipc import IpcSender
sender = IpcSender(1 << 20, "shared")
offer = sender.offer([("w", torch.zeros(8))])
sender._room(32, sender._offered.tensors, 2)
print(offer.address, *(one._claim.path for one in sender._buffers), flush=True)
time.sleep(600)
"""


def trainer() -> tuple[subprocess.Popen[str], list[Path]]:
    """Another trainer of this host that has offered, and what it made."""
    process = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    socket_, *buffers = process.stdout.readline().removeprefix("unix:").split()
    return process, [Path(socket_).parent, *map(Path, buffers)]


def test_a_successor_removes_what_a_killed_trainer_left_and_nothing_of_one_that_lives() -> None:
    killed, left = trainer()
    living, kept = trainer()
    try:
        assert len(left) == 3
        killed.kill()
        killed.wait()
        assert all(path.exists() for path in [*left, *kept])
        mine = IpcSender(1 << 20, "shared")
        offer = mine.offer(weights(1))
        assert not any(path.exists() for path in left)
        assert all(path.exists() for path in kept)
        IpcSender(1 << 20, "shared").close()
        assert Path(offer.address.removeprefix("unix:")).exists(), "a sweep spares what its own process has"
        mine.close()
    finally:
        for process in (killed, living):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        sweep()
    assert not any(path.exists() for path in kept)


def test_a_file_of_the_name_that_is_no_ones_is_removed_but_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    link, stale = (DIRECTORY / f"{BUCKET}{os.getpid():032x}", DIRECTORY / f"{BUCKET}{os.getpid() + 1:032x}")
    link.symlink_to(tmp_path / "precious")
    stale.touch()
    try:
        found = sweep()
        assert stale in found
        assert link not in found
        assert (tmp_path / "precious").read_text() == "mine"
    finally:
        link.unlink()
