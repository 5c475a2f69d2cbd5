"""Whatever the contracts can say arrives as it was said; whatever else comes is refused by name."""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
import struct
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect
from msgspec.structs import replace

import contracts
from contracts import envelope as contract
from contracts import events, handles, trajectory
from contracts.envelope import STREAM_OF, STREAMS, ContractError, Envelope, decode, decode_all, encode
from contracts.trajectory import Sampling, Sequence, TokenSpan, Trajectory, TrajectoryError

MODULES = [importlib.import_module(module.name) for module in pkgutil.iter_modules(contracts.__path__, "contracts.")]
KINDS: tuple[Any, ...] = events.Event.__args__
OTHERS = sorted(
    {
        kind
        for module in MODULES
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__.startswith("contracts.")
    }
    - {*KINDS, events.Record, Envelope},
    key=lambda kind: (kind.__module__, kind.__name__),
)
A_FEW = settings(max_examples=6, deadline=None)


def name(kind: Any) -> str:
    return kind.__name__


def values(type_: Any) -> st.SearchStrategy[Any]:
    """Anything that a type hint allows, and msgpack can say."""
    match type_:
        case inspect.IntType():
            return st.integers(-(2**63), 2**63 - 1)
        case inspect.FloatType():
            return st.floats(allow_nan=False)
        case inspect.StrType():
            return st.text(max_size=5)
        case inspect.BytesType():
            return st.binary(max_size=5)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.AnyType():
            return st.one_of(st.none(), st.text(max_size=5), st.lists(st.integers(0, 9), max_size=2))
        case inspect.LiteralType():
            return st.sampled_from(type_.values)
        case inspect.VarTupleType():
            return st.lists(values(type_.item_type), max_size=2).map(tuple)
        case inspect.DictType():
            return st.dictionaries(values(type_.key_type), values(type_.value_type), max_size=2)
        case inspect.UnionType():
            return st.one_of([values(each) for each in type_.types])
        case inspect.StructType():
            return of(type_.cls)
    raise NotImplementedError(type_)


def of(kind: Any) -> st.SearchStrategy[Any]:
    """Any instance of a Struct; a field with a default is left out or not."""
    if kind is Envelope:
        return st.sampled_from(KINDS).flatmap(of).map(sent)
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    needed = {field.name: values(field.type) for field in info.fields if field.required}
    optional = {field.name: values(field.type) for field in info.fields if not field.required}
    return st.fixed_dictionaries(needed, optional=optional).map(lambda fields: kind(**fields))


def sent(event: Any, **fields: Any) -> Envelope[Any]:
    home = STREAM_OF[type(event)]
    known: dict[str, Any] = {"id": "a:1.0", "run": "r", "stream": home, "actor": "a", "boot": 1, "epoch": 0}
    return Envelope(**(known | {"wall_ns": 1, "mono_ns": 2, "body": event} | fields))


# --- there and back ---


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_an_event_arrives_as_it_was_sent(kind: Any) -> None:
    @A_FEW
    @given(of(kind), st.none() | st.text(max_size=3))
    def check(event: Any, cause: str | None) -> None:
        envelope = sent(event, causation_id=cause, correlation_id=cause)
        data = encode(envelope)
        assert decode(envelope.stream, data) == envelope
        assert decode_all([envelope.stream] * 2, [data] * 2) == [envelope] * 2
        assert type(decode(envelope.stream, data).body) is kind

    check()


@pytest.mark.parametrize("kind", OTHERS, ids=name)
def test_what_travels_in_events_journals_and_between_processes_arrives_as_it_was_sent(kind: Any) -> None:
    @A_FEW
    @given(of(kind))
    def check(value: Any) -> None:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind) == value

    check()


@A_FEW
@given(values(inspect.type_info(handles.Message)))
def test_a_message_of_a_transfer_is_one_line_and_arrives_as_it_was_sent(message: Any) -> None:
    line = handles.line(message)
    assert line.count(b"\n") == 1
    assert handles.parse(line) == message


