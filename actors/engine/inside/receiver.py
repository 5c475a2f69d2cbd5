"""Receives weights inside a process of the server, straight into the slices of its live parameters.

One `Receiver` a rank. `prepare` derives once where each tensor goes; `broadcast` and `copy` then take a whole model in
one call. A tensor that has to be cut for this rank is staged, one bucket at a time; a model that can't be followed
goes through its own loader, bucket by bucket, and the answer says so as `fallback`.
"""

from __future__ import annotations

import base64
import mmap
import os
import re
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import BroadcastOptions

from . import mix64, slices
from .slices import Piece, Spec

NAME = re.compile(r"sluice-bucket-[0-9a-f]{32}")
"""What a file in shared memory is called."""
POLL_S = 0.0001
"""Pause between two looks whether the GPU is done."""
WATCH_S = 0.2
"""Pause between two looks whether rank 0 is there."""
FLOOR_S = 0.1
"""gloo takes no timeout of zero."""


class Failed(Exception):
    """The weights did not come, or not in time; what is held is undefined. `lost`: the group can't be used again."""

    def __init__(self, reason: str, lost: bool = True) -> None:
        super().__init__(reason)
        self.lost = lost


class Held(Failed):
    """Nothing was begun, because requests run."""


class _Bucket(NamedTuple):
    """Tensors that travel together. `targets`: the bytes where each goes whole, None where it has to be staged."""

    specs: tuple[Spec, ...]
    targets: tuple[torch.Tensor | None, ...]


