"""The callers' side: HTTP in, a checked `Job` to the shell, samples or an error of one kind out."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from aiohttp import web

from actors.gateway.client import DataProblem, DeadlineProblem, ErrorBody, ErrorReply, Generated, Problem
from actors.gateway.tokens import Tokens
from actors.gateway.upstream import Job
from config.schema import GatewayConfig
from contracts.core import Clock, Fatal

SAMPLES_MAX = 128
"""Samples of one request: their ids travel in one header."""
BIND_DEADLINE_S = 5.0
"""How long a restarted gateway waits for its predecessor's port."""

_JSON = "application/json"


class SamplingForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    temperature: Annotated[float, msgspec.Meta(ge=0)]
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)]
    seed: int | None = None


class GenerateForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /generate; see `actors.gateway.client.GatewayClient.generate`."""

    session: Annotated[str, msgspec.Meta(max_length=256)]
    sampling: SamplingForm
    input_ids: list[int] | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prefix_ids: list[int] = []
    n: Annotated[int, msgspec.Meta(ge=1, le=SAMPLES_MAX)] = 1
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


_forms = msgspec.json.Decoder(GenerateForm)


class Server:
    """Serves /generate, /health and /status. `submit` answers a job or raises a `Problem`.

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
        app = web.Application(client_max_size=config.max_body_mib * 2**20)
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.get("/health", self._health),
                web.get("/status", self._report),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)

    async def start(self, host: str, patient: bool) -> str:
        """Bind and listen; answers the URL. `patient` waits a little for a port in use. Raises `Fatal`."""
        await self._runner.setup()
        address = own_address() if host == "auto" else host
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

    async def _generate(self, request: web.Request) -> web.Response:
        arrived_at = self._clock.now()
        try:
            generated = await self._submit(await self._job(await request.read(), arrived_at))
        except web.HTTPRequestEntityTooLarge:
            return _refusal(413, "data", f"the body exceeds gateway.max_body_mib={self._config.max_body_mib}")
        except Problem as problem:
            return _refusal(problem.status, problem.kind, str(problem))
        return web.Response(body=msgspec.json.encode(generated), content_type=_JSON)

    async def _job(self, data: bytes, arrived_at: float) -> Job:
        form = _parse(data)
        prompt_ids = await self._prompt(form)
        room = self._context - len(prompt_ids)
        if room < 1:
            raise DataProblem(f"the prompt has {len(prompt_ids)} tokens, a context of {self._context} leaves no room")
        limit = self._config.request_deadline_s
        deadline_at = arrived_at + min(form.deadline_s or limit, limit)
        if self._clock.now() >= deadline_at:
            raise DeadlineProblem("the deadline passed while the prompt was tokenised")
        return Job(
            session=form.session,
            prompt_ids=prompt_ids,
            n=form.n,
            temperature=form.sampling.temperature,
            max_new_tokens=min(form.sampling.max_new_tokens, room),
            seed=form.sampling.seed,
            eos=self._tokens.eos,
            deadline_at=deadline_at,
        )

    async def _prompt(self, form: GenerateForm) -> list[int]:
        given = [name for name in ("input_ids", "prompt", "messages") if getattr(form, name) is not None]
        if len(given) != 1:
            raise DataProblem(f"exactly one of input_ids, prompt and messages is due, got {', '.join(given) or 'none'}")
        self._tokens.check("prefix_ids", form.prefix_ids)
        if form.prompt is not None:
            ids = await self._tokens.text_ids(form.prompt, form.prefix_ids)
        elif form.messages is not None:
            ids = await self._tokens.chat_ids(form.messages, form.prefix_ids)
        else:
            self._tokens.check("input_ids", form.input_ids or [])
            ids = [*form.prefix_ids, *(form.input_ids or [])]
        if not ids:
            raise DataProblem("the prompt has no token")
        return ids

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(body=b'{"status":"ok"}', content_type=_JSON)

    async def _report(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._status()), content_type=_JSON)


def own_address() -> str:
    """The address under which other hosts reach this one."""
    return socket.gethostbyname(socket.gethostname())


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


def _refusal(status: int, kind: str, message: str) -> web.Response:
    body = msgspec.json.encode(ErrorReply(ErrorBody(kind, message)))
    return web.Response(status=status, body=body, content_type=_JSON)
