"""Who runs next: which of the generations that wait get rows, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from actors.engine.torch_server.generation import Generation
from actors.engine.torch_server.kv import PrefixStore

Follower = tuple[Generation, Generation]
"""A generation, and the leader that computes the same prompt."""


class Admission(NamedTuple):
    """`limit` bounds rows x longest reach of what runs together, `chunk` the prompt tokens of one forward."""

    max_running: int
    limit: int
    chunk: int
    prefixes: PrefixStore

    def next(
        self, waiting: deque[Generation], rows: Sequence[Generation], epoch: int
    ) -> tuple[list[Generation], list[Follower]]:
        """Take out of `waiting` what fits beside `rows`: leaders compute their prompt, a follower copies its leader's.

        Leaders begin here, from the longest prefix that is stored; `epoch` is that of the weights. A prompt that is
        longer than a chunk comes last.
        """
        leaders: list[Generation] = []
        followers: list[Follower] = []
        by_prompt: dict[tuple[int, ...], Generation] = {}
        packed = widest = 0
        reach = max((g.reach for g in rows), default=0)
        while waiting:
            g, taken = waiting[0], len(rows) + len(leaders) + len(followers) + 1
            reach = max(reach, g.reach)
            if taken > self.max_running or taken * reach > self.limit:
                break
            key = tuple(g.tokens)
            leader = None if g.scores_prompt else by_prompt.get(key)
            if leader is not None:
                followers.append((waiting.popleft(), leader))
                continue
            shared, stored = self.prefixes.find(g.tokens[: g.shareable])
            fresh = len(g.tokens) - shared
            widest = max(widest, fresh)
            if leaders and (packed + fresh > self.chunk or (len(leaders) + 1) * widest > 2 * self.chunk):
                break
            packed += fresh
            g.begin(epoch, shared, stored)
            leaders.append(waiting.popleft())
            if fresh > self.chunk:
                break
            by_prompt[key] = g
        return leaders, followers