def test_every_kind_has_a_name_of_its_own_and_one_stream() -> None:
    declared = {each for each in vars(events).values() if isinstance(each, type) and issubclass(each, events.Record)}
    assert declared - {events.Record} == set(KINDS) == set(STREAM_OF)
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert len(set(tags)) == len(tags)
    assert [tag for tag in tags if not re.fullmatch(r"[a-z]+\.[a-z_]+", tag)] == []


# --- refused ---


def heard(kind: str = "run.finished", **fields: Any) -> bytes:
    """An envelope that some other release wrote."""
    known: dict[str, Any] = {"id": "a:1.0", "run": "r", "stream": "control", "actor": "a", "boot": 1, "epoch": 0}
    known |= {"wall_ns": 1, "mono_ns": 2, "body": {"kind": kind, "reason": "done"}, "schema": contract.SCHEMA}
    return msgspec.msgpack.encode(known | fields)


def test_what_another_release_wrote_in_the_same_schema_is_read() -> None:
    assert decode("control", heard()).body == events.RunFinished(reason="done")


@pytest.mark.parametrize(
    ("stream", "data", "said"),
    [
        ("elsewhere", heard(), "unknown stream 'elsewhere'; streams are tasks, trajectories"),
        (
            "control",
            heard("run.vanished"),
            "'control': not an event of this stream: Invalid value 'run.vanished'",
        ),
        ("policy", heard(), "stream 'policy': not an event of this stream: Invalid value 'run.finished'"),
        ("control", heard(schema=contract.SCHEMA + 1), f"event a:1.0 has schema 2, newest known is {contract.SCHEMA}"),
        ("control", heard(body={"kind": "run.finished"}), r"missing required field `reason` - at `\$.body`"),
        (
            "control",
            heard(body={"kind": "run.finished", "reason": 3}),
            r"Expected `str`, got `int` - at `\$.body.rea",
        ),
        ("control", heard(boot="1"), r"Expected `int`, got `str` - at `\$.boot`"),
        ("control", heard()[:-1], "stream 'control': not an event of this stream: Input data was truncated"),
        ("control", b"", "stream 'control': not an event of this stream"),
        ("control", b"\xc1", "stream 'control': not an event of this stream"),
    ],
)
def test_what_is_no_event_of_its_stream_is_refused_and_says_why(stream: str, data: bytes, said: str) -> None:
    with pytest.raises(ContractError, match=said):
        decode(stream, data)
    with pytest.raises(ContractError, match=said):
        decode_all(["control", stream], [heard(), data])


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_an_event_is_refused_on_every_stream_but_its_own(kind: Any) -> None:
    @settings(max_examples=1, deadline=None)
    @given(of(kind))
    def check(event: Any) -> None:
        data = encode(sent(event))
        for stream in STREAMS:
            if stream == STREAM_OF[kind]:
                continue
            with pytest.raises(ContractError, match=f"{kind.__name__} belongs to stream '{STREAM_OF[kind]}', not"):
                encode(sent(event, stream=stream))
            with pytest.raises(ContractError, match=f"stream '{stream}': not an event of this stream"):
                decode(stream, data)
            with pytest.raises(ContractError, match=f"stream '{stream}': not an event of this stream"):
                decode_all([stream], [data])

    check()


# --- trajectories ---


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    """One that keeps its invariants: spans of any length that tile it."""
    spans, mask, logprobs = [], b"", []
    for _ in range(draw(st.integers(0, 3))):
        start, size = len(mask), draw(st.integers(1, 4))
        if draw(st.booleans()):
            spans.append(TokenSpan(start, start + size, "sampled", draw(st.integers(0, 9)), "engine-0", 1))
            mask += bytes([draw(st.integers(0, 1))]) * size
            logprobs += draw(st.lists(st.floats(-50.0, 0.0, width=32), min_size=size, max_size=size))
        else:
            spans.append(TokenSpan(start, start + size, "environment"))
            mask += bytes(size)
            logprobs += [0.0] * size
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(mask), max_size=len(mask)))
    return Sequence(
        length=len(mask),
        ids=struct.pack(f"<{len(ids)}i", *ids),
        loss_mask=mask,
        logprobs=struct.pack(f"<{len(logprobs)}f", *logprobs),
        spans=tuple(spans),
        sampling=draw(of(Sampling)),
        stop_reason=draw(st.sampled_from(["stop", "length"])),
    )


