"""Words of the colocated transfer: where a bucket lies, and what trainer and sidecars say over their socket.

A `Shared` describes memory and never contains code: an engine of ours reads it as JSON and opens what it names.
Messages are JSON, one a line of at most `LINE_LIMIT` bytes.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import msgspec

from contracts.events import TensorSpec

LINE_LIMIT = 16 * 2**20
"""Bytes of one message."""
DIRECTORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
"""Where shared memory has names."""
NAME = re.compile(r"sluice-bucket-[0-9a-f]{32}")
"""What a file in shared memory is called."""


class HostMemory(msgspec.Struct, frozen=True, tag="host"):
    """A file of that name in the host's directory for shared memory; it belongs to the user that runs the engines."""

    name: str


class CudaMemory(msgspec.Struct, frozen=True, tag="cuda"):
    """An allocation of another process's, as CUDA hands it over; fields as torch's `_share_cuda_` answers them.

    `device` is the UUID of the GPU: two processes may count GPUs differently. Bytes are base64 in JSON.
    """

    device: str
    handle: bytes
    size: int
    offset: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    event_sync: bool


class Shared(msgspec.Struct, frozen=True):
    """One bucket: its tensors one behind the other, in order, from the start of the memory."""

    memory: HostMemory | CudaMemory
    tensors: tuple[TensorSpec, ...]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Sidecar -> trainer: this boot of `engine` is there for `epoch`."""

    engine: str
    boot: int
    epoch: int


class Filled(msgspec.Struct, frozen=True, tag="filled"):
    """Trainer -> sidecar: bucket `index` can be loaded. `parts`: one a rank of the server, to be passed on as it is."""

    index: int
    parts: tuple[str, ...]


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """Sidecar -> trainer: the server has loaded bucket `index`, its memory may be filled anew."""

    index: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Sidecar -> trainer: the server could not load bucket `index`."""

    index: int
    reason: str


Message = Hello | Filled | Taken | Refused


def line(message: Message) -> bytes:
    """A message as it travels."""
    return msgspec.json.encode(message) + b"\n"


_decoder = msgspec.json.Decoder(Message)


def parse(data: bytes) -> Message:
    """A received line. Raises `ValueError`."""
    return _decoder.decode(data)
