"""Environments of the `verifiers` package (0.4): its tasksets are the tasks, its harnesses play them.

The package needs a hundred others, of which some clash with ours, so it lives in an environment of its own:
`producer.python` names that environment's interpreter, and nothing of Sluice is installed there. This file imports the
package only when a producer is made.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

from contracts.producer import CONTRACT_VERSION, DataError, Outcome, Place, Session, Task

INSTALL = "install verifiers==0.4.* and msgspec into a virtual environment of its own and name its python"
START_S, CLOSE_S = 300.0, 30.0
"""Longest that what the agents share may take to come up, and to go."""
MOST = 1_000_000
"""Tasks of a finite taskset that are listed."""


class Verifiers:
    """A `contracts.producer.MultiTurn` over one environment of `verifiers.v1` in which one agent is trained.

    `taskset` is the id of an installed taskset, `env` what `verifiers` takes beside it, such as `{agent: {harness: {id:
    "null"}, runtime: {type: subprocess}}}`. With `held_out_every=k` one task in k, chosen by its key, is for evaluation
    and no other.
    Finite tasksets are shuffled anew each pass, infinite ones are taken in their own order.

    The agent speaks to the gateway, which keeps its exact tokens. The sum of the weighted rewards is the reward, each
    reward and metric a component. Raises `ValueError` without the package, or for settings that it refuses.
    """

    contract = CONTRACT_VERSION

    def __init__(
        self, taskset: str, *, env: Mapping[str, Any] | None = None, held_out_every: int | None = None
    ) -> None:
        try:
            from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ValueError(f"verifiers can't be imported ({error}); {INSTALL} as producer.python") from error
        if held_out_every is not None and held_out_every < 2:
            raise ValueError(f"held_out_every={held_out_every} leaves nothing to train on; 2 or more is expected")
        settings = {**(env or {})}
        settings["taskset"] = {**settings.get("taskset", {}), "id": taskset}
        self._env = loaders.load_environment(loaders.resolve_env_config(settings))
        if len(self._env._agent_specs) != 1:
            raise ValueError(f"taskset {taskset!r} has the agents {', '.join(self._env._agent_specs)}; one is trained")
        self._every = held_out_every
        self._serving: AsyncExitStack | None = None

    async def start(self, place: Place) -> None:
        """Bring up what its agents share."""
        self._serving = AsyncExitStack()
        async with asyncio.timeout(START_S):
            await self._serving.enter_async_context(self._env.serving())

    async def close(self) -> None:
        if self._serving is not None:
            async with asyncio.timeout(CLOSE_S):
                await self._serving.aclose()

    async def tasks(self, cursor: str | None, seed: int, split: str) -> AsyncIterator[Task]:
        """Tasks for ever. Raises `ValueError` for a foreign cursor, and if a finite taskset is empty."""
        try:
            position = 0 if cursor is None else int(cursor)
        except ValueError as error:
            raise ValueError(f"cursor {cursor!r} is none of this producer's") from error
        evaluates = split == "eval"
        if evaluates and self._every is None:
            raise ValueError("evaluation needs held_out_every, to keep some tasks for it")
        for number, found in self._stream(position, seed, split):
            if self._every is not None and _held_out(found.key, self._every) != evaluates:
                continue
            payload = {"data": found.data.model_dump(mode="json", exclude_none=True)}
            yield Task(id=f"{split}-{found.key[:12]}-{number}", payload=payload, cursor=str(number + 1))

    def _stream(self, position: int, seed: int, split: str) -> Iterator[tuple[int, Any]]:
        """Number and task from `position` on."""
        taskset = self._env.taskset
        if not taskset.bounded:
            yield from enumerate(taskset.skip(position), position)
            return
        known = list(taskset.take(MOST))
        if not known:
            raise ValueError(f"taskset {self._env.config.taskset.id!r} holds no task")
        while True:
            order = list(range(len(known)))
            random.Random(f"{seed}/{split}/{position // len(known)}").shuffle(order)
            for at in range(position % len(known), len(known)):
                yield position, known[order[at]]
                position += 1

    async def rollout(self, task: Task, session: Session) -> Outcome:
        """One episode of the package's own. An error of its is raised, so that it is no reward."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext  # pyright: ignore[reportMissingImports]
        from verifiers.v1.types import SamplingConfig  # pyright: ignore[reportMissingImports]

        endpoint = await session.endpoint()
        context = ModelContext(
            model="policy",
            client=EvalClientConfig(base_url=endpoint.base_url, api_key_var="SLUICE_NO_KEY"),
            sampling=SamplingConfig(temperature=endpoint.temperature, max_tokens=endpoint.max_new_tokens),
        )
        async with asyncio.timeout(endpoint.deadline_s):
            episode = await self._env.run_episode(self._task(task), context)
        if not episode.ok or not episode.traces:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors)[:2000] or "it failed")
        return _outcome(episode.traces[-1])

    def _task(self, task: Task) -> Any:
        kind = type(self._env.taskset).task_type()
        try:
            return kind(kind.data_type().model_validate(task.payload["data"]), self._env.taskset.config.task)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"task {task.id} is none of {kind.__name__}: {error}") from error


def _outcome(trace: Any) -> Outcome:
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored or not trace.rewards:
        raise RuntimeError(f"no reward: {', '.join(unscored) or 'the task has none'} was not computed")
    components = {name: reward.value for name, reward in trace.rewards.items()}
    components |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return Outcome(reward=trace.reward, components=components, info={"stop": str(trace.stop_condition)})


def _held_out(key: str, every: int) -> bool:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") % every == 0
