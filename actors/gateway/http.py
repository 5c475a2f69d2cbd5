"""The callers' side: HTTP in, a checked `Job` to the shell, samples or an error of one kind out."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
import structlog
from aiohttp import web

from actors.gateway.answers import offered
from actors.gateway.chat import Ask, Chat, Served
from actors.gateway.client import DataProblem, Generated, OpenForm, Problem, SamplingForm
from actors.gateway.episodes import Episodes
from actors.gateway.openai import (
    SAMPLES_MAX,
    ChatForm,
    ResponsesForm,
    chat_answer,
    read_chat,
    read_responses,
    responses_answer,
)
from actors.gateway.overdue import Overdue
from actors.gateway.routes import Routes, Table
from actors.gateway.serving import Live, Serving
from actors.gateway.streams import ChatStream, ResponsesStream
from actors.gateway.upstream import Job
from actors.network import address_of
from contracts.core import Fatal

ALIVE_EVERY_S = 5.0
"""Pause between two signs of life in a stream whose answer is not there yet."""
UNREAD_S = 30.0
"""How long a caller may leave unread what it is sent."""
BIND_DEADLINE_S = 5.0
"""How long a restarted gateway waits for its predecessor's port."""

_JSON = "application/json"
F = TypeVar("F", ChatForm, ResponsesForm)
REFUSED = (web.HTTPRequestEntityTooLarge, Problem)


class CutOff(Exception):
    """The caller did not read, and its connection is closed."""


class GenerateForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /generate; see `actors.gateway.client.GatewayClient.generate`."""

    session: Annotated[str, msgspec.Meta(max_length=256)]
    sampling: SamplingForm
    input_ids: list[int] | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prefix_ids: list[int] = []
    carried: Annotated[int, msgspec.Meta(ge=0)] = 0
    tools: list[dict[str, Any]] | None = None
    parse: bool = False
    """Take the answers apart, as is done with `messages` or `tools` anyway."""
    n: Annotated[int, msgspec.Meta(ge=1, le=SAMPLES_MAX)] = 1
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


_forms = msgspec.json.Decoder(GenerateForm)
_openings = msgspec.json.Decoder(OpenForm)


class Server:
    """Serves /generate, OpenAI's APIs, episodes, /health and /status, which answers `status()`.

    Made on a running loop. A caller that doesn't read what it is sent is cut off after `UNREAD_S`.
    """

    def __init__(self, serving: Serving, status: Callable[[], dict[str, Any]]) -> None:
        self._tokens, self._answers = serving.tokens, serving.answers
        self._config = serving.config
        self._clock = serving.clock
        self._submit = serving.submit
        self._status = status
        self._episodes = Episodes(serving.config.max_episodes, serving.clock.now)
        self._chat = Chat(serving, self._episodes)
        self._overdue = Overdue()
        limit = serving.config.max_body_mib * 2**20
        base: Table = {
            "/v1/chat/completions": ("POST", self._chat_completions),
            "/v1/responses": ("POST", self._responses),
            "/v1/models": ("GET", self._models),
        }
        plain: Table = {
            **base,
            "/generate": ("POST", self._generate),
            "/health": ("GET", self._health),
            "/status": ("GET", self._report),
        }
        routes = Routes(plain, {**base, "": ("POST", self._open), "/finish": ("POST", self._finish)})

        def request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            loop = asyncio.get_running_loop()
            return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=limit)

        server = web.Server(routes.serve, request_factory=request, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=1.0)

    async def start(self, host: str, patient: bool) -> str:
        """Bind and listen; answers the URL. `patient` waits a little for a port in use. Raises `Fatal`."""
        await self._runner.setup()
        address = address_of(host)
        give_up_at = self._clock.now() + BIND_DEADLINE_S
        while True:
            try:
                site = web.TCPSite(self._runner, address, self._config.port)
                await site.start()
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise Fatal(
                        f"can't listen on network.host={host!r}, gateway.port={self._config.port} ({error}): "
                        "name an address of this host, and a port that it lets you use"
                    ) from error
                if not patient or self._clock.now() > give_up_at:
                    raise Fatal(
                        f"gateway.port={self._config.port} is in use on {address}: "
                        "end its user, choose another port, or 0 to let the system choose"
                    ) from error
            await asyncio.sleep(0.2)
        return f"http://{address}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()

    # --- native ------------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.BaseRequest, episode: str | None) -> web.Response:
        arrived_at = self._clock.now()

        async def answer() -> bytes:
            form = _parse(await request.read())
            generated = await self._submit(await self._job(form, arrived_at), None)
            return msgspec.json.encode(await self._taken_apart(generated, form) if _parses(form) else generated)

        return await self._answered(request, answer())

    async def _taken_apart(self, generated: Generated, form: GenerateForm) -> Generated:
        replace = msgspec.structs.replace
        begun = await self._answers.begun(generated.prompt_ids)
        samples = [
            replace(sample, parsed=await self._answers.parsed(begun, sample, form.tools))
            for sample in generated.samples
        ]
        return replace(generated, samples=samples)

    async def _answered(self, request: web.BaseRequest, work: Coroutine[Any, Any, bytes]) -> web.Response:
        """The body that `work` answers, or its problem."""
        try:
            response = web.Response(body=await work, content_type=_JSON)
        except REFUSED as error:
            response = self._refusal(error)
        return await self._send(request, response)

    async def _send(self, request: web.BaseRequest, response: web.Response) -> web.Response:
        with self._overdue.after(UNREAD_S, partial(_cut_off, request)):
            await response.prepare(request)
            await response.write_eof()
        return response

    def _refusal(self, error: Exception) -> web.Response:
        if isinstance(error, Problem):
            status, kind, message = error.status, error.kind, str(error)
        else:
            status, kind, message = 413, "data", f"the body exceeds gateway.max_body_mib={self._config.max_body_mib}"
        return web.Response(
            status=status, body=msgspec.json.encode(_error_body(status, kind, message)), content_type=_JSON
        )

    async def _job(self, form: GenerateForm, arrived_at: float) -> Job:
        prompt_ids = await self._prompt(form)
        limit = self._config.request_deadline_s
        deadline_at = arrived_at + min(form.deadline_s or limit, limit)
        return self._chat.job(form.session, prompt_ids, form.sampling, form.n, deadline_at)

    async def _prompt(self, form: GenerateForm) -> list[int]:
        offered(form.tools)
        given = [name for name in ("input_ids", "prompt", "messages") if getattr(form, name) is not None]
        if len(given) != 1:
            raise DataProblem(f"exactly one of input_ids, prompt and messages is due, got {', '.join(given) or 'none'}")
        self._tokens.check("prefix_ids", form.prefix_ids)
        if form.prompt is not None:
            return await self._tokens.text_ids(form.prompt, form.prefix_ids)
        if form.messages is not None:
            return await self._tokens.chat_ids(form.messages, form.prefix_ids, form.carried, form.tools)
        self._tokens.check("input_ids", form.input_ids or [])
        return [*form.prefix_ids, *(form.input_ids or [])]

    # --- episodes ----------------------------------------------------------------------------------------------------

    async def _open(self, request: web.BaseRequest, name: str | None) -> web.Response:
        async def answer() -> bytes:
            self._episodes.open(name or "", _opening(await request.read()))
            return b"{}"

        return await self._answered(request, answer())

    async def _finish(self, request: web.BaseRequest, name: str | None) -> web.Response:
        async def answer() -> bytes:
            return msgspec.json.encode(self._episodes.finish(name or ""))

        return await self._answered(request, answer())

    # --- OpenAI's ----------------------------------------------------------------------------------------------------

    async def _chat_completions(self, request: web.BaseRequest, episode: str | None) -> web.StreamResponse:
        return await self._openai(request, episode, read_chat, chat_answer, ChatStream)

    async def _responses(self, request: web.BaseRequest, episode: str | None) -> web.StreamResponse:
        return await self._openai(request, episode, read_responses, responses_answer, ResponsesStream)

    async def _openai(
        self,
        request: web.BaseRequest,
        episode: str | None,
        read: Callable[[bytes], tuple[F, Ask]],
        finished: Callable[[Served, F], dict[str, Any]],
        streamed: Callable[[F], ChatStream | ResponsesStream],
    ) -> web.StreamResponse:
        """Read, sample, answer: whole, or piece by piece as it is sampled."""
        arrived_at = self._clock.now()
        response: web.Response | None = None
        try:
            form, ask = read(await request.read())
            ask = msgspec.structs.replace(ask, session=episode) if episode else ask
            if not form.stream:
                answer = finished(await self._chat.answer(ask, arrived_at), form)
                response = web.Response(body=msgspec.json.encode(answer), content_type=_JSON)
        except REFUSED as error:
            return await self._send(request, self._refusal(error))
        if response is not None:
            return await self._send(request, response)
        return await self._stream(request, ask, arrived_at, streamed(form))

    async def _stream(
        self, request: web.BaseRequest, ask: Ask, arrived_at: float, stream: ChatStream | ResponsesStream
    ) -> web.StreamResponse:
        """Pieces as they come, and a sign of life where none does for a while.

        What fails before there was anything to send is answered by its status, as without a stream.
        """
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        end_at = self._chat.deadline(ask, arrived_at) + UNREAD_S
        live = Live()
        answer = asyncio.ensure_future(self._chat.answer(ask, arrived_at, live))
        answer.add_done_callback(lambda _: live.news.set())
        try:
            while not answer.done():
                pieces = b": waiting\n\n"
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ALIVE_EVERY_S):
                        await live.news.wait()
                    live.news.clear()
                    pieces = b"" if answer.done() else b"".join(map(_event, stream.news(live)))
                if pieces:
                    async with _reading(request, end_at - self._clock.now()):
                        await response.prepare(request)
                        await response.write(pieces)
            error = answer.exception()
            if isinstance(error, Problem) and not response.prepared:
                return await self._send(request, self._refusal(error))
            async with _reading(request):
                await response.prepare(request)
                await response.write(_rest(answer, stream, live))
                await response.write_eof()
        except CutOff:
            pass
        finally:
            answer.cancel()
        return response

    async def _models(self, request: web.BaseRequest, episode: str | None) -> web.Response:
        listed = {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "sluice"}]}
        return web.Response(body=msgspec.json.encode(listed), content_type=_JSON)

    async def _health(self, request: web.BaseRequest, episode: str | None) -> web.Response:
        return web.Response(body=b'{"status":"ok"}', content_type=_JSON)

    async def _report(self, request: web.BaseRequest, episode: str | None) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._status()), content_type=_JSON)


def _parses(form: GenerateForm) -> bool:
    return form.parse or form.messages is not None or form.tools is not None


def _parse(data: bytes) -> GenerateForm:
    try:
        return _forms.decode(data)
    except msgspec.ValidationError as error:
        why = ""
        if "unknown field" in str(error) and "$.sampling" in str(error):
            why = ": tokens are sampled from the whole distribution, because their logprobs must be the policy's own"
        raise DataProblem(f"{error}{why}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise DataProblem(f"the body is not JSON: {error}") from error


def _opening(data: bytes) -> OpenForm:
    try:
        return _openings.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DataProblem(f"can't open an episode: {error}") from error


@contextlib.asynccontextmanager
async def _reading(request: web.BaseRequest, limit_s: float = math.inf) -> AsyncIterator[None]:
    """Send, if the caller reads: one that doesn't is cut off, so that nothing waits for it. Raises `CutOff`."""
    try:
        async with asyncio.timeout(min(UNREAD_S, limit_s)):
            yield
    except TimeoutError as error:
        _cut_off(request)
        raise CutOff from error


def _cut_off(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()
    structlog.get_logger().warning("caller cut off", path=request.path, reason="it does not read its answer")


def _rest(answer: asyncio.Future[Served], stream: ChatStream | ResponsesStream, live: Live) -> bytes:
    """The end of a stream: what is left to tell, or the problem."""
    try:
        return b"".join(map(_event, stream.end(answer.result(), live))) + stream.closing
    except Problem as problem:
        return _event(_error_body(problem.status, problem.kind, str(problem)))


def _event(data: dict[str, Any]) -> bytes:
    name = f"event: {data['type']}\n".encode() if isinstance(data.get("type"), str) else b""
    return name + b"data: " + msgspec.json.encode(data) + b"\n\n"


def _error_body(status: int, kind: str, message: str) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message, "code": status, "param": None}}
