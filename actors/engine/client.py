"""The one HTTP client of the engines: SGLang's native API, over kept-alive connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from actors.engine import in_order
from contracts.engine import EngineError
from contracts.events import TensorSpec
from contracts.weights import Checksum

MIB = 2**20
ANSWER_LIMIT = 8 * MIB
"""Bytes of an answer to anything but /generate."""
GENERATED_LIMIT = 512 * MIB
"""Bytes of an answer to /generate."""
TEXT_LIMIT = 500
"""Characters of an answer that an error quotes."""
KEEPALIVE_S = 4.0
"""Idle connections are closed before the server (uvicorn: 5 s) does, so that no request meets its closing."""
FLUSH_GRACE_S = 5.0
"""How long a flush may take beyond the wait it was asked for. A server that sleeps when idle looks once a second."""


class CallError(EngineError):
    """A call did not succeed. `status` is None when no answer came before the deadline, or none that can be read."""

    def __init__(self, call: str, status: int | None, text: str) -> None:
        super().__init__(f"{call}: {'no answer' if status is None else status}: {text}")
        self.call = call
        self.status = status
        self.text = text


class Answer(msgspec.Struct, frozen=True):
    """An answer as it came."""

    status: int
    content_type: str
    body: bytes

    @property
    def text(self) -> str:
        return self.body[: 4 * TEXT_LIMIT].decode(errors="replace")[:TEXT_LIMIT]


class Reply:
    """An answer whose head is in. Its body is read once, by `chunks` or `read`."""

    def __init__(self, call: str, response: aiohttp.ClientResponse, limit: int) -> None:
        self.status = response.status
        self.content_type = response.content_type
        self._call = call
        self._response = response
        self._limit = limit

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises `CallError` when it is longer than its limit."""
        size = 0
        async for chunk in self._response.content.iter_any():
            size += len(chunk)
            if size > self._limit:
                raise CallError(self._call, None, f"the answer exceeds {self._limit} bytes")
            yield chunk

    async def read(self) -> Answer:
        """The whole of it."""
        return Answer(self.status, self.content_type, b"".join([chunk async for chunk in self.chunks()]))


