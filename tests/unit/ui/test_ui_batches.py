"""What is folded in batches, of any size, is what is folded event by event."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from config.schema import RunConfig
from contracts import envelope as contract
from contracts.core import Entry
from contracts.envelope import ContractError, decode, decode_all
from pipeline import eventlog
from pipeline.eventlog import Batch, gathered
from pipeline.rundir import RunDir
from pipeline.top.board import Board
from pipeline.ui._data import RunData
from tests.stalls.scene import Scene
from tests.unit.ui.shown import log_of

PARTS = (1, 7, 10_000)


def held(of: Any) -> dict[str, Any]:
    """The attributes that a fold leaves behind, without what it calls."""
    apart = ("_handlers", "_table", "_steps", "clocks", "restores")
    return {name: value for name, value in vars(of).items() if name not in apart}


def facts(board: Board) -> tuple[Any, ...]:
    model, view = board.model, board.view
    return held(model), model.clocks.skews, held(view), view._steps.memory(), held(view.restores), board.streams


@pytest.fixture(scope="module")
def log(scene: Scene) -> list[Entry]:
    return list(scene.world.store.log)


def test_a_board_of_batches_is_the_board_of_its_events(log: list[Entry]):
    boards = []
    for size in PARTS:
        board = Board()
        for start in range(0, len(log), size):
            board.extend(eventlog.decoded(log[start : start + size]))
        boards.append(facts(board))
    assert boards[0][2]["rows"]
    assert boards[0] == boards[1] == boards[2]


def test_the_page_of_batches_is_the_page_of_its_events(run: RunDir, config: RunConfig, log: list[Entry], data: RunData):
    made = RunData(run.info(), config)
    for start in range(0, len(log), 50):
        made.extend(eventlog.decoded(log[start : start + 50]))
    length = data.timeline.length
    for begin, end in ((None, None), (0.0, length / 3), (length / 2, length / 1.9)):
        assert made.window(begin, end, 1000) == data.window(begin, end, 1000)
    assert made.charts() == data.charts()


def test_entries_decoded_together_are_those_decoded_alone(log: list[Entry]):
    streams, datas = [entry.stream for entry in log], [entry.data for entry in log]
    assert decode_all(streams, datas) == [decode(*each) for each in zip(streams, datas, strict=True)]
    assert decode_all([], []) == []


def newer(log: list[Entry]) -> Entry:
    envelope = decode(log[0].stream, log[0].data)
    return Entry(log[0].stream, "2-0", contract.encode(replace(envelope, schema=contract.SCHEMA + 1)))


@pytest.mark.parametrize("spoil", ["nonsense", "torn", "foreign", "newer", "unknown"])
def test_the_first_that_can_not_be_read_is_named(log: list[Entry], spoil: str):
    bad = {
        "nonsense": Entry("fleet", "2-0", b"nonsense"),
        "torn": Entry(log[1].stream, "2-0", log[1].data[:-1]),
        "foreign": Entry("batches", "2-0", log[0].data),
        "newer": newer(log),
        "unknown": Entry("elsewhere", "2-0", log[0].data),
    }[spoil]
    with pytest.raises(ContractError) as alone:
        decode(bad.stream, bad.data)
    with pytest.raises(ContractError) as together:
        eventlog.decoded([log[0], bad, log[2]])
    assert str(together.value) == str(alone.value)


def test_a_batch_is_cut_by_places(scene: Scene):
    items = [(e, x, n) for e, (n, x) in zip(scene.world.store.log, log_of(scene), strict=True)][:9]
    batch = gathered(items)
    assert batch.within(0, 9) is batch
    assert list(batch.within(3, 6).items()) == items[3:6]
    assert len(batch.within(9, 20)) == len(Batch((), (), ()).within(0, 1)) == 0
