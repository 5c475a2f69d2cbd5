"""The callers' side: HTTP in, a checked `Job` to the shell, samples or an error of one kind out."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import msgspec

from actors.answering import Answering, CutOff, Request
from actors.gateway.chat import Ask, Chat, Served, offered
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
from actors.gateway.serving import Live, Serving
from actors.gateway.streams import ChatStream, ResponsesStream
from actors.gateway.tokens import Tokens
from actors.gateway.upstream import Job
from actors.network import address_of
from contracts.core import Fatal

ALIVE_EVERY_S = 5.0
"""Pause between two signs of life in a stream whose answer is not there yet."""
UNREAD_S = 30.0
"""How long a caller may leave unread what it is sent."""
BIND_DEADLINE_S = 5.0
"""How long a restarted gateway waits for its predecessor's port."""

F = TypeVar("F", ChatForm, ResponsesForm)
Route = Callable[[Request, str], Awaitable[None]]
"""Answers a request of an episode, whose name is empty for requests of none."""


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
    """Serves /generate, OpenAI's APIs, episodes, /health and /status, which answers `status()`.

    A caller that doesn't read what it is sent is cut off after `UNREAD_S`.
    """

    def __init__(self, serving: Serving, status: Callable[[], dict[str, Any]]) -> None:
        self._tokens = serving.tokens
        self._config = serving.config
        self._clock = serving.clock
        self._submit = serving.submit
        self._status = status
        self._episodes = Episodes(serving.config.max_episodes, serving.clock.now)
        self._chat = Chat(serving, self._episodes)
        limit = serving.config.max_body_mib * 2**20
        self._http = Answering(self._handle, limit, self._refused, lambda: UNREAD_S)
        self._routes: dict[tuple[str, ...], tuple[str, Route]] = {
            ("generate",): ("POST", self._generate),
            ("episodes",): ("POST", self._open),
            ("episodes", "finish"): ("POST", self._finish),
            ("health",): ("GET", self._health),
            ("status",): ("GET", self._report),
        }
        for base in (("v1",), ("episodes", "v1")):
            self._routes |= {
                (*base, "chat", "completions"): ("POST", self._chat_completions),
                (*base, "responses"): ("POST", self._responses),
                (*base, "models"): ("GET", self._models),
            }

    async def start(self, host: str, patient: bool) -> str:
        """Bind and listen; answers the URL. `patient` waits a little for a port in use. Raises `Fatal`."""
        address = address_of(host)
        give_up_at = self._clock.now() + BIND_DEADLINE_S
        while True:
            try:
                return f"http://{address}:{await self._http.start(address, self._config.port)}"
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

    async def close(self) -> None:
        await self._http.close()

    async def _handle(self, request: Request) -> None:
        """Find the route: /episodes/NAME/... is that of an episode."""
        parts = tuple(request.path[1:])
        within = parts[:1] == ("episodes",)
        episode = "".join(parts[1:2]) if within else ""
        found = self._routes.get(("episodes", *parts[2:]) if within else parts)
        if found is None or (within and not episode):
            request.answer(404, self._refused(404, f"there is nothing at {'/'.join(request.path)[:200]!r}"))
        elif request.method != found[0] and (request.method, found[0]) != ("HEAD", "GET"):
            request.answer(405, self._refused(405, f"{request.method} where {found[0]} is due"))
        else:
            await found[1](request, episode)

    def _refused(self, status: int, message: str) -> bytes:
        if status == 413:
            message = f"the body exceeds gateway.max_body_mib={self._config.max_body_mib}"
        return _error_body(status, "infra" if status >= 500 else "data", message)

    # --- native ------------------------------------------------------------------------------------------------------

    async def _generate(self, request: Request, episode: str) -> None:
        arrived_at = self._clock.now()
        try:
            form = _parse(request.body)
            generated = await self._submit(await self._job(form, arrived_at), None)
        except Problem as problem:
            _refuse(request, problem)
            return
        answer = self._taken_apart(generated, form) if form.messages or form.tools else generated
        request.answer(200, msgspec.json.encode(answer))

    def _taken_apart(self, generated: Generated, form: GenerateForm) -> Generated:
        replace = msgspec.structs.replace
        samples = [
            replace(sample, parsed=self._chat.parsed(generated.prompt_ids, sample.text, form.tools))
            for sample in generated.samples
        ]
        return replace(generated, samples=samples)

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

    async def _open(self, request: Request, episode: str) -> None:
        try:
            self._episodes.open(episode, _opening(request.body))
        except Problem as problem:
            _refuse(request, problem)
            return
        request.answer(200, b"{}")

    async def _finish(self, request: Request, episode: str) -> None:
        try:
            record = self._episodes.finish(episode)
        except Problem as problem:
            _refuse(request, problem)
            return
        request.answer(200, msgspec.json.encode(record))

    # --- OpenAI's ----------------------------------------------------------------------------------------------------

    async def _chat_completions(self, request: Request, episode: str) -> None:
        await self._openai(request, episode, read_chat, chat_answer, ChatStream)

    async def _responses(self, request: Request, episode: str) -> None:
        await self._openai(request, episode, read_responses, responses_answer, ResponsesStream)

    async def _openai(
        self,
        request: Request,
        episode: str,
        read: Callable[[bytes], tuple[F, Ask]],
        finished: Callable[[Served, F], dict[str, Any]],
        streamed: Callable[[F, Tokens, list[str] | None], ChatStream | ResponsesStream],
    ) -> None:
        """Read, sample, answer: whole, or piece by piece as it is sampled."""
        arrived_at = self._clock.now()
        try:
            form, ask = read(request.body)
            ask = msgspec.structs.replace(ask, session=episode) if episode else ask
            if not form.stream:
                answer = finished(await self._chat.answer(ask, arrived_at), form)
                request.answer(200, msgspec.json.encode(answer))
                return
        except Problem as problem:
            _refuse(request, problem)
            return
        await self._stream(request, ask, arrived_at, streamed(form, self._tokens, offered(ask.tools)))

    async def _stream(
        self, request: Request, ask: Ask, arrived_at: float, stream: ChatStream | ResponsesStream
    ) -> None:
        """Pieces as they come, and a sign of life where none does for a while.

        What fails before there was anything to send is answered by its status, as without a stream.
        """
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
                    await _send(request, pieces, end_at - self._clock.now())
            error = answer.exception()
            if isinstance(error, Problem) and not request.begun:
                _refuse(request, error)
                return
            await _send(request, _rest(answer, stream, live))
            await request.end()
        finally:
            answer.cancel()

    async def _models(self, request: Request, episode: str) -> None:
        listed = {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "sluice"}]}
        request.answer(200, msgspec.json.encode(listed))

    async def _health(self, request: Request, episode: str) -> None:
        request.answer(200, b'{"status":"ok"}')

    async def _report(self, request: Request, episode: str) -> None:
        request.answer(200, msgspec.json.encode(self._status()))


