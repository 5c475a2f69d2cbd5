"""Talking to a running Gym: which agents there are, and one rollout by one of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import aiohttp
import yaml

from contracts.producer import DataError, Outcome

ANSWER_MIB = 64
"""Longest answer of a rollout that is taken: Gym sends the tokens of every turn along, though nobody needs them."""
HEAD_MIB = 16
ASK_S = 10.0
"""Longest wait for the head server."""
DATA_STATUS = frozenset((400, 404, 413, 422))
"""Answers of an agent that blame the row."""


class GymError(Exception):
    """Gym failed, or is not there: worth another try."""


class Gym:
    """A Gym whose head server listens at `head`."""

    def __init__(self, head: str) -> None:
        self.head = head.rstrip("/")
        self._agents: dict[str, str] = {}
        self._session: aiohttp.ClientSession | None = None

    async def agents(self) -> Mapping[str, str]:
        """Name -> URL of every agent. Raises `GymError`."""
        url = f"{self.head}/global_config_dict_yaml"
        try:
            async with self._http().get(url, timeout=aiohttp.ClientTimeout(total=ASK_S)) as response:
                data = await _read(response, HEAD_MIB)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise GymError(f"no head server at {self.head}: {type(error).__name__}: {error}") from error
        try:
            config = yaml.safe_load(json.loads(data))
            self._agents = {name: url for name, block in config.items() if (url := _agent(block)) is not None}
        except (ValueError, yaml.YAMLError, AttributeError, TypeError) as error:
            raise GymError(f"{url} answered no configuration: {error}") from error
        return self._agents

    def forget(self) -> None:
        """The servers were started anew: ask for their addresses again."""
        self._agents = {}

    async def run(self, agent: str, body: Mapping[str, Any]) -> Outcome:
        """One rollout. It takes as long as it takes: the caller bounds it. Raises `GymError` or `DataError`."""
        if agent not in self._agents:
            await self.agents()
        if agent not in self._agents:
            known = ", ".join(sorted(self._agents)) or "none"
            raise DataError(f"Gym has no agent {agent!r}; it has {known}. Start it with the agent's config path")
        url = f"{self._agents[agent]}/run"
        try:
            async with self._http().post(url, json=body, timeout=aiohttp.ClientTimeout(total=None)) as response:
                data = await _read(response, ANSWER_MIB)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self.forget()
            raise GymError(f"agent {agent!r} at {url}: {type(error).__name__}: {error}") from error
        text = data[:500].decode(errors="replace")
        if response.status in DATA_STATUS:
            raise DataError(f"agent {agent!r} refuses the row: {response.status} {text}")
        if response.status != 200:
            raise GymError(f"agent {agent!r} answered {response.status} {text}")
        return outcome(agent, data)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Gym's servers keep sessions in cookies: one rollout must not see another's.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._session


def outcome(agent: str, data: bytes) -> Outcome:
    """What an agent answered, as an `Outcome`. Raises `GymError` unless it has a finite reward."""
    try:
        result = json.loads(data)
        reward = result["reward"]
        finite = isinstance(reward, int | float) and math.isfinite(reward)
    except (ValueError, KeyError, TypeError) as error:
        raise GymError(f"agent {agent!r} answered no result: {data[:200]!r}") from error
    if not finite:
        raise GymError(f"agent {agent!r} answered reward {reward!r}, which is no finite number")
    components = result.get("reward_components")
    named = components if isinstance(components, dict) else {}
    return Outcome(
        reward=float(reward),
        components={str(k): float(v) for k, v in named.items() if isinstance(v, int | float) and math.isfinite(v)},
        mask=_mask(result.get("mask_sample")),
        info={"agent": agent},
    )


def _mask(value: Any) -> str | None:
    """Environments mask a sample by a true value, which may be the reason itself."""
    if not value:
        return None
    return value if isinstance(value, str) else "the environment masked it"


def _agent(block: Any) -> str | None:
    """The URL of an agent's configuration block, if it is one."""
    servers = block.get("responses_api_agents") if isinstance(block, dict) else None
    if not isinstance(servers, dict) or not servers:
        return None
    server = next(iter(servers.values()))
    if not isinstance(server, dict) or "host" not in server or "port" not in server:
        return None
    return f"http://{server['host']}:{server['port']}"


async def _read(response: aiohttp.ClientResponse, mib: int) -> bytes:
    """The whole body. Raises `GymError` beyond `mib`."""
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > mib * 2**20:
            raise GymError(f"{response.url} answered more than {mib} MiB")
        chunks.append(chunk)
    return b"".join(chunks)