@settings(max_examples=50, deadline=None)
@given(of(Trajectory), st.lists(sequences(), max_size=2))
def test_a_trajectory_arrives_as_it_was_made(made: Trajectory, held: list[Sequence]) -> None:
    made = replace(made, sequences=tuple(held))
    assert trajectory.decode(trajectory.encode(made)) == made


GOOD = Sequence(
    length=3,
    ids=struct.pack("<3i", 1, 2, 3),
    loss_mask=b"\x00\x01\x01",
    logprobs=struct.pack("<3f", 0.0, -1.0, -2.0),
    spans=(TokenSpan(0, 1, "environment"), TokenSpan(1, 3, "sampled", 4, "engine-0", 1)),
    sampling=Sampling(1.0, 8),
    stop_reason="stop",
)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ids": b"\x00" * 8}, "ids has 8 bytes, 12 expected"),
        ({"loss_mask": b"\x00"}, "loss_mask has 1 bytes, 3 expected"),
        ({"logprobs": b""}, "logprobs has 0 bytes, 12 expected"),
        ({"spans": GOOD.spans[1:]}, r"span \[1, 3\) does not continue at 0"),
        ({"spans": (GOOD.spans[0], TokenSpan(1, 1, "sampled"))}, r"span \[1, 1\) does not continue at 1"),
        ({"spans": GOOD.spans[:1]}, "spans end at 1, the sequence at 3"),
        ({"loss_mask": b"\x01\x01\x01"}, "loss_mask is 1 at 0, a token that no policy sampled"),
        ({"logprobs": struct.pack("<3f", 0.0, 0.5, -1.0)}, "logprob 0.5 at 1 is not a finite number <= 0"),
        ({"logprobs": struct.pack("<3f", 0.0, -1.0, math.nan)}, "logprob nan at 2 is not a finite number <= 0"),
        ({"logprobs": struct.pack("<3f", 0.0, -math.inf, -1.0)}, "logprob -inf at 1 is not a finite number <= 0"),
    ],
)
def test_a_trajectory_that_breaks_an_invariant_is_refused_by_field_and_place(fields: dict[str, Any], said: str) -> None:
    made = Trajectory(
        task="t7", index=7, sample=2, attempt=1, reward=1.0, components={}, mask_reason=None, sequences=(GOOD,)
    )
    assert trajectory.decode(trajectory.encode(made)) == made
    broken = replace(made, sequences=(GOOD, replace(GOOD, **fields)))
    with pytest.raises(TrajectoryError, match=f"task t7 sample 2 sequence 1: {said}"):
        trajectory.decode(trajectory.encode(broken))


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode({"task": "t"})])
def test_what_is_no_trajectory_is_refused(data: bytes) -> None:
    with pytest.raises(TrajectoryError, match="not a trajectory"):
        trajectory.decode(data)


# --- what is imported ---

PROGRAM = """
import importlib, pkgutil, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if {refused}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
for package in map(importlib.import_module, {packages}):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print("imported")
"""


def imported(refused: str, *packages: str) -> None:
    program = PROGRAM.format(refused=refused, packages=packages)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "imported\n", done.stderr


def test_contracts_need_msgspec_and_the_standard_library_alone() -> None:
    top = "name.partition('.')[0]"
    imported(f"{top} not in ('contracts', 'msgspec') and {top} not in sys.stdlib_module_names", "contracts")


def test_command_line_and_driver_need_neither_torch_nor_an_engine_nor_a_trainer() -> None:
    heavy = ("torch", "transformers", "sglang", "megatron", "nemo_gym", "verifiers")
    imported(f"name.partition('.')[0] in {heavy}", "contracts", "config", "pipeline")