def _refuse(request: Request, problem: Problem) -> None:
    request.answer(problem.status, _error_body(problem.status, problem.kind, str(problem)))


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


async def _send(request: Request, pieces: bytes, limit_s: float = math.inf) -> None:
    """Send pieces of a stream, if the caller reads: one that doesn't is cut off. Raises `CutOff`."""
    if not request.begun:
        request.begin(200, "text/event-stream")
    try:
        async with asyncio.timeout(min(UNREAD_S, limit_s)):
            await request.write(pieces)
    except TimeoutError as error:
        request.cut()
        raise CutOff("it does not read its answer") from error


def _rest(answer: asyncio.Future[Served], stream: ChatStream | ResponsesStream, live: Live) -> bytes:
    """The end of a stream: what is left to tell, or the problem."""
    try:
        return b"".join(map(_event, stream.end(answer.result(), live))) + stream.closing
    except Problem as problem:
        return _framed(_error_body(problem.status, problem.kind, str(problem)), b"")


def _event(data: dict[str, Any]) -> bytes:
    name = f"event: {data['type']}\n".encode() if isinstance(data.get("type"), str) else b""
    return _framed(msgspec.json.encode(data), name)


def _framed(data: bytes, name: bytes) -> bytes:
    return name + b"data: " + data + b"\n\n"


def _error_body(status: int, kind: str, message: str) -> bytes:
    return msgspec.json.encode({"error": {"type": kind, "message": message, "code": status, "param": None}})
