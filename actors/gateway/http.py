"""The callers' side: HTTP in, a checked `Job` to the shell, samples or an error of one kind out."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web

from actors.gateway.chat import Ask, Chat, Served, offered
from actors.gateway.client import DataProblem, Generated, OpenForm, Problem, SamplingForm
from actors.gateway.episodes import Episodes
from actors.gateway.openai import (
    SAMPLES_MAX,
    ChatForm,
    ResponsesForm,
    chat_answer,
    chat_chunks,
    read_chat,
    read_responses,
    responses_answer,
    responses_events,
)
from actors.gateway.tokens import Tokens
from actors.gateway.upstream import Job
from actors.network import address_of
from config.schema import GatewayConfig
from contracts.core import Clock, Fatal

ALIVE_EVERY_S = 5.0
"""Pause between two signs of life in a stream whose answer is not there yet."""
BIND_DEADLINE_S = 5.0
"""How long a restarted gateway waits for its predecessor's port."""

_JSON = "application/json"
F = TypeVar("F", ChatForm, ResponsesForm)
T = TypeVar("T")


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
    n: Annotated[int, msgspec.Meta(ge=1, le=SAMPLES_MAX)] = 1
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


_forms = msgspec.json.Decoder(GenerateForm)
_openings = msgspec.json.Decoder(OpenForm)


class Server:
    """Serves /generate, OpenAI's APIs, episodes, /health and /status. `submit` answers a job or raises a `Problem`.

    `context`: tokens that prompt and completion may have together.
    """

    def __init__(
        self,
        tokens: Tokens,
        context: int,
        config: GatewayConfig,
        clock: Clock,
        submit: Callable[[Job], Awaitable[Generated]],
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self._tokens = tokens
        self._context = context
        self._config = config
        self._clock = clock
        self._submit = submit
        self._status = status
        self._episodes = Episodes(config.max_episodes, clock.now)
        self._chat = Chat(tokens, context, config, clock, submit, self._episodes)
        app = web.Application(client_max_size=config.max_body_mib * 2**20)
        # The first that fits is taken, so what is asked most comes first.
        for base in ("/v1", "/episodes/{episode}/v1"):
            app.add_routes(
                [
                    web.post(f"{base}/chat/completions", self._chat_completions),
                    web.post(f"{base}/responses", self._responses),
                    web.get(f"{base}/models", self._models),
                ]
            )
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/episodes/{episode}", self._open),
                web.post("/episodes/{episode}/finish", self._finish),
                web.get("/health", self._health),
                web.get("/status", self._report),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)

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

    async def _generate(self, request: web.Request) -> web.Response:
        arrived_at = self._clock.now()

        async def answer() -> bytes:
            form = _parse(await request.read())
            generated = await self._submit(await self._job(form, arrived_at))
            return msgspec.json.encode(self._taken_apart(generated, form) if form.messages or form.tools else generated)

        return await self._answered(answer())

    def _taken_apart(self, generated: Generated, form: GenerateForm) -> Generated:
        replace = msgspec.structs.replace
        samples = [
            replace(sample, parsed=self._chat.parsed(generated.prompt_ids, sample.text, form.tools))
            for sample in generated.samples
        ]
        return replace(generated, samples=samples)

    async def _answered(self, work: Coroutine[Any, Any, bytes]) -> web.Response:
        """The body that `work` answers, or its problem."""
        try:
            return web.Response(body=await work, content_type=_JSON)
        except web.HTTPRequestEntityTooLarge:
            return _refusal(413, "data", f"the body exceeds gateway.max_body_mib={self._config.max_body_mib}")
        except Problem as problem:
            return _refusal(problem.status, problem.kind, str(problem))

    async def _job(self, form: GenerateForm, arrived_at: float) -> Job:
        prompt_ids = await self._prompt(form)
        limit = self._config.request_deadline_s
        deadline_at = arrived_at + min(form.deadline_s or limit, limit)
        return self._chat.job(form.session, prompt_ids, form.sampling, form.n, deadline_at)

    async def _prompt(self, form: GenerateForm) -> list[int]:
        given = [name for name in ("input_ids", "prompt", "messages") if getattr(form, name) is not None]
        if len(given) != 1:
            raise DataProblem(f"exactly one of input_ids, prompt and messages is due, got {', '.join(given) or 'none'}")
        self._tokens.check("prefix_ids", form.prefix_ids)
        if form.prompt is not None:
            return await self._tokens.text_ids(form.prompt, form.prefix_ids)
        if form.messages is not None:
            offered(form.tools)
            return await self._tokens.chat_ids(form.messages, form.prefix_ids, form.carried, form.tools)
        self._tokens.check("input_ids", form.input_ids or [])
        return [*form.prefix_ids, *(form.input_ids or [])]

    # --- episodes ----------------------------------------------------------------------------------------------------

    async def _open(self, request: web.Request) -> web.Response:
        async def answer() -> bytes:
            self._episodes.open(request.match_info["episode"], _opening(await request.read()))
            return b"{}"

        return await self._answered(answer())

    async def _finish(self, request: web.Request) -> web.Response:
        async def answer() -> bytes:
            return msgspec.json.encode(self._episodes.finish(request.match_info["episode"]))

        return await self._answered(answer())

    # --- OpenAI's ----------------------------------------------------------------------------------------------------

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        def finished(served: Served, form: ChatForm) -> dict[str, Any]:
            return chat_answer(served, form)

        return await self._openai(request, read_chat, finished, chat_chunks, b"data: [DONE]\n\n")

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        def events(answer: dict[str, Any], form: ResponsesForm) -> Iterator[dict[str, Any]]:
            return responses_events(answer)

        return await self._openai(request, read_responses, responses_answer, events, b"")

    async def _openai(
        self,
        request: web.Request,
        read: Callable[[bytes], tuple[F, Ask]],
        finished: Callable[[Served, F], dict[str, Any]],
        parts: Callable[[dict[str, Any], F], Iterator[dict[str, Any]]],
        end: bytes,
    ) -> web.StreamResponse:
        """Read, sample, answer; a stream is begun at once and kept alive while its answer is held or sampled."""
        arrived_at = self._clock.now()
        try:
            form, ask = read(await request.read())
            named = request.match_info.get("episode")
            ask = msgspec.structs.replace(ask, session=named) if named else ask
            if not form.stream:
                answer = finished(await self._chat.answer(ask, arrived_at), form)
                return web.Response(body=msgspec.json.encode(answer), content_type=_JSON)
        except web.HTTPRequestEntityTooLarge:
            return _refusal(413, "data", f"the body exceeds gateway.max_body_mib={self._config.max_body_mib}")
        except Problem as problem:
            return _refusal(problem.status, problem.kind, str(problem))
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        await response.prepare(request)
        try:
            answer = finished(await _alive(self._chat.answer(ask, arrived_at), response), form)
            for part in parts(answer, form):
                await response.write(_event(part))
            await response.write(end)
        except Problem as problem:
            await response.write(_event(_error_body(problem.status, problem.kind, str(problem))))
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        listed = {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "sluice"}]}
        return web.Response(body=msgspec.json.encode(listed), content_type=_JSON)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(body=b'{"status":"ok"}', content_type=_JSON)

    async def _report(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._status()), content_type=_JSON)


