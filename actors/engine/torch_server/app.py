"""HTTP side of the engine: routes of SGLang's native API on one asyncio loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import torch
from aiohttp import web

from actors.engine.torch_server import protocol, shared
from actors.engine.torch_server.gate import Gate, GateBusy
from actors.engine.torch_server.generation import ABORTED, Generation
from actors.engine.torch_server.groups import GroupError, GroupLost, Groups, Incoming
from actors.engine.torch_server.protocol import Limits, SchemaError, Ticket
from actors.engine.torch_server.sampling import BadRequest
from actors.engine.torch_server.scheduler import TAGS, WEIGHTS, MemoryMisuse, Scheduler
from actors.engine.torch_server.weights import DTYPES, BadWeights

T = TypeVar("T")
log = logging.getLogger("sluice.engine")
HEALTH_DEADLINE = 20.0  # seconds, SGLang's
PARTIAL = "The full weights of the model are partially updated. Please discard the whole weights."


class Server:
    """Ties requests to the scheduler and the weight-update groups. Create it on the running loop."""

    def __init__(
        self, scheduler: Scheduler, groups: Groups, limits: Limits, info: Mapping[str, Any], max_body: int
    ) -> None:
        """`info` is what /model_info and /get_server_info say beside live values; `max_body` is in bytes."""
        self.scheduler, self.groups, self.limits, self.info = scheduler, groups, limits, info
        self.gate = Gate()
        self.live: dict[str, Generation] = {}
        self.failure: BaseException | None = None
        self.stopped = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._comm = ThreadPoolExecutor(1, "groups")
        self._checks = 0
        self.app = web.Application(client_max_size=max_body, middlewares=[_errors])
        self.app.add_routes(self._routes())

    # --- what the scheduler's thread calls ---

    def publish(self, generations: list[Generation]) -> None:
        self._loop.call_soon_threadsafe(self._progress, generations)

    def crashed(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def _progress(self, generations: list[Generation]) -> None:
        for g in generations:
            ticket: Ticket = g.ticket
            if g.left and self.live.pop(g.rid, None) is not None:
                ticket.remaining -= 1
                if ticket.remaining == 0 and not ticket.done.done():
                    ticket.done.set_result(None)
            if ticket.wake is not None:
                ticket.wake.set()

    def _fail(self, error: BaseException) -> None:
        log.critical("the engine can't go on", exc_info=error)
        self.failure = error
        self.stopped.set()

    # --- generation ---

    async def generate(self, request: web.Request) -> web.StreamResponse:
        ticket = protocol.parse_generate(await request.read(), self.limits, self._ticket)
        self._need(*TAGS)
        if ticket.stream:
            return await self._stream(request, ticket)
        await self._finish(ticket)
        found = [protocol.answer(g, self.scheduler.version) for g in ticket.generations]
        return _json(found if ticket.listed else found[0])

    def _ticket(self, stream: bool) -> Ticket:
        return Ticket(self._loop.create_future(), asyncio.Event() if stream else None)

    async def _finish(self, ticket: Ticket) -> None:
        self._register(ticket)
        try:
            if not await self.gate.enter(ticket):
                return
            try:
                self.scheduler.submit([g for g in ticket.generations if not g.left])
                await ticket.done
            finally:
                self.gate.leave()
        except asyncio.CancelledError:  # the caller hung up
            self._discard(ticket)
            raise

    def _register(self, ticket: Ticket) -> None:
        if len(self.live) + ticket.remaining > self.limits.sequences:
            raise web.HTTPServiceUnavailable(text=f"{len(self.live)} sequences are queued: try again later")
        rids = {g.rid for g in ticket.generations}
        if len(rids) < ticket.remaining or not rids.isdisjoint(self.live):
            raise BadRequest(f"Duplicate request ID: {sorted(rids & self.live.keys()) or 'within the request'}")
        for g in ticket.generations:
            self.live[g.rid] = g

    def _discard(self, ticket: Ticket) -> None:
        for g in ticket.generations:
            self.live.pop(g.rid, None)
        self.scheduler.call(lambda: self.scheduler.end(ticket.generations))

    async def _stream(self, request: web.Request, ticket: Ticket) -> web.StreamResponse:
        """Cumulative events, one a step at most: a slow reader sees fewer, not older ones."""
        assert ticket.wake is not None
        running = asyncio.ensure_future(self._finish(ticket))
        running.add_done_callback(lambda _: ticket.wake.set() if ticket.wake else None)
        try:
            await asyncio.sleep(0)
            if running.done():
                running.result()
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            sent: dict[str, int] = {}
            while not all(sent.get(g.rid) == -1 for g in ticket.generations):
                await ticket.wake.wait()
                ticket.wake.clear()
                for index, g in enumerate(ticket.generations):
                    await self._event(response, g, index if ticket.listed else None, sent)
            await running
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
            return response
        finally:
            running.cancel()

    async def _event(
        self, response: web.StreamResponse, g: Generation, index: int | None, sent: dict[str, int]
    ) -> None:
        count = len(g.logprobs)
        if sent.get(g.rid) == -1 or (not g.left and sent.get(g.rid, 0) == count):
            return
        sent[g.rid] = -1 if g.left else count
        found = protocol.answer(g, self.scheduler.version) | ({} if index is None else {"index": index})
        await response.write(b"data: " + msgspec.json.encode(found) + b"\n\n")

    async def abort_request(self, request: web.Request) -> web.Response:
        body = protocol.decode(await request.read(), protocol.Abort)
        if not body.rid and not body.abort_all:
            raise BadRequest("rid is empty: give a request id, or abort_all=true")
        # as SGLang: what is no id takes no effect, what is one also ends the ids that begin with it
        if body.abort_all or body.rid in self.live:
            await self._abort(None if body.abort_all else body.rid)
        return web.Response()

    async def _abort(self, prefix: str | None) -> None:
        for ticket, _ in list(self.gate.held):
            hit = [g for g in ticket.generations if not g.left and (prefix is None or g.rid.startswith(prefix))]
            for g in hit:
                g.finish = ABORTED
                g.leave(self.scheduler.version)
            self._progress(hit)
        self.gate.abandon()
        await self._call(lambda: self.scheduler.abort(prefix))

    async def pause_generation(self, request: web.Request) -> web.Response:
        body = protocol.decode(await request.read(), protocol.Pause)
        self.gate.close()
        await self._call(lambda: self.scheduler.pause(body.mode))
        return _json({"status": "ok", "message": "Generation paused successfully."})

    async def continue_generation(self, request: web.Request) -> web.Response:
        protocol.decode(await request.read(), protocol.Resume)
        await self._call(self.scheduler.resume)
        self.gate.open()
        return _json({"status": "ok", "message": "Generation continued successfully."})

    async def flush_cache(self, request: web.Request) -> web.Response:
        try:
            timeout = float(request.query.get("timeout", "0"))
        except ValueError:
            raise SchemaError(f"timeout is {request.query['timeout']!r}, it must be seconds") from None
        if timeout > 0:
            try:
                flushed = await asyncio.wait_for(asyncio.wrap_future(self.scheduler.flush_when_idle()), timeout)
            except TimeoutError:
                flushed = False
        else:
            flushed = await self._call(self.scheduler.flush)
        return web.Response(text="Cache flushed." if flushed else "Flush cache failed.", status=200 if flushed else 400)

    # --- health and information ---

    async def health(self, request: web.Request) -> web.Response:
        """The scheduler takes commands: answers while an update joins or receives, not while paused."""
        if self.gate.paused:
            return web.Response(status=503)
        try:
            await asyncio.wait_for(self._call(lambda: None), HEALTH_DEADLINE)
        except TimeoutError:
            return web.Response(status=503)
        return web.Response()

    async def health_generate(self, request: web.Request) -> web.Response:
        """One token is generated, past the gate's queue."""
        if self.gate.paused or self.scheduler.released:
            return web.Response(status=503)
        self._checks += 1
        body = {
            "input_ids": [0],
            "rid": f"HEALTH_CHECK_{self._checks}",
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        }
        ticket = protocol.parse_generate(msgspec.json.encode(body), self.limits, self._ticket)
        self._register(ticket)
        self.scheduler.submit(ticket.generations)
        try:
            await asyncio.wait_for(ticket.done, HEALTH_DEADLINE)
        except (TimeoutError, asyncio.CancelledError) as error:
            self._discard(ticket)
            if isinstance(error, asyncio.CancelledError):
                raise
            return web.Response(status=503)
        return web.Response(status=503 if ticket.generations[0].finish == ABORTED else 200)

    async def model_info(self, request: web.Request) -> web.Response:
        return _json({**self.info["model"], "weight_version": self.scheduler.version})

    async def server_info(self, request: web.Request) -> web.Response:
        stats = await self._call(self.scheduler.stats)
        live = {
            "weight_version": self.scheduler.version,
            "tp_size": 1,
            "groups": self.groups.names(),
            "held": len(self.gate.held),
            "internal_states": [stats],
        }
        return _json({**self.info["server"], **live})

    # --- weights ---

    async def init_weights_update_group(self, request: web.Request) -> web.Response:
        body = protocol.decode(await request.read(), protocol.JoinGroup)
        where = (
            body.group_name,
            body.master_address,
            body.master_port,
            body.rank_offset,
            body.world_size,
            body.backend,
        )
        await self._on_comm(lambda: self.groups.join(*where))
        return _json(protocol.outcome(True, f"Joined group {body.group_name} as rank {body.rank_offset}."))

    async def destroy_weights_update_group(self, request: web.Request) -> web.Response:
        body = protocol.decode(await request.read(), protocol.LeaveGroup)
        await self._on_comm(lambda: self.groups.leave(body.group_name))
        return _json(protocol.outcome(True, f"Left group {body.group_name}."))

    async def update_weights_from_distributed(self, request: web.Request) -> web.Response:
        body = protocol.decode(await request.read(), protocol.Update)
        incoming = _incoming(body)
        return await self._updated(body, len(incoming), lambda: self._receive(body, incoming))

    async def update_weights_from_tensor(self, request: web.Request) -> web.Response:
        """Takes where shared memory lies (`contracts.handles.Shared`, JSON) in place of SGLang's pickle."""
        body = protocol.decode(await request.read(), protocol.Take)
        place = shared.parse(body.serialized_named_tensors)
        return await self._updated(body, len(place.tensors), lambda: self._take(body, place))

    async def _updated(
        self, body: protocol.Update | protocol.Take, count: int, receive: Callable[[], int]
    ) -> web.Response:
        # shielded: a caller that hangs up must not tear a collective that its peers are in
        known = await asyncio.shield(asyncio.ensure_future(self._update(body, receive)))
        return _json(protocol.outcome(True, f"Updated {known} of {count} parameters online."))

    async def _update(self, body: protocol.Update | protocol.Take, receive: Callable[[], int]) -> int:
        if body.abort_all_requests:
            await self._abort(None)
        async with self.gate.exclusive(self.groups.timeout.total_seconds()):
            try:
                return await self._on_comm(receive)
            except GroupLost as error:
                self._fail(error)
                raise

    def _receive(self, body: protocol.Update, incoming: list[Incoming]) -> int:
        """On the groups' thread: at most one update's tensors are held besides the model's."""
        tensors = self.groups.receive(body.group_name, incoming, body.load_format == "flattened_bucket")
        return self._apply(body, tensors)

    def _take(self, body: protocol.Take, place: shared.Shared) -> int:
        """On the groups' thread too. The memory is let go before the caller may fill it anew."""
        with shared.opened(place, self.scheduler.model.weights.device) as tensors:
            return self._apply(body, tensors)

    def _apply(self, body: protocol.Update | protocol.Take, tensors: list[tuple[str, torch.Tensor]]) -> int:
        applied = self.scheduler.call(lambda: self.scheduler.apply(tensors, body.weight_version, body.flush_cache))
        return applied.result(self.groups.timeout.total_seconds())

    async def release_memory_occupation(self, request: web.Request) -> web.Response:
        body = protocol.decode(await request.read(), protocol.Occupation)
        await self._call(lambda: self.scheduler.give_back(body.known(TAGS)))
        return _json(None)

    async def resume_memory_occupation(self, request: web.Request) -> web.Response:
        body = protocol.decode(await request.read(), protocol.Occupation)
        await self._call(lambda: self.scheduler.take(body.known(TAGS)))
        return _json(None)

    async def update_weight_version(self, request: web.Request) -> web.Response:
        body = protocol.decode(await request.read(), protocol.Relabel)
        if body.abort_all_requests:
            await self._abort(None)
        await self._call(lambda: self.scheduler.label(body.new_version))
        done = protocol.outcome(True, f"Weight version updated to {body.new_version}")
        return _json({**done, "new_version": body.new_version})

    async def weights_checker(self, request: web.Request) -> web.Response:
        body = protocol.decode(await request.read(), protocol.Check)
        if body.action != "checksum":
            raise BadRequest(f"action is {body.action!r}, this engine knows only 'checksum'")
        self._need(WEIGHTS)
        checksums = await self._call(lambda: self.scheduler.model.weights.checksums(body.checksum))
        return _json({**protocol.outcome(True, "Success."), "ranks": [{"checksums": checksums}]})

    async def get_weights_by_name(self, request: web.Request) -> web.Response:
        body = protocol.decode(await request.read(), protocol.GetWeights)
        named = self.scheduler.model.weights.named
        self._need(WEIGHTS)
        if body.name not in named:
            raise BadRequest(f"Get parameter by name failed: no parameter {body.name!r}")
        return _json(await self._call(lambda: named[body.name][: body.truncate_size].float().tolist()))

    def _need(self, *tags: str) -> None:
        """Raises `MemoryMisuse` when one of them is released."""
        if not self.scheduler.released.isdisjoint(tags):
            raise MemoryMisuse(f"{', '.join(sorted(self.scheduler.released))}: released; resume it first")

    # --- plumbing ---

    async def _call(self, function: Callable[[], T]) -> T:
        future: Future[T] = self.scheduler.call(function)
        return await asyncio.wrap_future(future)

    async def _on_comm(self, function: Callable[[], T]) -> T:
        return await asyncio.shield(self._loop.run_in_executor(self._comm, function))

    def _routes(self) -> list[web.RouteDef]:
        posts = (
            self.generate, self.abort_request, self.pause_generation, self.continue_generation,
            self.init_weights_update_group, self.destroy_weights_update_group, self.update_weights_from_distributed,
            self.update_weights_from_tensor, self.update_weight_version, self.weights_checker,
            self.release_memory_occupation, self.resume_memory_occupation,
        )  # fmt: skip
        both = (self.get_weights_by_name, self.flush_cache)
        gets = (self.health, self.health_generate, self.model_info, self.server_info)
        routes = [web.post(f"/{handler.__name__}", handler) for handler in posts + both]
        routes += [web.get(f"/{handler.__name__}", handler, allow_head=False) for handler in gets + both]
        routes += [web.get("/get_model_info", self.model_info), web.get("/get_server_info", self.server_info)]
        return routes


def _incoming(body: protocol.Update) -> list[Incoming]:
    """What an update announces. Raises `BadWeights`."""
    if not len(body.names) == len(body.dtypes) == len(body.shapes):
        raise BadWeights(f"{len(body.names)} names, {len(body.dtypes)} dtypes and {len(body.shapes)} shapes differ")
    for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True):
        if dtype.removeprefix("torch.") not in DTYPES or min(shape, default=0) < 0:
            raise BadWeights(f"{name} has dtype {dtype!r} and shape {shape}: dtypes are {', '.join(DTYPES)}")
    kinds: list[torch.dtype] = [DTYPES[dtype.removeprefix("torch.")] for dtype in body.dtypes]
    return [Incoming(n, k, tuple(s)) for n, k, s in zip(body.names, kinds, body.shapes, strict=True)]


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except (BadRequest, MemoryMisuse) as error:
        return _json(protocol.semantic_error(str(error)), 400)
    except SchemaError as error:
        return _json(protocol.schema_error(str(error)), 400)
    except BadWeights as error:
        return _json(protocol.outcome(False, f"Failed to update parameter online: {error}. {PARTIAL}"), 400)
    except (GroupError, GateBusy) as error:
        return _json(protocol.outcome(False, str(error)), 400)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
