"""One call takes a whole model, through the commands that SGLang's schedulers pass on."""

from __future__ import annotations

import json
import os
import time
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.engine.direct import HELD
from actors.engine.inside import hooks, mix64
from actors.engine.inside.slices import offsets
from contracts.handles import DIRECTORY
from tests.unit.inside.model import SPECS, Model, weights


class Group:
    """Rank 0 of a group broadcasts `tensors`, and breaks off after `most` of them."""

    def __init__(self, tensors: dict[str, torch.Tensor], most: int = 100) -> None:
        self.flats = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]
        self.most = most

    def broadcast(self, into: list[torch.Tensor], options: Any) -> Any:
        assert options.timeout.total_seconds() > 0
        return SimpleNamespace(wait=lambda: self._next(into[0]))

    def _next(self, into: torch.Tensor) -> None:
        self.most -= 1
        if self.most < 0:
            raise RuntimeError("Connection closed by peer")
        into.copy_(self.flats.pop(0))


class Manager:
    """What SGLang's manager of weight updates has of a rank."""

    tp_cpu_group = None

    def __init__(self, model: Model, group: Group | None = None) -> None:
        self.model, self.idle, self.flushes = model, True, 0
        groups = {"g": group} if group is not None else {}
        runner = SimpleNamespace(model=model, tp_rank=0, _model_update_group=groups)
        self.tp_worker = SimpleNamespace(model_runner=runner)

    def is_fully_idle(self) -> bool:
        return self.idle

    def flush_cache(self, empty_cache: bool) -> bool:
        assert not empty_cache
        self.flushes += 1
        return True

    def tell(self, **command: Any) -> Any:
        """The answer of rank 0, or why there is none."""
        specs = SPECS if command["do"] == "prepare" else ()
        request = SimpleNamespace(
            load_format=hooks.PREFIX + json.dumps(command),
            group_name="g",
            names=[spec.name for spec in specs],
            dtypes=["float32"] * len(specs),
            shapes=[list(spec.shape) for spec in specs],
        )
        done, message = hooks.answer(self, request)
        return json.loads(message.removeprefix(hooks.PREFIX))[0] if done else message


def holds(model: Model, seed: int) -> bool:
    other = Model(model.rank, model.size)
    other.load_weights(weights(seed).items())
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("size", [1, 2])
def test_a_broadcast_lands_in_the_live_parameters_and_its_checksums_are_told(size: int) -> None:
    manager = Manager(Model(0, size), Group(weights(1)))
    prepared = manager.tell(do="prepare", counts=[2, 4])
    assert prepared["fallback"] == ""
    assert [name for name, _, _ in prepared["parts"]] == [spec.name for spec in SPECS]
    told = manager.tell(do="broadcast", timeout=9.0)
    assert holds(manager.model, 1)
    assert (told["flushed"], manager.flushes, told["fallback"]) == (True, 1, "")
    assert {"broadcast", "digest", "flush"} <= told["phases"].keys()
    assert ("load" in told["phases"]) == (size == 2)  # what is cut is staged
    whole = dict(zip(weights(1), mix64.checksums(list(weights(1).values())), strict=True))
    assert (prepared["parts"][5][2], told["sums"][5]) == (8, whole["norm"])
    assert (told["sums"][1] == whole["q"]) == (size == 1)


def test_the_loader_runs_once_for_many_transfers_and_not_at_all_in_one() -> None:
    manager = Manager(Model(), Group(weights(1)))
    for seed in (1, 2):
        manager.tell(do="prepare", counts=[6])
        manager.tp_worker.model_runner._model_update_group["g"] = Group(weights(seed))
        manager.tell(do="broadcast", timeout=9.0)
        assert holds(manager.model, seed)
    assert manager.model.loads == len(SPECS)


def quantised(model: Any, name: str, tensor: torch.Tensor) -> bool:
    if name == "norm":
        model.norm.data.copy_(tensor.round())
    return name == "norm"