def _parse(data: bytes) -> GenerateForm:
    try:
        return _forms.decode(data)
    except msgspec.ValidationError as error:
        why = ""
        if "unknown field" in str(error) and "$.sampling" in str(error):
            why = ": tokens are sampled from the whole distribution, because their logprobs must be the policy's own"
        raise DataProblem(f"{error}{why}") from error
    except msgspec.DecodeError as error:
        raise DataProblem(f"the body is not JSON: {error}") from error


def _opening(data: bytes) -> OpenForm:
    try:
        return _openings.decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise DataProblem(f"can't open an episode: {error}") from error


async def _alive(work: Coroutine[Any, Any, T], response: web.StreamResponse) -> T:
    """`work`'s value, with a comment in the stream now and then until it is there."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((task,), timeout=ALIVE_EVERY_S))[0]:
            await response.write(b": waiting\n\n")
        return task.result()
    finally:
        task.cancel()


def _event(data: dict[str, Any]) -> bytes:
    name = f"event: {data['type']}\n".encode() if isinstance(data.get("type"), str) else b""
    return name + b"data: " + msgspec.json.encode(data) + b"\n\n"


def _error_body(status: int, kind: str, message: str) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message, "code": status, "param": None}}


def _refusal(status: int, kind: str, message: str) -> web.Response:
    body = msgspec.json.encode(_error_body(status, kind, message))
    return web.Response(status=status, body=body, content_type=_JSON)
