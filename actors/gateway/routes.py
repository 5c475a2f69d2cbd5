"""Which handler serves a request: two look-ups, where a web framework would try one pattern after another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import unquote

from aiohttp import web

GO_ON_S = 5.0
"""How long a caller that asks whether to go on may leave the answer unread."""

Handler = Callable[[web.BaseRequest, str | None], Awaitable[web.StreamResponse]]
"""Serves a request, of an episode or none."""
Table = Mapping[str, tuple[str, Handler]]
"""Path -> method and handler."""


class Routes:
    """`plain`: whole paths. `of_episodes`: what may follow /episodes/NAME."""

    def __init__(self, plain: Table, of_episodes: Table) -> None:
        self._plain, self._of_episodes = plain, of_episodes

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Raises `HTTPNotFound`, `HTTPMethodNotAllowed` or `HTTPExpectationFailed`."""
        path, episode = request.rel_url.raw_path, None
        found = self._plain.get(path)
        if found is None and path.startswith("/episodes/"):
            name, slash, rest = path[10:].partition("/")
            found, episode = self._of_episodes.get(slash + rest) if name else None, unquote(name)
        if found is None:
            raise web.HTTPNotFound
        method, handler = found
        if request.method != method and (request.method, method) != ("HEAD", "GET"):
            raise web.HTTPMethodNotAllowed(request.method, [method])
        if "expect" in request.headers:
            await _go_on(request)
        return await handler(request, episode)


async def _go_on(request: web.BaseRequest) -> None:
    """Tell a caller that asks before it sends its body to do so."""
    if request.headers["expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed
    async with asyncio.timeout(GO_ON_S):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0