@pytest.mark.parametrize("way", ["broadcast", "copy"])
def test_a_model_that_can_not_be_followed_goes_through_its_loader_and_says_so(way: str) -> None:
    model = Model(quirk=quantised)
    manager = Manager(model, Group(weights(1)))
    assert "round" in manager.tell(do="prepare", counts=[3, 3])["fallback"]
    told = manager.tell(do=way, timeout=9.0, places=[shared(1)])
    assert "round" in told["fallback"]
    assert told["sums"] is None
    assert torch.equal(model.norm, weights(1)["norm"].round())
    assert torch.equal(model.qkv[:8], weights(1)["q"])


def shared(seed: int) -> dict[str, str]:
    """A buffer as the trainer shares it."""
    starts, size = offsets(spec.size for spec in SPECS)
    data = torch.zeros(size, dtype=torch.uint8)
    for start, tensor in zip(starts, weights(seed).values(), strict=True):
        data[start : start + 4 * tensor.numel()] = tensor.reshape(-1).view(torch.uint8)
    name = f"sluice-bucket-{uuid.uuid4().hex}"
    DIRECTORY.joinpath(name).write_bytes(data.numpy().tobytes())
    MADE.append(name)
    return {"type": "host", "name": name}


MADE: list[str] = []


@pytest.fixture(autouse=True)
def removed() -> Any:
    yield
    while MADE:
        DIRECTORY.joinpath(MADE.pop()).unlink()


@pytest.mark.parametrize("size", [1, 2])
def test_shared_memory_is_opened_once_and_copied_into_the_slices(size: int) -> None:
    manager = Manager(Model(0, size))
    manager.tell(do="prepare", counts=[6])
    place = shared(1)
    manager.tell(do="copy", timeout=9.0, places=[place])
    assert holds(manager.model, 1)
    receiver = manager.tp_worker.model_runner.sluice_receiver
    memory = receiver._memory
    again = DIRECTORY.joinpath(shared(2)["name"]).read_bytes()
    with DIRECTORY.joinpath(place["name"]).open("r+b") as file:
        file.write(again)
    told = manager.tell(do="copy", timeout=9.0, places=[place])
    assert receiver._memory is memory
    assert holds(manager.model, 2)
    assert told["sums"][5] == mix64.checksums([weights(2)["norm"]])[0]
    manager.tell(do="copy", timeout=9.0, places=[shared(3)])
    assert holds(manager.model, 3)


def test_memory_is_opened_in_a_step_of_its_own_which_changes_nothing_and_may_come_while_requests_run() -> None:
    manager = Manager(Model())
    manager.tell(do="prepare", counts=[2, 4])
    place = shared(1)
    manager.idle = False
    assert list(manager.tell(do="open", places=[place])["phases"]) == ["open"]
    assert not holds(manager.model, 1)
    receiver = manager.tp_worker.model_runner.sluice_receiver
    memory, views = receiver._memory, receiver._views
    manager.idle = True
    manager.tell(do="copy", timeout=9.0, places=[place])
    assert receiver._memory is memory
    assert receiver._views is views
    assert holds(manager.model, 1)


def test_memory_of_a_model_that_goes_through_its_loader_is_opened_without_loading_it() -> None:
    manager = Manager(Model(quirk=quantised))
    manager.tell(do="prepare", counts=[6])
    loads = manager.model.loads
    manager.tell(do="open", places=[shared(1)])
    assert manager.model.loads == loads
    manager.tell(do="copy", timeout=9.0, places=[shared(1)])
    assert manager.model.loads == loads + len(SPECS)


EXHAUSTED = "CUDA out of memory. Tried to allocate 2.00 GiB"