class Receiver:
    """Of the parameters of `model`, which are on `device`. `load` is the model's own loader."""

    def __init__(self, model: torch.nn.Module, device: torch.device, load: Callable[[Iterator[Any]], Any]) -> None:
        self._model, self._device, self._load = model, device, load
        self._key: Any = None
        self._layout = slices.Layout({}, "nothing is prepared")
        self._buckets: list[_Bucket] = []
        self._side: Any = None
        self._memory: tuple[Any, torch.Tensor] | None = None
        self._views: tuple[torch.Tensor, list[tuple[list[torch.Tensor], list[torch.Tensor]]]] | None = None

    @property
    def fallback(self) -> str:
        """Why tensors go through the model's own loader; empty when they go straight into their slices."""
        return self._layout.problem or ""

    def prepare(self, specs: Sequence[Spec], counts: Sequence[int]) -> None:
        """Derive where each tensor goes; `counts` of them travel together. Raises `slices.Mismatch`."""
        if sum(counts) != len(specs):
            raise slices.Mismatch(f"{len(specs)} tensors are not {sum(counts)}")
        key = (tuple(specs), tuple(counts))
        if key == self._key:
            return
        self._key = self._memory = self._views = None
        layout = slices.derive(self._model, specs, self._load)
        if layout.problem is not None:
            layout = slices.Layout({}, layout.problem)
        self._layout, self._buckets, start = layout, [], 0
        for count in counts:
            part = tuple(specs[start : start + count])
            targets = [slices.target_of(spec, layout.slices.get(spec.name, ())) for spec in part]
            self._buckets.append(_Bucket(part, tuple(None if one is None else _bytes(one) for one in targets)))
            start += count
        self._pieces = [(spec, piece) for spec in specs for piece in layout.slices.get(spec.name, ())]
        of_bucket = [[p for spec in bucket.specs for p in layout.slices.get(spec.name, ())] for bucket in self._buckets]
        self._room = torch.zeros(len(self._pieces), dtype=torch.int64, device=self._device)
        rooms = self._room.split([len(pieces) for pieces in of_bucket])
        self._mixers = [mix64.Mixer(pieces, room) for pieces, room in zip(of_bucket, rooms, strict=True)]
        for mixer in self._mixers:
            mixer.run()  # builds the kernel before anybody waits for it
        self._key = key

    # --- by broadcast ------------------------------------------------------------------------------------------------

    def broadcast(self, group: Any, timeout: float, alive: Callable[[], Any] | None = None) -> dict[str, float]:
        """Take every bucket from rank 0 of `group`; seconds by phase. Raises `Failed`.

        `alive` asks something of rank 0, and raises `RuntimeError` when it has left. It may hang.
        """
        if self._key is None:
            raise Failed("nothing is prepared", lost=False)
        began, give_up_at = time.monotonic(), time.monotonic() + timeout
        marks = _Marks(self._device, alive)
        try:
            for bucket, mixer in zip(self._buckets, self._mixers, strict=True):
                flats = [
                    torch.empty(spec.size, dtype=torch.uint8, device=self._device) if target is None else target
                    for spec, target in zip(bucket.specs, bucket.targets, strict=True)
                ]
                self._receive(group, [flat for flat in flats if flat.numel()], give_up_at)
                marks.mark("broadcast")
                if any(target is None for target in bucket.targets):
                    marks.settle(give_up_at)  # a loader may wait for the GPU, and knows no deadline
                    self._place(bucket, flats)
                    marks.mark("load")
                self._beside(mixer)
            self._join()
            marks.mark("digest")
            marks.settle(give_up_at)
        except (RuntimeError, OSError) as error:
            raise Failed(f"after {time.monotonic() - began:.3g} s: {error}") from error
        finally:
            marks.close()
        return marks.seconds()

    def _receive(self, group: Any, flats: list[torch.Tensor], give_up_at: float) -> None:
        """On a GPU the collectives are one launch, which later work on this stream follows; on a CPU they are over."""
        options: Any = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(FLOOR_S, give_up_at - time.monotonic()))
        if self._device.type != "cuda":
            for work in [group.broadcast([flat], options) for flat in flats]:
                work.wait()
            return
        options.asyncOp = True
        backend = group._get_backend(self._device)
        group._start_coalescing(self._device)
        for flat in flats:
            backend.broadcast([flat], options)
        group._end_coalescing(self._device).wait()

    def _beside(self, mixer: mix64.Mixer) -> None:
        """Sum up what is there on a stream of its own, while the next bucket comes."""
        if self._device.type != "cuda":
            return
        self._side = self._side or torch.cuda.Stream(self._device)
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            mixer.launch()

    def _join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)

    def _place(self, bucket: _Bucket, flats: list[torch.Tensor]) -> None:
        """Staged tensors to where they belong."""
        named = [(spec, flat.view(spec.dtype).view(spec.shape)) for spec, flat in zip(bucket.specs, flats, strict=True)]
        if self._layout.problem is not None:
            self._load((spec.name, tensor) for spec, tensor in named)
            return
        for (spec, tensor), target in zip(named, bucket.targets, strict=True):
            for piece in () if target is not None else self._slices(spec.name):
                piece.tensor.copy_(_part(tensor, piece))

    # --- through shared memory ---------------------------------------------------------------------------------------

    def open(self, place: dict[str, Any]) -> dict[str, float]:
        """Have the memory at `place` ready for `copy`; nothing is changed. Seconds by phase. Raises `Failed`."""
        if self._key is None:
            raise Failed("nothing is prepared", lost=False)
        began = time.monotonic()
        try:
            for _ in self._copies(*self._opened(place)):
                pass
        except (RuntimeError, OSError) as error:
            raise Failed(str(error), lost=False) from error
        return {"open": time.monotonic() - began}

    def copy(self, place: dict[str, Any], timeout: float) -> dict[str, float]:
        """Copy every tensor from memory of another process of this host; seconds by phase. Raises `Failed`."""
        if self._key is None:
            raise Failed("nothing is prepared", lost=False)
        give_up_at, marks = time.monotonic() + timeout, _Marks(self._device)
        try:
            opened = self._opened(place)
            marks.mark("open")
            for copy, mixer in zip(self._copies(*opened), self._mixers, strict=True):
                copy()
                self._beside(mixer)
            marks.mark("load")
            self._join()
            marks.mark("digest")
            marks.settle(give_up_at)
        except (RuntimeError, OSError) as error:
            raise Failed(str(error)) from error
        return marks.seconds()

    def _copies(self, flat: torch.Tensor, specs: Sequence[Spec], starts: Sequence[int]) -> Iterator[Callable[[], None]]:
        """What copies each bucket. The views of memory that stays open are made once."""
        if self._layout.problem is not None or self._views is None or self._views[0] is not flat:
            tensors = {
                spec.name: flat[start : start + spec.size].view(spec.dtype).view(spec.shape)
                for spec, start in zip(specs, starts, strict=True)
            }
            if self._layout.problem is not None:
                yield lambda: self._load(iter(tensors.items()))
                yield from [lambda: None] * (len(self._buckets) - 1)
                return
            pairs = [
                [
                    (piece.tensor, _part(tensors[spec.name], piece))
                    for spec in bucket.specs
                    for piece in self._slices(spec.name)
                ]
                for bucket in self._buckets
            ]
            self._views = flat, [([into for into, _ in each], [part for _, part in each]) for each in pairs]
        for into, parts in self._views[1]:
            yield lambda into=into, parts=parts: _copied(into, parts)

    def _slices(self, name: str) -> Sequence[Piece]:
        return self._layout.slices[name]

    def _opened(self, place: dict[str, Any]) -> tuple[torch.Tensor, list[Spec], Sequence[int]]:
        """The memory at `place`, which stays open for as long as the same one is named; what lies where in it."""
        specs = [spec for bucket in self._buckets for spec in bucket.specs]
        starts, size = slices.offsets(spec.size for spec in specs)
        key = tuple(sorted((name, str(value)) for name, value in place.items()))
        if self._memory is None or self._memory[0] != key:
            self._memory = self._views = None
            opened = (
                _cuda(place, self._device) if place.get("type") == "cuda" else _mapped(str(place.get("name")), size)
            )
            self._memory = key, opened
        flat = self._memory[1]
        if flat.numel() < size:
            raise RuntimeError(f"the shared memory has {flat.numel()} bytes, the tensors {size}")
        return flat, specs, starts

    # --- what is held ------------------------------------------------------------------------------------------------

    def parts(self) -> list[list[Any]]:
        """Of each slice: the tensor's name, which part of it, and that part's elements. In the order of `sums`."""
        return [
            [spec.name, f"{piece.offset}:{tuple(piece.tensor.shape)}:{piece.stride}", piece.tensor.numel()]
            for spec, piece in self._pieces
        ]

    def sums(self) -> list[str | None] | None:
        """Checksum of what each slice holds now; None for one that can't be told.

        None at all when the model's layout can't be followed. Waits for the device; on a GPU, `broadcast` and `copy`
        have launched it.
        """
        if self._layout.problem is not None:
            return None
        found: list[str | None] = []
        launched = self._device.type == "cuda"
        read = self._room.tolist()
        for mixer in self._mixers:
            own, read = read[: mixer.count], read[mixer.count :]
            sums = mixer.run(launched, own if launched else None)
            found += [mix64.hexadecimal(sums[i]) if i in sums else None for i in range(mixer.count)]
        return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _copied(into: list[torch.Tensor], parts: list[torch.Tensor]) -> None:
    if into:
        with torch.no_grad():
            torch._foreach_copy_(into, parts)  # pyright: ignore[reportPrivateImportUsage]


