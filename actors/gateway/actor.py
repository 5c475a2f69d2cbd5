"""Performs what the gateway's core decides: keeps the tokens of each request, calls engines, answers callers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import aiohttp
import msgspec

from actors.gateway.answers import Answers, load
from actors.gateway.client import (
    PROBLEMS,
    DeadlineProblem,
    Generated,
    Sample,
)
from actors.gateway.core import GatewayCore
from actors.gateway.http import Server
from actors.gateway.overdue import Overdue
from actors.gateway.serving import Live, Serving
from actors.gateway.state import (
    AbortAll,
    AbortCall,
    Announce,
    Answered,
    Arrived,
    Call,
    CallFailed,
    Left,
    Listening,
    Refuse,
    Reply,
    State,
    gate,
)
from actors.gateway.templates import TemplateError
from actors.gateway.tokens import ModelFilesError, Tokens
from actors.gateway.upstream import AnswerError, Arriving, Draft, Job, absorb, body, rids, size_limit
from actors.startup import rarely_collected, uncollected
from config.schema import RunConfig
from contracts.core import Context, Fatal

CONNECT_S = 10.0
"""Longest wait for a connection to an engine."""
ABORT_TIMEOUT_S = 2.0
"""Longest wait for the answer to one abort."""
ABORT_EVERY_S, ABORT_EVERY_MAX_S = 0.05, 1.0
"""An abort that overtakes its request has no effect, so it is repeated: the first pause, doubled up to the last."""
BACKSTOP_S = 2.0
"""How long after its deadline a request is ended even if the core can't commit."""
STREAM = "text/event-stream"
DATA_STATUS = frozenset((400, 413, 422))
"""Answers of an engine that blame the request."""


class Overran(DeadlineProblem):
    """The core did not act on a deadline."""


class Entry:
    """A request in hand: its job, its samples so far, and the caller's answer."""

    def __init__(self, job: Job, live: Live | None) -> None:
        self.job = job
        self.drafts = [Draft() for _ in range(job.n)]
        self.live = live
        if live is not None:
            live.drafts = self.drafts
        self.answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def overdue(self) -> None:
        if not self.answer.done():
            self.answer.set_exception(Overran("the deadline passed, and the gateway's own actor could not act on it"))