class HttpEngineClient:
    """`contracts.engine.EngineClient` of the server at `url`. Create and close it on one event loop.

    Every call raises `CallError`. Timeouts are seconds and bound the whole call, connecting included.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)

    async def close(self) -> None:
        await self._session.close()

    def forward(
        self, path: str, body: bytes, timeout: float, limit: int = GENERATED_LIMIT
    ) -> contextlib.AbstractAsyncContextManager[Reply]:
        """POST `body` as it is; whatever status comes can be read within the block, which `timeout` bounds."""
        return self._open("POST", path, body, timeout, limit)

    async def generate(self, body: Mapping[str, Any], timeout: float) -> Any:
        answer = await self._post("/generate", body, timeout, GENERATED_LIMIT)
        return _parse("/generate", answer)

    async def abort(self, rid: str, timeout: float) -> None:
        await self._post("/abort_request", {"rid": rid}, timeout)

    async def abort_all(self, timeout: float) -> None:
        """POST /abort_request for whatever runs."""
        await self._post("/abort_request", {"rid": "", "abort_all": True}, timeout)

    async def flush(self, timeout: float) -> bool:
        """False when requests still ran after `timeout` seconds. `CallError` when the server does not say."""
        path = f"/flush_cache?timeout={timeout:.3f}"
        answer = await self._call("POST", path, b"", timeout + FLUSH_GRACE_S, ANSWER_LIMIT)
        if answer.status not in (200, 400):
            raise CallError("/flush_cache", answer.status, answer.text)
        return answer.status == 200

    async def pause(self, timeout: float) -> None:
        """POST /pause_generation, in place: what runs is frozen, what comes waits."""
        await self._post("/pause_generation", {"mode": "in_place"}, timeout)

    async def resume(self, timeout: float) -> None:
        """POST /continue_generation. The GPU's memory is not handed back first, which costs what a refit costs."""
        await self._post("/continue_generation", {"torch_empty_cache": False}, timeout)

    async def release_memory(self, tags: Sequence[str], timeout: float) -> None:
        """POST /release_memory_occupation. SGLang ends itself unless it is idle and holds all of `tags`."""
        await self._post("/release_memory_occupation", {"tags": tags}, timeout)

    async def resume_memory(self, tags: Sequence[str], timeout: float) -> None:
        """POST /resume_memory_occupation. SGLang ends itself unless it gave all of `tags` back."""
        await self._post("/resume_memory_occupation", {"tags": tags}, timeout)

    async def join_group(
        self, address: str, port: int, offset: int, world_size: int, group: str, backend: str, timeout: float
    ) -> None:
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": offset,
            "world_size": world_size,
            "group_name": group,
            "backend": backend,
        }
        await self._update("/init_weights_update_group", body, timeout)

    async def leave_group(self, group: str, timeout: float) -> None:
        await self._update("/destroy_weights_update_group", {"group_name": group}, timeout)

    async def warm(self, group: str, timeout: float) -> None:
        """Have the server take rank 0's first bytes, so that ranks are connected; they belong to no parameter."""
        await self.receive([TensorSpec("sluice.warm", "uint8", (8,))], group, None, timeout)

    async def command(
        self,
        command: str,
        timeout: float,
        group: str = "",
        version: str | None = None,
        tensors: Sequence[TensorSpec] = (),
    ) -> str:
        """POST /update_weights_from_distributed with a command to our receiver in place of a format; its message."""
        path = "/update_weights_from_distributed"
        body = _distributed(tensors, group, version, command)
        answer = _parse(path, await self._post(path, body, timeout), _Outcome)
        if not answer.success:
            raise CallError(path, 200, answer.message)
        return answer.message

    async def receive(
        self, tensors: Sequence[TensorSpec], group: str, version: str | None, timeout: float, flush: bool = False
    ) -> None:
        """POST /update_weights_from_distributed: load one bucket of a broadcast.

        With `flush` the cache is flushed behind it; SGLang dies if requests are held then.
        """
        body = _distributed(tensors, group, version, "flattened_bucket") | {"flush_cache": flush}
        await self._update("/update_weights_from_distributed", body, timeout)

    async def receive_all(
        self,
        buckets: Sequence[Sequence[TensorSpec]],
        group: str,
        version: str | None,
        timeout: float,
        flush: bool,
        ahead: int,
    ) -> None:
        """`receive` of each bucket, in order; the calls for the `ahead` next ones are there while one is loaded.

        With `flush` the cache is flushed behind the last one. Not through a proxy, which might part the calls.
        """
        path, last = "/update_weights_from_distributed", len(buckets) - 1

        def check(answer: in_order.Answer) -> None:
            _updated(path, Answer(answer.status, "", answer.body))

        bodies = (
            msgspec.json.encode(
                _distributed(tensors, group, version, "flattened_bucket") | {"flush_cache": flush and number == last}
            )
            for number, tensors in enumerate(buckets)
        )
        try:
            await in_order.post(self.url, path, bodies, ahead, timeout, ANSWER_LIMIT, check)
        except TimeoutError as error:
            raise CallError(path, None, f"deadline of {timeout:.3g} s passed") from error
        except (in_order.Broken, OSError) as error:
            raise CallError(path, None, f"{type(error).__name__}: {error}") from error

    async def take(self, parts: Sequence[str], version: str, timeout: float, flush: bool = False) -> None:
        """POST /update_weights_from_tensor: load one bucket of shared memory. `parts`: its place, for each rank.

        With `flush` as `receive` does.
        """
        body = {
            "serialized_named_tensors": parts,
            "load_format": "flattened_bucket",
            "flush_cache": flush,
            "abort_all_requests": False,
            "weight_version": version,
            "torch_empty_cache": False,
        }
        await self._update("/update_weights_from_tensor", body, timeout)

    async def checksums(self, timeout: float, kind: Checksum = "xxh3_128") -> list[dict[str, str]] | None:
        """None when the server has no such call. SGLang has no choice of `kind`, and ignores it."""
        asked = {"action": "checksum"} | ({} if kind == "xxh3_128" else {"checksum": kind})
        body = msgspec.json.encode(asked)
        answer = await self._call("POST", "/weights_checker", body, timeout, ANSWER_LIMIT)
        if answer.status in (404, 405, 501):
            return None
        return [rank.checksums for rank in _parse("/weights_checker", _ok("/weights_checker", answer), _Checked).ranks]

    async def healthy(self, timeout: float) -> bool:
        """Whether the server process answers at all: /health itself is 503 during any pause."""
        try:
            await self.weight_version(timeout)
        except CallError:
            return False
        return True

    async def weight_version(self, timeout: float) -> str | None:
        """The label of the weights that the server holds, as `receive` set it."""
        answer = await self._get("/model_info", timeout)
        return _parse("/model_info", answer, _ModelInfo).weight_version

    async def ranks(self, timeout: float) -> int:
        """Ranks that the server takes in a weight-update group: its tensor parallel size."""
        try:
            answer = await self._get("/server_info", timeout)
        except CallError as error:
            if error.status != 404:
                raise
            answer = await self._get("/get_server_info", timeout)
        return _parse("/server_info", answer, _ServerInfo).tp_size

    # --- calls -------------------------------------------------------------------------------------------------------

    async def _get(self, path: str, timeout: float) -> Answer:
        return _ok(path, await self._call("GET", path, None, timeout, ANSWER_LIMIT))

    async def _post(self, path: str, body: Mapping[str, Any], timeout: float, limit: int = ANSWER_LIMIT) -> Answer:
        return _ok(path, await self._call("POST", path, msgspec.json.encode(body), timeout, limit))

    async def _update(self, path: str, body: Mapping[str, Any], timeout: float) -> None:
        _updated(path, await self._call("POST", path, msgspec.json.encode(body), timeout, ANSWER_LIMIT))

    async def _call(self, method: str, path: str, body: bytes | None, timeout: float, limit: int) -> Answer:
        async with self._open(method, path, body, timeout, limit) as reply:
            return await reply.read()

    @contextlib.asynccontextmanager
    async def _open(
        self, method: str, path: str, body: bytes | None, timeout: float, limit: int
    ) -> AsyncIterator[Reply]:
        call = path.partition("?")[0]
        headers = {"content-type": "application/json"} if body else None
        try:
            async with (
                asyncio.timeout(timeout),
                self._session.request(
                    method, self.url + path, data=body, headers=headers, timeout=_NO_TIMEOUT, allow_redirects=False
                ) as response,
            ):
                yield Reply(call, response, limit)
        except TimeoutError as error:
            raise CallError(call, None, f"deadline of {timeout:.3g} s passed") from error
        except (aiohttp.ClientError, OSError) as error:
            raise CallError(call, None, f"{type(error).__name__}: {error}") from error


