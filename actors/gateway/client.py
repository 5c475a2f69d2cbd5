"""How to call the gateway: the forms that cross the wire, the errors by kind, and a client.

The client imports no tokenizer: any process may use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import aiohttp
import msgspec

from actors.gateway.parsing import Flaw, Parsed
from config.schema import Noncontiguous
from contracts.trajectory import Sampling

T = TypeVar("T")

PROMPT_S = 10.0
"""Longest wait for an answer that needs no engine."""
MARGIN_S = 5.0
"""What the client waits beyond a request's deadline for the gateway's own answer."""


class SamplingForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are sampled."""

    temperature: Annotated[float, msgspec.Meta(ge=0)]
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)]
    seed: int | None = None


class Span(msgspec.Struct, frozen=True):
    """Tokens [start, end) of `output_ids`: the committed version, engine and boot that sampled them."""

    start: int
    end: int
    version: int
    engine: str
    boot: int


class Sample(msgspec.Struct, frozen=True):
    """One completion. `logprobs`: natural log of each output token's probability, finite and <= 0. `spans` tile it.

    `output_ids` include the end token, `text` leaves special tokens out. `finish_reason`: `stop` or `length`.
    `parsed`: the answer taken apart, if that was asked for. `written`: the text with the special tokens in it, but for
    the one that ends it; None without any.
    """

    output_ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    finish_reason: str
    text: str
    parsed: Parsed | None = None
    written: str | None = None


class Generated(msgspec.Struct, frozen=True):
    """The answer to one request: the exact prompt, its samples in order, and the seconds it was held by refits."""

    prompt_ids: list[int]
    samples: list[Sample]
    held_s: float


class Divergence(msgspec.Struct, frozen=True):
    """Where a turn left its episode: turn (from 1), message and character of the conversation, token of the episode."""

    turn: int
    message: int
    character: int
    token: int
    what: str


class Problem(Exception):
    """The gateway refused or failed a request. Subclasses say what kind it was."""

    kind: ClassVar[str]
    status: ClassVar[int]


class DataProblem(Problem):
    """The request itself is wrong: sending it again won't help."""

    kind, status = "data", 400


class NoncontiguousProblem(DataProblem):
    """The conversation says something else than the episode that it should continue."""

    kind = "noncontiguous"


class InfraProblem(Problem):
    """Engines or the gateway failed: worth another try."""

    kind, status = "infra", 503


class Unreachable(InfraProblem):
    """Nobody answers at the gateway's address."""


class DeadlineProblem(Problem):
    """The request's deadline passed."""

    kind, status = "timeout", 504


PROBLEMS: Mapping[str, type[Problem]] = {
    problem.kind: problem for problem in (DataProblem, NoncontiguousProblem, InfraProblem, DeadlineProblem)
}


class ErrorBody(msgspec.Struct, frozen=True):
    type: str
    message: str


class ErrorReply(msgspec.Struct, frozen=True):
    """Body of every answer but 200."""

    error: ErrorBody


class Recorded(msgspec.Struct, frozen=True):
    """One turn: `fresh_ids` follow what its sequence holds so far, then comes the sample. `flaws`: see `parsing`."""

    sequence: int
    fresh_ids: list[int]
    sample: Sample
    flaws: list[Flaw] = []


class Record(msgspec.Struct, frozen=True):
    """Everything that one episode said, exact to the id.

    `served` turns were answered, of which `superseded` were asked again. `failure`: the last request got no answer.
    """

    turns: list[Recorded]
    served: int
    superseded: int
    diverged: Divergence | None = None
    failure: ErrorBody | None = None


class OpenForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /episodes/NAME: whoever speaks as NAME samples so, until `deadline_s` from now."""

    sampling: SamplingForm
    deadline_s: Annotated[float, msgspec.Meta(gt=0)]
    noncontiguous: Noncontiguous = "error"


_generated = msgspec.json.Decoder(Generated)
_record = msgspec.json.Decoder(Record)
_error = msgspec.json.Decoder(ErrorReply)


class GatewayClient:
    """Calls the gateway at `url` (from `gateway.ready`; set it anew when a restarted gateway announces itself)."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._session: aiohttp.ClientSession | None = None

    async def generate(
        self,
        *,
        session: str,
        sampling: Sampling,
        deadline_s: float,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        input_ids: Sequence[int] | None = None,
        prefix_ids: Sequence[int] = (),
        carried: int = 0,
        tools: Sequence[Mapping[str, Any]] | None = None,
        parse: bool = False,
        n: int = 1,
    ) -> Generated:
        """Sample `n` completions of one prompt, given as text, chat messages or token ids.

        `session` names the episode: its turns go to one engine where possible. `prefix_ids` are the exact ids that the
        episode carries already. `prompt` and `input_ids` are what follows them; `messages` is the whole conversation,
        of which the first `carried` are in `prefix_ids`. With `parse`, messages or
        tools, samples come taken apart (`parsed`). Raises `DataProblem`, `InfraProblem` or `DeadlineProblem`.
        """
        body: dict[str, Any] = {"session": session, "n": n, "deadline_s": deadline_s, "sampling": _sampling(sampling)}
        given = {"prompt": prompt, "messages": messages, "input_ids": input_ids, "prefix_ids": prefix_ids or None}
        given |= {"tools": tools, "carried": carried or None, "parse": parse or None}
        body |= {name: value for name, value in given.items() if value is not None}
        return await self._ask("/generate", body, deadline_s, _generated)

    async def open(self, name: str, sampling: Sampling, deadline_s: float, noncontiguous: Noncontiguous) -> str:
        """Begin episode `name` for an agent that speaks OpenAI's API; answers the base URL to give it.

        Raises as `generate` does.
        """
        form = OpenForm(SamplingForm(**_sampling(sampling)), deadline_s, noncontiguous)
        await self._ask(f"/episodes/{name}", form, PROMPT_S, msgspec.json.Decoder(dict))
        return f"{self.url}/episodes/{name}/v1"

    async def finish(self, name: str) -> Record:
        """End an episode, whatever still runs for it, and answer its record. Raises `InfraProblem` if it is unknown."""
        return await self._ask(f"/episodes/{name}/finish", {}, PROMPT_S, _record)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask(self, path: str, body: Any, deadline_s: float, answers: msgspec.json.Decoder[T]) -> T:
        status, data = await self._post(path, msgspec.json.encode(body), deadline_s)
        try:
            if status == 200:
                return answers.decode(data)
            error = _error.decode(data).error
        except msgspec.DecodeError as malformed:
            raise InfraProblem(f"{self.url} answered {status} with {data[:200]!r}: {malformed}") from malformed
        raise PROBLEMS.get(error.type, InfraProblem)(error.message)

    async def _post(self, path: str, data: bytes, deadline_s: float) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        timeout = aiohttp.ClientTimeout(total=deadline_s + MARGIN_S)
        headers = {"content-type": "application/json"}
        try:
            async with self._session.post(f"{self.url}{path}", data=data, headers=headers, timeout=timeout) as response:
                return response.status, await response.read()
        except TimeoutError as error:
            raise DeadlineProblem(f"{self.url} did not answer within {deadline_s + MARGIN_S:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{self.url} can't be reached: {type(error).__name__}: {error}") from error


def _sampling(sampling: Sampling) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(sampling).items() if value is not None}