class Flight:
    """A call in flight, in the task that performs it. `over` is done when it has ended."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.was_cut = False
        self.arriving: Arriving | None = None
        """What has come of a streamed answer."""
        self._task = asyncio.current_task()

    def cut(self) -> None:
        """Close the connection: the call fails."""
        if self._task is not None and not self.was_cut and not self.over.done():
            self.was_cut = True
            self._task.cancel()

    def ended(self, fault: str) -> Answered | CallFailed:
        """What an answer that broke off comes to: the tokens that were passed on count."""
        if self.arriving is not None and (self.arriving.grew or self.arriving.whole):
            return Answered(self.call.call, self.arriving.parts())
        return CallFailed(self.call.call, "infra", fault)

    def rescue(self) -> bool:
        """Whether the cancellation that was caught was ours, and is taken back."""
        return self.was_cut and self._task is not None and self._task.uncancel() == 0


class GatewayShell:
    """`contracts.core.Shell` of a gateway."""

    def __init__(self, config: RunConfig, actor: str) -> None:
        self.core = GatewayCore(actor, config.gateway, config.refit)
        self._config = config
        self._outlives = config.refit.drain == "in_flight"
        self._numbers = itertools.count(1)
        self._entries: dict[int, Entry] = {}
        self._flights: dict[int, Flight] = {}
        self._overdue = Overdue()
        self._early: list[Arrived | Left] | None = []
        """What callers did before `Announce`, None since."""
        self._server: Server | None = None
        self._engines: aiohttp.ClientSession | None = None

    async def start(self, context: Context) -> None:
        """Load the tokenizer and listen; callers wait until `Announce`. Raises `Fatal`."""
        self._context = context
        rarely_collected()
        self._tokens, self._answers = await asyncio.to_thread(self._load_model)
        self._engines = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )
        longest = min(self._tokens.context, self._config.engine.max_total_tokens)
        serving = Serving(self._tokens, self._answers, longest, self._config.gateway, context.clock, self._submit)
        self._server = Server(serving, self._status)
        self._url = await self._server.start(self._config.network.host, patient=context.boot > 1)

    async def perform(self, command: Any) -> Any | None:
        match command:
            case Call():
                return await self._call(command)
            case AbortCall():
                return await self._abort(command)
            case Reply():
                return self._reply(command)
            case Refuse():
                return self._refuse(command)
            case Announce():
                self._early, early = None, self._early or ()
                for input in early:
                    self._context.deliver(input)
                return Listening(self._url)
            case AbortAll():
                aborts = [self._post_abort(url, prefix) for url in command.urls for prefix in command.prefixes]
                await asyncio.gather(*aborts)
                return None
        raise TypeError(f"the gateway can't perform {command!r}")

    def payload(self, handle: str) -> bytes:
        raise KeyError(handle)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
        for flight in self._flights.values():
            flight.cut()
        if self._engines is not None:
            await self._engines.close()

    def _load_model(self) -> tuple[Tokens, Answers]:
        from actors import models

        source = self._config.model.source
        try:
            tokens = Tokens(models.resolve(source, models.cache_dir(), self._config.model.params))
            with uncollected():
                return tokens, load(self._config.rollout.response_template, tokens)
        except (models.ModelError, ModelFilesError) as error:
            raise Fatal(f"model.source={source!r}: {error}") from error
        except TemplateError as error:
            raise Fatal(str(error)) from error

    # --- callers -----------------------------------------------------------------------------------------------------

    async def _submit(self, job: Job, live: Live | None = None) -> Generated:
        """Hand a job to the core and wait for its end. A caller that leaves cancels this."""
        number = next(self._numbers)
        entry = self._entries[number] = Entry(job, live)
        limit_s = job.deadline_at + BACKSTOP_S - self._context.clock.now()
        self._when_announced(Arrived(number, job.n, job.session, job.deadline_at))
        try:
            with self._overdue.after(limit_s, entry.overdue):
                held_s = await entry.answer
        except (Overran, asyncio.CancelledError):
            self._when_announced(Left(number))
            raise
        finally:
            del self._entries[number]
        return Generated(job.prompt_ids, [self._sample(draft) for draft in entry.drafts], held_s)

    def _when_announced(self, input: Arrived | Left) -> None:
        if self._early is None:
            self._context.deliver(input)
        else:
            self._early.append(input)

    def _sample(self, draft: Draft) -> Sample:
        text, written = self._tokens.text(draft.ids), self._tokens.written(draft.ids)
        return Sample(draft.ids, draft.logprobs, draft.spans, draft.finish, text, written=written)

    def _reply(self, command: Reply) -> None:
        if (answer := self._waiting(command.request)) is not None:
            answer.set_result(command.held_s)

    def _refuse(self, command: Refuse) -> None:
        if (answer := self._waiting(command.request)) is not None:
            answer.set_exception(PROBLEMS[command.kind](command.reason))

    def _waiting(self, number: int) -> asyncio.Future[float] | None:
        """The answer that a caller still waits for."""
        entry = self._entries.get(number)
        return None if entry is None or entry.answer.done() else entry.answer

    def _status(self) -> dict[str, Any]:
        state: State = self._context.state()
        committed = state.committed
        return {
            "gate": gate(state),
            "epoch": state.epoch,
            "version": None if committed is None else committed.version,
            "requests": len(state.requests),
            "in_flight": sum(len(call.samples) for call in state.calls.values()),
            "held": len(state.waiting),
        }

    # --- engines -----------------------------------------------------------------------------------------------------

    async def _call(self, call: Call) -> Answered | CallFailed:
        entry = self._entries.get(call.request)
        if entry is None:
            return CallFailed(call.call, "infra", "the caller left")
        flight = self._flights[call.call] = Flight(call)
        try:
            return await self._post(flight, entry)
        except asyncio.CancelledError:
            if not flight.rescue():
                raise
            return flight.ended("it was cut off")
        finally:
            del self._flights[call.call]
            flight.over.set_result(None)

    async def _post(self, flight: Flight, entry: Entry) -> Answered | CallFailed:
        assert self._engines is not None
        call = flight.call
        headers = {
            "content-type": "application/json",
            "x-sluice-epoch": str(call.epoch),
            "x-sluice-rids": ",".join(rids(call)),
        }
        asked = body(entry.job, entry.drafts, call, stream=entry.live is not None)
        try:
            async with self._engines.post(f"{call.url}/generate", data=asked, headers=headers) as response:
                boot = response.headers.get("x-sluice-boot")
                stranger = response.status == 200 and boot != str(call.boot)
                if entry.live is not None and response.content_type == STREAM and not stranger:
                    return await self._follow(flight, entry, entry.live, response)
                data = await _read(response, size_limit(entry.job, len(call.samples)))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return flight.ended(f"{type(error).__name__}: {error}")
        except AnswerError as error:
            return flight.ended(str(error))
        if response.status != 200:
            return _failure(call, response.status, data)
        if stranger:
            return CallFailed(call.call, "infra", f"boot {boot} answered, boot {call.boot} is committed")
        try:
            parts = absorb(data, entry.job, entry.drafts, call, self._tokens.vocabulary, self._outlives)
            return Answered(call.call, parts)
        except AnswerError as error:
            return CallFailed(call.call, "infra", str(error))

    async def _follow(
        self, flight: Flight, entry: Entry, live: Live, response: aiohttp.ClientResponse
    ) -> Answered | CallFailed:
        """Pass on what an engine streams. Raises `AnswerError`, as what reading raises."""
        flight.arriving = Arriving(entry.job, entry.drafts, flight.call, self._tokens.vocabulary, self._outlives)
        async for chunk in response.content.iter_any():
            flight.arriving.feed(chunk)
            live.news.set()
        return flight.ended("the stream ended without a token")

    async def _abort(self, command: AbortCall) -> None:
        """Abort a call at its engine until it ends, and cut it off at the deadline."""
        flight = self._flights.get(command.call)
        if flight is None:
            return
        pause = ABORT_EVERY_S
        clock = self._context.clock
        while not flight.over.done() and (left := command.deadline_at - clock.now()) > 0:
            abort = asyncio.create_task(self._post_abort(flight.call.url, flight.call.rid))
            await asyncio.wait((abort, flight.over), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            abort.cancel()
            await asyncio.wait((flight.over,), timeout=min(pause, left))
            pause = min(2 * pause, ABORT_EVERY_MAX_S)
        flight.cut()

    async def _post_abort(self, url: str, prefix: str) -> None:
        """Ask once; what becomes of the call tells whether it helped."""
        assert self._engines is not None
        data, headers = msgspec.json.encode({"rid": prefix}), {"content-type": "application/json"}
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with (
                asyncio.timeout(ABORT_TIMEOUT_S),
                self._engines.post(f"{url}/abort_request", data=data, headers=headers) as response,
            ):
                await _read(response, 65_536)


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The whole body. Raises `AnswerError` beyond `limit` bytes."""
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > limit:
            raise AnswerError(f"the answer exceeds {limit} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _failure(call: Call, status: int, data: bytes) -> CallFailed:
    text = data[:500].decode(errors="replace")
    if status == 409:
        return CallFailed(call.call, "not_serving", f"409 {text}")
    return CallFailed(call.call, "data" if status in DATA_STATUS else "infra", f"{status} {text}")


def build(config: RunConfig, actor: str) -> GatewayShell:
    """The shell of gateway `actor`."""
    return GatewayShell(config, actor)
