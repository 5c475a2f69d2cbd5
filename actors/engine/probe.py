"""What refit.verify=probe asks a server that has loaded: to continue a fixed prompt greedily."""

from __future__ import annotations

import math

from actors.engine.client import CallError, HttpEngineClient

IDS, TOKENS = [1, 2, 3, 4], 4
"""The prompt, within any vocabulary, and how many tokens it is continued by."""
FLUSH_S = 1.0
"""How long the flush waits for the server to be idle."""


async def logprobs(client: HttpEngineClient, rid: str, timeout: float) -> tuple[float, ...]:
    """Of the continuation, which leaves no trace in the cache; nothing else may be admitted meanwhile.

    Raises `CallError` when the server does not answer with finite log-probabilities, or holds requests afterwards.
    """
    body = {
        "input_ids": IDS,
        "rid": rid,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True},
        "return_logprob": True,
        "stream": False,
    }
    answer = await client.generate(body, timeout)
    try:
        values = [float(entry[0]) for entry in answer["meta_info"]["output_token_logprobs"]]
    except (KeyError, TypeError, IndexError) as error:
        raise CallError("/generate", 200, f"the probe was not answered with log-probabilities: {error!r}") from error
    if not all(math.isfinite(value) for value in values):
        raise CallError("/generate", 200, f"the probe was answered with log-probabilities {values}")
    if not await client.flush(FLUSH_S):
        raise CallError("/flush_cache", 400, "requests are held after the probe")
    return tuple(values)