_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=None)


class _Outcome(msgspec.Struct):
    success: bool
    message: str = ""


class _Rank(msgspec.Struct):
    checksums: dict[str, str]


class _Checked(msgspec.Struct):
    ranks: list[_Rank]


class _ModelInfo(msgspec.Struct):
    weight_version: str | None = None


class _ServerInfo(msgspec.Struct):
    tp_size: int = 1


def _distributed(tensors: Sequence[TensorSpec], group: str, version: str | None, form: str) -> dict[str, Any]:
    return {
        "names": [tensor.name for tensor in tensors],
        "dtypes": [tensor.dtype for tensor in tensors],
        "shapes": [tensor.shape for tensor in tensors],
        "group_name": group,
        "flush_cache": False,
        "abort_all_requests": False,
        "weight_version": version,
        "load_format": form,
        "torch_empty_cache": False,
    }


def _updated(call: str, answer: Answer) -> None:
    if not _parse(call, _ok(call, answer), _Outcome).success:
        raise CallError(call, answer.status, answer.text)


def _ok(call: str, answer: Answer) -> Answer:
    if answer.status != 200:
        raise CallError(call, answer.status, answer.text)
    return answer


def _parse(call: str, answer: Answer, kind: Any = Any) -> Any:
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except msgspec.DecodeError as error:
        raise CallError(call, answer.status, f"{error}: {answer.text}") from error
