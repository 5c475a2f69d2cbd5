"""The sender against real receivers in processes of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from actors.refit.transports import Offer, Sent, TransferError, gloo
from actors.refit.transports.gloo import GlooSender
from actors.refit.transports.tensors import checksum
from contracts.events import Rank, TransferStarted
from contracts.weights import digest

RECEIVER = Path(__file__).with_name("receiver.py")
MIB = 2**20
FAR = 60.0
"""A deadline that no test may come near."""


class Receiver:
    """A receiver process; `ask` sends a call, `answer` waits for its result."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(RECEIVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, call: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def join(self, offer: Offer, started: TransferStarted, rank: int) -> None:
        self.ask(
            "join",
            address=offer.address,
            port=offer.port,
            rank=rank,
            world_size=started.world_size,
            group=started.group,
            timeout=FAR,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def fleet() -> Iterator[list[Receiver]]:
    receivers = [Receiver(), Receiver()]
    try:
        for receiver in receivers:
            assert receiver.answer() == {"ready": True}
        yield receivers
    finally:
        for receiver in receivers:
            receiver.kill()


@pytest.fixture
def sender() -> Iterator[GlooSender]:
    made = GlooSender(host="127.0.0.1", bucket_bytes=MIB)
    yield made
    made.close()


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def weights(seed: int, large_mib: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        ("embed", torch.randn(33, 17, generator=generator)),
        ("scale", torch.randn((), generator=generator)),
        ("half", torch.randn(5, 3, generator=generator).to(torch.bfloat16)),
        ("transposed", torch.randn(64, 32, generator=generator).t()),
    ]
    if large_mib:
        tensors.append(("large", torch.full((large_mib * MIB,), seed, dtype=torch.uint8)))
    return tensors


def started(epoch: int, count: int, group: str | None = None) -> TransferStarted:
    members = tuple(Rank(f"engine-{i}", 1, i + 1, 1) for i in range(count))
    name = group or f"refit-{time.monotonic_ns()}-{epoch}"
    return TransferStarted(
        epoch=epoch, version=1, group=name, fresh=group is None, members=members, world_size=count + 1
    )


def sizes(offer: Offer) -> list[int]:
    return [bucket.size for bucket in offer.buckets]


def expected(offer: Offer, tensors: list[tuple[str, torch.Tensor]]) -> list[str]:
    held = dict(tensors)
    return [
        xxhash.xxh3_128(
            b"".join(held[s.name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for s in b.tensors)
        ).hexdigest()
        for b in offer.buckets
    ]


def joined(
    sender: GlooSender, receivers: list[Receiver], tensors: list[tuple[str, torch.Tensor]], pool: ThreadPoolExecutor
) -> tuple[Offer, TransferStarted, Future[Sent]]:
    """Offer, start sending in the background and have every receiver join."""
    offer, start = sender.offer(tensors), started(1, len(receivers))
    sending = pool.submit(sender.send, start, FAR)
    for rank, receiver in enumerate(receivers, 1):
        receiver.join(offer, start, rank)
    for receiver in receivers:
        assert receiver.answer() == {"joined": start.group}
    return offer, start, sending


def deliver(receivers: list[Receiver], group: str, offer: Offer, tensors: list[tuple[str, torch.Tensor]]) -> None:
    for receiver in receivers:
        receiver.ask("receive", group=group, sizes=sizes(offer))
    for receiver in receivers:
        assert receiver.answer() == {"checksums": expected(offer, tensors)}


def answers(receivers: list[Receiver], group: str, sizes: list[int]) -> list[dict[str, Any]]:
    for receiver in receivers:
        receiver.ask("receive", group=group, sizes=sizes)
    return [receiver.answer() for receiver in receivers]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]


def assert_no_transfer_thread_stays() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("refit-"):
            thread.join(5.0)
            assert not thread.is_alive(), thread.name


def test_every_receiver_holds_the_offered_bytes_and_the_group_serves_again(
    fleet: list[Receiver], sender: GlooSender, background: ThreadPoolExecutor
) -> None:
    first, second = weights(1, large_mib=3), weights(2)
    offer, start, sending = joined(sender, fleet, first, background)
    deliver(fleet, start.group, offer, first)
    sent = sending.result(FAR)
    assert sent.bytes == offer.bytes == sum(t.numel() * t.element_size() for _, t in first)

    again = sender.offer(second)
    assert again.port != offer.port
    sending = background.submit(sender.send, started(2, 2, group=start.group), FAR)
    deliver(fleet, start.group, again, second)
    assert sending.result(FAR).bytes == again.bytes

    third = weights(3)
    offer, start, sending = joined(sender, fleet, third, background)
    deliver(fleet, start.group, offer, third)
    assert sending.result(FAR).bytes == offer.bytes


def test_digest_is_that_of_the_contiguous_bytes(sender: GlooSender) -> None:
    tensors = weights(3)
    sums = {name: xxhash.xxh3_128(t.clone().contiguous().float().numpy().tobytes()).hexdigest() for name, t in tensors}
    sums["half"] = checksum(dict(tensors)["half"])
    assert sender.offer(tensors).digest == digest(sums)
    changed = [*tensors[:-1], ("transposed", tensors[-1][1] + 1)]
    assert sender.offer(changed).digest != digest(sums)


def test_receiver_that_never_joins_fails_the_transfer_at_its_deadline_by_name(
    fleet: list[Receiver], sender: GlooSender
) -> None:
    offer, start = sender.offer(weights(4)), started(1, 2)
    fleet[0].ask("join", address=offer.address, port=offer.port, rank=1, world_size=3, group=start.group, timeout=FAR)
    begin = time.monotonic()
    with pytest.raises(TransferError, match=r"never joined: engine-1") as caught:
        sender.send(start, 1.5)
    assert caught.value.phase == "join"
    assert "engine-0" not in str(caught.value)
    assert 1.0 < time.monotonic() - begin < 5.0
    assert "error" in fleet[0].answer()
    assert_no_transfer_thread_stays()


def test_abandoned_broadcast_ends_at_once_and_the_next_group_works(
    fleet: list[Receiver], sender: GlooSender, background: ThreadPoolExecutor
) -> None:
    offer, start, sending = joined(sender, fleet, weights(5, large_mib=64), background)
    for receiver in fleet:
        receiver.ask("receive", group=start.group, sizes=sizes(offer)[:1])
        assert "checksums" in receiver.answer()
    sender.abandon(0)
    assert not sending.done()
    bystanders = [*socket.socketpair(), *tcp_pair()]
    begin = time.monotonic()
    sender.abandon(1)
    with pytest.raises(TransferError, match="epoch 1 was abandoned") as caught:
        sending.result(FAR)
    assert caught.value.phase == "send"
    assert time.monotonic() - begin < 5.0
    assert_no_transfer_thread_stays()
    for one, other in (bystanders[:2], bystanders[2:]):
        one.sendall(b"x")
        assert other.recv(1) == b"x"
        one.close()
        other.close()
    assert all("error" in answer for answer in answers(fleet, start.group, sizes(offer)[1:]))

    tensors = weights(6)
    offer, start, sending = joined(sender, fleet, tensors, background)
    deliver(fleet, start.group, offer, tensors)
    assert sending.result(FAR).bytes == offer.bytes


def test_receiver_killed_in_mid_transfer_fails_it_before_the_deadline_and_the_next_group_works(
    fleet: list[Receiver], sender: GlooSender, background: ThreadPoolExecutor
) -> None:
    offer, start, sending = joined(sender, fleet, weights(7, large_mib=64), background)
    fleet[0].ask("receive", group=start.group, sizes=sizes(offer))
    fleet[1].ask("receive", group=start.group, sizes=sizes(offer)[:1])
    assert "checksums" in fleet[1].answer()
    begin = time.monotonic()
    fleet.pop().kill()
    with pytest.raises(TransferError) as caught:
        sending.result(FAR)
    assert caught.value.phase == "send"
    assert time.monotonic() - begin < 10.0
    fleet[0].answer()

    sender.offer(weights(8))
    with pytest.raises(TransferError, match="not held any more"):
        sender.send(started(2, 1, group=start.group), 1.0)
    tensors = weights(9)
    offer, start, sending = joined(sender, fleet, tensors, background)
    deliver(fleet, start.group, offer, tensors)
    assert sending.result(FAR).bytes == offer.bytes


def test_a_new_offer_ends_a_transfer_that_still_runs(sender: GlooSender, background: ThreadPoolExecutor) -> None:
    sender.offer(weights(10))
    entered = threading.Event()

    def send() -> None:
        entered.set()
        sender.send(started(1, 1), FAR)

    sending = background.submit(send)
    entered.wait(FAR)
    while not sending.done():
        sender.offer(weights(11))
    assert isinstance(sending.exception(), TransferError)


def test_shutting_connections_down_leaves_no_descriptor_behind(sender: GlooSender, tmp_path: Path) -> None:
    group = gloo.GlooCommunicator(None, [b"no address"])
    with (tmp_path / "not a socket").open("w"), socket.socketpair()[0]:
        before = os.listdir("/dev/fd")
        for _ in range(3):
            group.abort()
        assert len(os.listdir("/dev/fd")) <= len(before)


def test_join_that_succeeds_after_it_was_abandoned_leaves_no_group(
    sender: GlooSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def abandoning(value: bytes) -> bytes:
        sender.abandon(1)
        return announced(value)

    announced = gloo._announced
    monkeypatch.setattr(gloo, "_announced", abandoning)
    sender.offer(weights(14))
    alone = started(1, 0)
    with pytest.raises(TransferError, match="epoch 1 was abandoned"):
        sender.send(alone, FAR)
    assert_no_transfer_thread_stays()
    sender.offer(weights(15))
    with pytest.raises(TransferError, match="not held any more"):
        sender.send(started(2, 0, group=alone.group), FAR)


def test_store_that_goes_away_fails_the_join(sender: GlooSender) -> None:
    sender.offer(weights(16))
    assert sender._offered is not None
    sender._offered.meeting.close()
    with pytest.raises(TransferError) as caught:
        sender.send(started(1, 1), FAR)
    assert caught.value.phase == "join"


def test_send_without_an_offer_is_refused(sender: GlooSender) -> None:
    with pytest.raises(TransferError, match="nothing is offered for epoch 3"):
        sender.send(started(3, 1), FAR)


def test_address_that_is_not_ours_is_refused_by_name() -> None:
    with pytest.raises(TransferError, match=r"192\.0\.2\.1") as caught:
        GlooSender(host="192.0.2.1", bucket_bytes=MIB).offer(weights(12))
    assert caught.value.phase == "offer"


def test_store_listens_at_its_host_alone(sender: GlooSender) -> None:
    port = sender.offer(weights(13)).port
    listening = [
        line.split()[1].split(":")[0]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
    ]
    assert listening == ["0100007F"]


def test_process_leaves_while_a_join_is_stuck() -> None:
    script = (
        "import threading, torch\n"
        "from actors.refit.transports import TransferError\n"
        "from actors.refit.transports.gloo import GlooSender\n"
        "from contracts.events import Rank, TransferStarted\n"
        "sender = GlooSender('127.0.0.1', 1024)\n"
        "sender.offer([('x', torch.zeros(1))])\n"
        "members = (Rank('engine-0', 1, 1, 1),)\n"
        "started = TransferStarted(epoch=1, version=1, group='g', fresh=True, members=members, world_size=2)\n"
        "threading.Timer(0.5, sender.close).start()\n"
        "try:\n    sender.send(started, 600)\n"
        "except TransferError as error:\n    print(error.phase)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=FAR, check=True)
    assert done.stdout == "join\n"
