"""One chat turn of an agent: from its messages to exact ids, through the engines, back to a message with its tokens."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from actors.gateway.client import DataProblem, DeadlineProblem, Generated, Problem, Sample, SamplingForm
from actors.gateway.episodes import Episodes, Held
from actors.gateway.parsing import Parsed
from actors.gateway.serving import Live, Serving
from actors.gateway.sessions import Plan, canonical
from actors.gateway.upstream import Job, seed_of


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent asks for, whatever API it speaks. None leaves a parameter to the episode."""

    messages: Sequence[Mapping[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template: dict[str, Any] | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    n: int = 1
    session: str | None = None
    deadline_s: float | None = None


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The answers to one ask, with the ids they were sampled behind."""

    prompt_ids: list[int]
    samples: list[Sample]
    answers: list[Parsed]
    held_s: float
    turn: int | None
    asked: Ask


class Chat:
    """Answers asks, those of `episodes` and others."""

    def __init__(self, serving: Serving, episodes: Episodes) -> None:
        self._tokens = serving.tokens
        self._answers = serving.answers
        self._context = serving.context
        self._config = serving.config
        self._clock = serving.clock
        self._submit = serving.submit
        self._episodes = episodes
        self._anonymous = itertools.count(1)

    async def answer(self, ask: Ask, arrived_at: float, live: Live | None = None) -> Served:
        """Sample the next assistant message, which `live` can follow. Raises a `Problem`."""
        if ask.session is None:
            return await self._free(ask, arrived_at, live)
        held = self._episodes.get(ask.session)
        task = asyncio.current_task()
        assert task is not None
        held.requests.add(task)
        try:
            async with held.turn:
                return await self._turn(ask, held, arrived_at, live)
        except Problem as problem:
            held.episode.failed(problem.kind, str(problem))
            raise
        finally:
            held.requests.discard(task)

    async def _free(self, ask: Ask, arrived_at: float, live: Live | None) -> Served:
        """A turn of no episode: exact as far as the messages carry their ids."""
        plan = carried(ask.messages)
        self._tokens.check("ids carried by messages", plan.prefix)
        prompt = await self._prompt(ask, plan)
        sampling = SamplingForm(
            temperature=1.0 if ask.temperature is None else ask.temperature,
            max_new_tokens=ask.max_tokens or self._context,
            seed=ask.seed,
        )
        deadline_at = self.deadline(ask, arrived_at)
        job = self.job(f"anonymous-{next(self._anonymous)}", prompt, sampling, ask.n, deadline_at)
        generated = await self._sampled(job, ask, live)
        return await self._served(ask, generated, None)

    async def _turn(self, ask: Ask, held: Held, arrived_at: float, live: Live | None) -> Served:
        if ask.n != 1:
            raise DataProblem(f"n={ask.n}: a turn of an episode has one answer")
        sampling = held.sampling
        if ask.temperature is not None and abs(ask.temperature - sampling.temperature) > 1e-6:
            raise DataProblem(
                f"temperature={ask.temperature:g}: this episode samples at rollout.temperature="
                f"{sampling.temperature:g}, which the trainer counts on; leave it out"
            )
        episode = held.episode
        ask = msgspec.structs.replace(ask, messages=episode.restored(ask.messages))
        plan = episode.plan(ask.messages, ask.tools)
        prompt = await self._prompt(ask, plan)
        turn = episode.served + 1
        sampling = SamplingForm(
            temperature=sampling.temperature,
            max_new_tokens=min(sampling.max_new_tokens, ask.max_tokens or sampling.max_new_tokens),
            seed=None if sampling.seed is None else seed_of(sampling.seed, 0, turn),
        )
        deadline_at = min(held.deadline_at, self.deadline(ask, arrived_at))
        assert ask.session is not None
        generated = await self._sampled(self.job(ask.session, prompt, sampling, 1, deadline_at), ask, live)
        served = await self._served(ask, generated, turn)
        episode.add(plan, ask.messages, ask.tools, prompt, served.samples[0], served.answers[0])
        return served

    async def _sampled(self, job: Job, ask: Ask, live: Live | None) -> Generated:
        if live is not None:
            live.follow = partial(self._answers.follow, await self._answers.begun(job.prompt_ids), ask.tools)
        return await self._submit(job, live)

    async def _prompt(self, ask: Ask, plan: Plan) -> list[int]:
        """The ids of a conversation, by plan."""
        if plan.repeat:
            return list(plan.prefix)
        return await self._tokens.chat_ids(ask.messages, plan.prefix, plan.carried, ask.tools, ask.template)

    def job(self, session: str, prompt: list[int], sampling: SamplingForm, n: int, deadline_at: float) -> Job:
        """A valid job, its answer bounded by the context. Raises `DataProblem` or `DeadlineProblem`."""
        if not prompt:
            raise DataProblem("the prompt has no token")
        room = self._context - len(prompt)
        if room < 1:
            # Agents recognise the words "maximum context length".
            raise DataProblem(
                f"the prompt has {len(prompt)} tokens, a context of {self._context} leaves no room: this model's "
                f"maximum context length is {self._context} tokens"
            )
        if self._clock.now() >= deadline_at:
            raise DeadlineProblem("the deadline passed before the prompt was tokenised")
        return Job(
            session=session,
            prompt_ids=prompt,
            n=n,
            temperature=sampling.temperature,
            max_new_tokens=min(sampling.max_new_tokens, room),
            seed=sampling.seed,
            eos=self._tokens.eos,
            deadline_at=deadline_at,
        )

    def deadline(self, ask: Ask, arrived_at: float) -> float:
        """When an ask that arrived then must have its answer."""
        limit = self._config.request_deadline_s
        return arrived_at + min(ask.deadline_s or limit, limit)

    async def _served(self, ask: Ask, generated: Generated, turn: int | None) -> Served:
        begun = await self._answers.begun(generated.prompt_ids)
        answers = [await self._answers.parsed(begun, sample, ask.tools) for sample in generated.samples]
        return Served(
            prompt_ids=generated.prompt_ids,
            samples=generated.samples,
            answers=answers,
            held_s=generated.held_s,
            turn=turn,
            asked=ask,
        )


def carried(messages: Sequence[Mapping[str, Any]]) -> Plan:
    """The prefix that messages carry themselves: the ids on the newest assistant message that has its own.

    Some agents copy the ids of one message to a later one, so ids that an earlier message has already don't count.
    """
    found, seen = Plan(), []
    for index, message in enumerate(messages):
        ids = (message.get("prompt_token_ids"), message.get("generation_token_ids"))
        if message.get("role") != "assistant" or not all(_are_ids(part) for part in ids) or ids in seen:
            continue
        seen.append(ids)
        found = Plan([*(ids[0] or ()), *(ids[1] or ())], index + 1)
    if found.carried == len(messages):
        raise DataProblem("the last message is the assistant's own: a user's or a tool's is due")
    for message in messages:
        canonical(message)
    return found


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)
