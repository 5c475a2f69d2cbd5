"""Ranks in processes of their own: started, told, watched and ended. What they hold here only counts."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.trainer import backend, orders, rank
from actors.trainer.actor import TrainerShell
from actors.trainer.backend import BackendError, Job
from actors.trainer.megatron import installation
from actors.trainer.packing import Sample
from actors.trainer.ranks import RankedPolicy, RankError
from config.schema import RunConfig, TrainerConfig
from contracts.core import Fatal

Make = Callable[..., list[Sample]]
PATIENCE_S = 60.0
STUB = "from actors.trainer import rank; import time; rank.carry_out = lambda part, order: {}; rank.main()"
OBEYS = ("-c", STUB.format("None"))
HANGS = ("-c", STUB.format("None if type(order).__name__ == 'Build' else time.sleep(600)"))
FAILS = ("-c", STUB.format("None if type(order).__name__ == 'Build' else 1 / 0"))


class Part:
    """Rank 0's part of a policy."""

    def __init__(self) -> None:
        self.step = 0
        self.closed = False

    def train_step(self, samples: list[Sample]) -> dict[str, float]:
        if not samples:
            raise ValueError("no samples")
        self.step += 1
        return {"tokens": float(len(samples))}

    def export(self) -> Iterator[tuple[str, int]]:
        yield "weight", self.step

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def open_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RankedPolicy]]:
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(backend, "part", lambda *_: Part())
    opened: list[RankedPolicy] = []

    def make(program: tuple[str, ...], **settings: Any) -> RankedPolicy:
        job = Job(model_dir=str(tmp_path), trainer=TrainerConfig(ranks=3, **settings))
        opened.append(RankedPolicy(job, program=program))
        return opened[-1]

    yield make
    for policy in opened:
        policy.close()


def test_all_ranks_do_what_the_policy_is_asked_until_it_is_closed(open_policy: Any, make_samples: Make) -> None:
    policy = open_policy(OBEYS)
    assert policy.train_step(make_samples(3)) == {"tokens": 3.0}
    assert (policy.step, list(policy.export())) == (1, [("weight", 1)])
    part, pids = policy._part, policy.pids
    policy.close()
    assert part.closed
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(RankError, match="the policy is closed"):
        policy.train_step(make_samples(1))


def test_a_killed_rank_fails_the_policy_with_its_number_and_how_it_died(open_policy: Any, make_samples: Make) -> None:
    policy = open_policy(HANGS)
    os.kill(policy.pids[1], signal.SIGKILL)
    with pytest.raises(RankError, match=r"step: rank 2 died of SIGKILL"):
        policy.train_step(make_samples(3))
    with pytest.raises(RankError, match="rank 2 died"):
        policy.export()


def test_a_rank_that_fails_is_named_with_its_reason(open_policy: Any, make_samples: Make) -> None:
    with pytest.raises(RankError, match="rank 1 failed: ZeroDivisionError"):
        open_policy(FAILS).train_step(make_samples(3))


def test_ranks_that_hang_are_ended_at_the_deadline_and_named(open_policy: Any) -> None:
    policy = open_policy(HANGS, export_deadline_s=0.2)
    with pytest.raises(RankError, match=r"export: not done in 0\.2 s, rank 1, rank 2 still at it"):
        policy.export()
    for pid in policy.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_rank_0_raises_comes_through(open_policy: Any) -> None:
    with pytest.raises(ValueError, match="no samples"):
        open_policy(OBEYS).train_step([])


def test_a_rank_ends_when_its_trainer_is_killed() -> None:
    """The rank hangs in an order when the pipe to it closes."""
    program = (
        "import subprocess, sys, time\n"
        "from actors.trainer import orders\n"
        f"rank = subprocess.Popen([sys.executable, *{HANGS!r}], stdin=subprocess.PIPE)\n"
        "orders.send(rank.stdin, orders.Export())\n"
        "print(rank.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    watched = os.pidfd_open(int(trainer.stdout.readline()))
    try:
        trainer.kill()
        trainer.wait()
        assert select.select([watched], [], [], PATIENCE_S)[0], "the rank outlived its trainer"
    finally:
        os.close(watched)
        trainer.stdout.close()


def test_samples_arrive_at_a_rank_as_they_were(make_samples: Make) -> None:
    samples = make_samples(5, temperature=0.7)
    for sent, got in zip(samples, orders.unpacked(orders.packed(samples)), strict=True):
        for name in ("ids", "loss_mask", "behaviour"):
            assert np.array_equal(getattr(sent, name), getattr(got, name))
        for name in ("advantage", "lag", "group", "temperature"):
            assert getattr(sent, name) == getattr(got, name)


def test_without_megatron_the_backend_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "REQUIRED", ("megatron_of_nowhere",))
    with pytest.raises(BackendError, match=r"needs megatron_of_nowhere, not installed here: .*make megatron"):
        backend.check(TrainerConfig(backend="megatron"))


def test_a_rank_carries_out_every_order(model_dir: Path, make_samples: Make, tmp_path: Path) -> None:
    samples = orders.packed(make_samples(3))
    job = Job(model_dir=str(model_dir), trainer=TrainerConfig(device="cpu", lr=0.01))
    part = rank.carry_out(None, orders.Build(job, backend.World()))
    for order in (orders.Step(samples), orders.Score(samples), orders.Export(), orders.Save(str(tmp_path / "saved"))):
        part = rank.carry_out(part, order)
    assert part.step == 1
    part = rank.carry_out(part, orders.Step(samples))
    assert rank.carry_out(part, orders.Load(str(tmp_path / "saved"))).step == 1


async def test_a_trainer_that_could_not_start_says_why_and_not_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "check", lambda config: (_ for _ in ()).throw(BackendError("megatron is missing")))
    shell = TrainerShell(RunConfig())
    with pytest.raises(Fatal, match="megatron is missing"):
        await shell.start(SimpleNamespace(run_dir="/nowhere"))  # type: ignore[arg-type]
    await shell.close()