def _part(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Of a contiguous tensor, what goes to `piece`."""
    return whole.as_strided(piece.tensor.shape, piece.stride, whole.storage_offset() + piece.offset)


class _Marks:
    """When each phase was over: by the clock, or on a GPU by events of the current stream.

    `alive` is asked on a thread of its own, because it may hang when rank 0 stands still.
    """

    def __init__(self, device: torch.device, alive: Callable[[], Any] | None = None) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = []
        self._closed = threading.Event()
        self._left: str | None = None
        self.mark("")
        if alive is not None:
            threading.Thread(target=self._watch, args=(alive,), name="sluice-rank-0", daemon=True).start()

    def _watch(self, alive: Callable[[], Any]) -> None:
        while not self._closed.wait(WATCH_S):
            try:
                alive()
            except RuntimeError as error:
                self._left = f"rank 0 left: {error}"
                return

    def close(self) -> None:
        self._closed.set()

    def mark(self, phase: str) -> None:
        """A phase is over here; it may have several parts."""
        if self._device.type != "cuda":
            self._marks.append((phase, time.monotonic()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((phase, event))

    def settle(self, give_up_at: float) -> None:
        """Until the device has done what was asked of it. Raises `RuntimeError` at the deadline."""
        while self._device.type == "cuda" and not self._marks[-1][1].query():
            if self._left is not None or time.monotonic() > give_up_at:
                raise RuntimeError(self._left or "the GPU was not done in time: rank 0 does not broadcast")
            time.sleep(POLL_S)

    def seconds(self) -> dict[str, float]:
        spent: dict[str, float] = {}
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            on_gpu = self._device.type == "cuda"
            spent[phase] = spent.get(phase, 0.0) + (before.elapsed_time(after) / 1e3 if on_gpu else after - before)
        return spent


def _mapped(name: str, size: int) -> torch.Tensor:
    if NAME.fullmatch(name) is None:
        raise RuntimeError(f"{name!r} is no name of shared memory")
    directory = "/dev/shm" if os.path.isdir("/dev/shm") else os.environ.get("TMPDIR", "/tmp")
    descriptor = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise RuntimeError(f"shared memory {name} is not a file of this user")
        if found.st_size < size or not size:
            raise RuntimeError(f"shared memory {name} has {found.st_size} bytes, the tensors {size}")
        mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the memory can't be written
        return torch.frombuffer(mapping, dtype=torch.uint8, count=size)


def _cuda(place: dict[str, Any], device: torch.device) -> torch.Tensor:
    devices = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if place["device"] not in devices:
        raise RuntimeError(
            f"GPU {place['device']} is not visible to this engine: it sees {', '.join(devices) or 'none'}"
        )
    storage = torch.UntypedStorage._new_shared_cuda(
        devices[place["device"]],
        base64.b64decode(place["handle"]),
        place["size"],
        place["offset"],
        base64.b64decode(place["ref_counter"]),
        place["ref_counter_offset"],
        base64.b64decode(place["event"]),
        place["event_sync"],
    )
    flat = torch.empty(0, dtype=torch.uint8, device=f"cuda:{devices[place['device']]}")
    return flat.set_(storage, 0, (place["size"],), (1,))  # pyright: ignore[reportCallIssue, reportArgumentType]


__all__ = ["Failed", "Held", "Piece", "Receiver", "Spec"]