def exhausted(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError(EXHAUSTED)


def test_no_memory_for_what_is_staged_of_a_broadcast_is_an_answer_and_the_next_one_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = Manager(Model(0, 2), Group(weights(1)))
    manager.tell(do="prepare", counts=[2, 4])
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", exhausted)
        said = manager.tell(do="broadcast", timeout=9.0)
    assert said.startswith("Failed: after")
    assert EXHAUSTED in said
    assert manager.flushes == 0
    manager.tp_worker.model_runner._model_update_group["g"] = Group(weights(2))
    manager.tell(do="broadcast", timeout=9.0)
    assert holds(manager.model, 2)


@pytest.mark.parametrize("where", ["_mapped", "_copied"])
def test_no_memory_in_a_copy_is_an_answer_and_the_next_one_is_whole(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from actors.engine.inside import receiver

    manager = Manager(Model())
    manager.tell(do="prepare", counts=[6])
    place = shared(1)
    with monkeypatch.context() as patch:
        patch.setattr(receiver, where, exhausted)
        assert EXHAUSTED in manager.tell(do="copy", timeout=9.0, places=[place])
    assert manager.flushes == 0
    manager.tell(do="copy", timeout=9.0, places=[place])
    assert holds(manager.model, 1)


@pytest.mark.parametrize("name", ["../x", "sluice-bucket-" + 32 * "0"])
def test_only_shared_buffers_of_this_user_are_opened(name: str) -> None:
    manager = Manager(Model())
    manager.tell(do="prepare", counts=[6])
    for do in ("open", "copy"):
        assert "Failed" in manager.tell(do=do, timeout=9.0, places=[{"type": "host", "name": name}])


def test_a_transfer_that_breaks_off_is_told_and_the_next_one_is_whole() -> None:
    manager = Manager(Model(), Group(weights(1), most=3))
    manager.tell(do="prepare", counts=[2, 2, 2])
    assert "Connection closed by peer" in manager.tell(do="broadcast", timeout=9.0)
    assert not holds(manager.model, 1)
    assert manager.flushes == 0
    manager.tp_worker.model_runner._model_update_group["g"] = Group(weights(2))
    manager.tell(do="broadcast", timeout=9.0)
    assert holds(manager.model, 2)


def test_weights_do_not_change_under_requests() -> None:
    manager = Manager(Model(), Group(weights(1)))
    manager.tell(do="prepare", counts=[6])
    manager.idle = False
    assert manager.tell(do="broadcast", timeout=9.0).startswith(HELD)
    assert not holds(manager.model, 1)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ({"do": "broadcast", "timeout": 1.0}, "nothing is prepared"),
        ({"do": "copy", "timeout": 1.0, "places": [{}]}, "nothing is prepared"),
        ({"do": "open", "places": [{}]}, "nothing is prepared"),
        ({"do": "prepare", "counts": [1]}, "6 tensors are not 1"),
        ({"do": "dance"}, "KeyError"),
    ],
)
def test_a_command_that_can_not_be_done_is_an_answer_and_no_end_of_the_server(command: Any, reason: str) -> None:
    assert reason in Manager(Model(), Group({})).tell(**command)


def test_an_unknown_group_is_named() -> None:
    manager = Manager(Model())
    manager.tell(do="prepare", counts=[6])
    assert "no group 'g'" in manager.tell(do="broadcast", timeout=1.0)


def test_other_formats_go_where_they_went_before() -> None:
    class Updates:
        tp_cpu_group = None

        def update_weights_from_distributed(self, request: Any) -> str:
            return f"theirs {request.load_format}"

    module = SimpleNamespace(
        SchedulerWeightUpdaterManager=Updates, UpdateWeightsFromDistributedReqOutput=lambda *answer: answer
    )
    hooks.change(module)
    updates: Any = Updates()
    for theirs in (None, "flattened_bucket"):
        request = SimpleNamespace(load_format=theirs)
        assert updates.update_weights_from_distributed(request) == f"theirs {theirs}"
    done, message = updates.update_weights_from_distributed(SimpleNamespace(load_format="sluice:{"))
    assert not done
    assert "JSONDecodeError" in message


def test_a_gpu_that_waits_for_a_rank_0_that_left_or_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU is asked: its events, and meanwhile the store."""
    from actors.engine.inside import receiver

    monkeypatch.setattr(receiver, "WATCH_S", 0.01)
    never = SimpleNamespace(query=lambda: False)

    def left() -> None:
        raise RuntimeError("the store is gone")

    for alive, limit, reason in ((left, 60.0, "rank 0 left: the store is gone"), (None, 0.05, "not done in time")):
        marks = receiver._Marks(torch.device("cpu"), alive)
        marks._device = torch.device("cuda")
        marks._marks = [("", never)]
        with pytest.raises(RuntimeError, match=reason):
            marks.settle(time.monotonic() + limit)
        marks.close()


def test_the_user_of_the_memory_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager(Model())
    manager.tell(do="prepare", counts=[6])
    place = shared(1)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "not a file of this user" in manager.tell(do="copy", timeout=9.0, places=[place])
