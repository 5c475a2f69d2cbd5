"""Performs rollouts: talks to the gateway, has the environment score, and builds checked trajectories."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

import msgspec

from actors.collector import results
from actors.collector.calls import Calls, CallTimeout
from actors.collector.core import (
    Cancel,
    CancelAll,
    Cancelled,
    CollectorCore,
    Discard,
    GatewayGone,
    Restart,
    Rollout,
    SampleDone,
    SampleProblem,
    ThreadsStuck,
    Try,
)
from actors.collector.episode import Deadline, Remote, bounded
from actors.collector.grading import graded
from actors.collector.session import RolloutSession, Transcript
from actors.environments.isolated import loaded
from actors.environments.loading import ProducerError, is_multi_turn, load
from actors.gateway import client as gateway
from config.schema import RunConfig
from contracts.core import Context, Fatal, Ref
from contracts.events import FailureKind
from contracts.producer import DataError, Outcome, Place, Started, Task
from contracts.trajectory import Sampling, TrajectoryError

T = TypeVar("T")

STUCK = 8
"""Calls that never returned after which the process restarts."""


class Failed(Exception):
    """An attempt failed, with a kind of failure."""

    def __init__(self, failure: FailureKind, reason: str) -> None:
        super().__init__(reason)
        self.failure: FailureKind = failure


class StuckThreads(RuntimeError):
    """Too many calls of the environment never returned; the process is replaced."""


class CollectorShell:
    """`contracts.core.Shell` of one collector."""

    def __init__(self, config: RunConfig, actor: str) -> None:
        self.core = CollectorCore(config.rollout, actor)
        self._config = config
        self._name = config.producer.name
        rollout = config.rollout
        self._sampling = Sampling(temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens)
        self._running: dict[Ref, set[asyncio.Task[Any]]] = {}
        self._held: dict[str, tuple[Ref, bytes]] = {}
        self._handles = 0
        self._reported = False
        self._started = False
        self._calls = Calls(f"{self._name}-call")
        self._clients: dict[str, gateway.GatewayClient] = {}

    async def start(self, context: Context) -> None:
        self._context = context
        try:
            self._producer: Any = await loaded(self._config.producer, load)
        except ProducerError as error:
            raise Fatal(str(error)) from error
        if isinstance(self._producer, Started):
            await self._start_producer(context)
            self._started = True

    async def _start_producer(self, context: Context) -> None:
        """Raises `Fatal` with the producer's own error."""
        config = self._config
        port, host = config.gateway.port, config.network.host
        place = Place(
            actor=context.actor,
            collectors=config.launch.collectors,
            run_dir=context.run_dir,
            gateway_url=f"http://{host}:{port}" if port and host != "auto" else None,
        )
        try:
            await self._producer.start(place)
        except Exception as error:
            with contextlib.suppress(Exception):
                await self._producer.close()
            raise Fatal(f"producer {self._name!r} did not start: {_name(error)}: {error}") from error

    async def perform(self, command: Any) -> Any | None:
        match command:
            case Rollout():
                return await self._rollout(command)
            case Cancel():
                self._cancel(command.ref)
                return None
            case CancelAll():
                return await self._cancel_all()
            case Discard():
                self._held.pop(command.handle, None)
                return None
            case Restart():
                raise StuckThreads(command.reason)
        raise TypeError(f"the collector can't perform {command!r}")

    def payload(self, handle: str) -> bytes:
        return self._held.pop(handle)[1]

    async def close(self) -> None:
        await self._cancel_all()
        self._calls.close()
        if self._started:
            with contextlib.suppress(Exception):
                await self._producer.close()
        for client in self._clients.values():
            await client.close()

    # --- rollouts ---

    async def _rollout(self, command: Rollout) -> None:
        """Settle every try of the command, each by one input for the core."""
        work = self._episodes(command) if is_multi_turn(self._producer) else self._single_turns(command)
        task = asyncio.ensure_future(work)
        running = self._running.setdefault(command.ref, set())
        running.add(task)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            running.discard(task)
            if not running:
                self._running.pop(command.ref, None)
        if not task.cancelled():
            task.result()

    async def _single_turns(self, command: Rollout) -> None:
        """One call of the gateway for all samples, then one score each."""
        started = self._context.clock.now()
        deadline = Deadline(self._config.rollout.deadline_s)
        task = results.task_of(command)
        answer = await self._settled(command, command.tries, self._ask(command, task, deadline))
        if answer is None:
            return

        async def score(each: Try, sample: gateway.Sample) -> None:
            outcome = await self._settled(command, (each,), self._score(task, sample.text, deadline))
            if outcome is not None:
                transcript = Transcript(self._sampling)
                transcript.add(answer.prompt_ids, sample)
                flaws = [(1, flaw) for flaw in sample.parsed.flaws] if sample.parsed else []
                outcome = graded(outcome, flaws, [sample.written or sample.text], None, self._config.rollout)
                self._finish(command, each, transcript, outcome, started)

        await asyncio.gather(*(score(*pair) for pair in zip(command.tries, answer.samples, strict=True)))

    async def _ask(self, command: Rollout, task: Task, deadline: Deadline) -> gateway.Generated:
        prompt = await self._call("prompt", lambda: self._producer.prompt(task), deadline)
        asked: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        return await self._generate(command, command.tries[0], deadline, n=len(command.tries), **asked)

    async def _score(self, task: Task, text: str, deadline: Deadline) -> Outcome:
        return results.outcome_of(await self._call("score", lambda: self._producer.score(task, text), deadline))

    async def _episodes(self, command: Rollout) -> None:
        """One episode a sample, driven by the producer."""
        await asyncio.gather(*(self._episode(command, each) for each in command.tries))

    async def _episode(self, command: Rollout, each: Try) -> None:
        started = self._context.clock.now()
        deadline = Deadline(self._config.rollout.deadline_s)

        async def generate(**asked: Any) -> gateway.Generated:
            return await self._generate(command, each, deadline, **asked)

        rules = self._config.rollout
        name, sampling = self._episode_name(command, each), self._seeded(command, each, "episode")
        remote = Remote(self._client(command.url), name, each, sampling, rules, deadline)
        session = RolloutSession(generate, self._sampling, rules, remote)
        played = bounded(self._play(results.task_of(command), session), deadline.left())
        outcome = await self._settled(command, (each,), played)
        if session.diverged is not None:
            self._context.log.warning("noncontiguous", task=command.task.task, sample=each.sample, at=session.diverged)
        if outcome is not None:
            outcome = graded(outcome, session.flaws, session.texts, session.diverged, rules)
            self._finish(command, each, session.transcript, outcome, started)

    async def _play(self, task: Task, session: RolloutSession) -> Outcome:
        """The producer's rollout. An infrastructure failure in its last turn outweighs what it makes of it."""
        try:
            try:
                value = await self._producer.rollout(task, session)
            except Exception as error:
                await session.settle()
                if isinstance(error, DataError | gateway.Problem):
                    raise
                raise Failed("infra", f"producer {self._name!r}: rollout raised {_name(error)}: {error}") from error
            await session.settle()
        finally:
            await session.abandon()
        if not session.transcript.ids:
            raise DataError("the rollout ended without a turn")
        return results.outcome_of(value)

    async def _settled(self, command: Rollout, tries: tuple[Try, ...], work: Coroutine[Any, Any, T]) -> T | None:
        """The value of `work`, or None after its failure was reported for all `tries`."""
        try:
            return await work
        except gateway.Problem as error:
            if isinstance(error, gateway.Unreachable):
                self._context.deliver(GatewayGone(command.ref, tries, command.url, str(error)))
                return None
            problem = Failed(cast(FailureKind, error.kind), f"gateway: {error}")
        except TimeoutError:
            limit = self._config.rollout.deadline_s
            problem = Failed("timeout", f"producer {self._name!r}: the rollout was not over after {limit:g} s")
        except DataError as error:
            problem = Failed("data", f"producer {self._name!r}: {error}")
        except Failed as error:
            problem = error
        for each in tries:
            self._problem(command, each, problem)
        return None

    def _problem(self, command: Rollout, each: Try, problem: Failed) -> None:
        self._context.deliver(
            SampleProblem(command.ref, each.sample, each.attempt, problem.failure, str(problem)[:2000])
        )
        if self._calls.stuck >= STUCK and not self._reported:
            self._reported = True
            self._context.deliver(ThreadsStuck(self._calls.stuck, str(problem)[:2000]))

    async def _generate(
        self, command: Rollout, each: Try, deadline: Deadline, *, n: int = 1, turn: int = 1, **asked: Any
    ) -> gateway.Generated:
        """One request to the gateway."""
        return await self._client(command.url).generate(
            session=self._episode_name(command, each),
            n=n,
            sampling=self._seeded(command, each, turn),
            deadline_s=deadline.left(),
            **asked,
        )

    def _client(self, url: str) -> gateway.GatewayClient:
        if url not in self._clients:
            self._clients[url] = gateway.GatewayClient(url)
        return self._clients[url]

    def _episode_name(self, command: Rollout, each: Try) -> str:
        return f"{self._context.actor}.{self._context.boot}-{results.origin(command, each)}"

    def _seeded(self, command: Rollout, each: Try, turn: int | str) -> Sampling:
        """Random numbers are a function of run seed, task, sample, attempt and turn."""
        seed = results.seed(f"{command.task.seed}/{results.origin(command, each)}/{turn}")
        return msgspec.structs.replace(self._sampling, seed=seed)

    async def _call(self, name: str, work: Callable[[], T], deadline: Deadline) -> T:
        """One blocking call of the producer."""
        limit = min(self._config.rollout.score_deadline_s, deadline.left())
        try:
            return await self._calls.run(work, limit)
        except CallTimeout as error:
            raise Failed("timeout", f"producer {self._name!r}: {name} gave {error}") from error
        except DataError:
            raise
        except Exception as error:
            raise Failed("infra", f"producer {self._name!r}: {name} raised {_name(error)}: {error}") from error

    # --- results ---

    def _finish(self, command: Rollout, each: Try, transcript: Transcript, outcome: Outcome, started: float) -> None:
        """Check and encode the trajectory, and tell the core of it."""
        mask = outcome.mask
        if mask is None and self._masks(command, transcript):
            mask = f"overlong: cut off at rollout.max_new_tokens={self._sampling.max_new_tokens}"
        try:
            payload = results.encode(command, each, transcript, outcome, mask)
        except TrajectoryError as error:
            self._problem(command, each, Failed("data", str(error)))
            return
        self._handles += 1
        handle = f"{each.sample}.{each.attempt}.{self._handles}"
        self._held[handle] = (command.ref, payload)
        self._context.deliver(
            SampleDone(
                ref=command.ref,
                sample=each.sample,
                attempt=each.attempt,
                reward=outcome.reward,
                components=dict(outcome.components),
                mask_reason=mask,
                prompt_tokens=transcript.prompt_tokens,
                completion_tokens=transcript.completion_tokens,
                sources=transcript.sources(),
                stop_reason=transcript.stop_reason,
                handle=handle,
                size=len(payload),
                seconds=max(0.0, self._context.clock.now() - started),
            )
        )

    def _masks(self, command: Rollout, transcript: Transcript) -> bool:
        """Whether a sample that was cut off is kept out of training; held-out ones count as they are scored."""
        wanted = self._config.rollout.overlong == "mask" and command.task.split == "train"
        return wanted and transcript.stop_reason == "length"

    # --- cancellation ---

    def _cancel(self, ref: Ref) -> None:
        for task in self._running.get(ref, ()):
            task.cancel()
        for handle in [handle for handle, (owner, _) in self._held.items() if owner == ref]:
            del self._held[handle]

    async def _cancel_all(self) -> Cancelled:
        tasks = [task for running in self._running.values() for task in running]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)
        return Cancelled()


def _name(error: BaseException) -> str:
    return type(error).__name__


def build(config: RunConfig, actor: str) -> CollectorShell:
    return CollectorShell(config, actor)
