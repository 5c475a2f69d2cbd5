"""No wait of the actors or the pipeline is without a deadline, and a new one does not get in."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.unit.waits.walk import Found, coroutines, parse, unbounded

ROOT = Path(__file__).parents[3]


class Allowed(NamedTuple):
    """Waits of the functions `where` (a pattern of FILE:FUNCTION) that read like `what`, and what does bound them."""

    where: str
    what: str
    why: str


CALLER = "the caller's own patience: it hangs up, the handler is cancelled, and nothing else waits for it"
OURS = "an operation of ours, each of which has a deadline of its own (found in its own body)"
REPLY = "within _open, which bounds the whole call by its timeout"
SIDECAR = "the sidecar's HTTP client, whose every call has a timeout"
CHILD = "the caller's deadline: rollout.deadline_s, rollout.score_deadline_s, producer.task_deadline_s"
LINK = "Link.run, which gives every try a deadline and an outage an end"
KILLED = "the process was sent SIGKILL"
RANKS = "RankedPolicy, which ends every rank when its deadline is over"
RUN = "bounded by the run: work for ever to come is no fault, and the driver ends the process"

ALLOWED = (
    Allowed(r"actors/collector/actor.py:CollectorShell._rollout", r"asyncio.wait\(\{task\}\)", OURS),
    Allowed(r"actors/collector/actor.py:CollectorShell._settled", r"work", OURS),
    Allowed(r"actors/collector/calls.py:Calls._serve", r"self._jobs.get\(\)", "an idle thread; close() ends it"),
    Allowed(r"actors/engine/actor.py:EngineShell._watch", r"asyncio.wait\(watches", RUN),
    Allowed(r"actors/engine/operations.py:Operations.run", r"asyncio.wait\(\(task,\)\)", OURS),
    Allowed(r"actors/engine/client.py:(Reply.chunks|HttpEngineClient._call)", r".*(iter_any|read)\(\)", REPLY),
    Allowed(
        r"actors/engine/colocated.py:_(connect|say|filled)", r".*", "take bounds the whole transfer, see BY_CALLER"
    ),
    Allowed(r"actors/engine/guard.py:main", r"server.wait\(\)", RUN),
    Allowed(r"actors/engine/in_order.py:_next_answer", r"reader.*", "post bounds the whole of it, see REMOVED"),
    Allowed(r"actors/engine/proxy.py:_Reply.\w+", r"self._news.wait\(\)", "_run ends the reply at request_deadline_s"),
    Allowed(r"actors/engine/proxy.py:Proxy._generate", r"self._admit\(epoch\)", "COMMIT_S, after which it is refused"),
    Allowed(r"actors/engine/proxy.py:Proxy._generate", r"self._unswept.wait\(\)", "ABORT_DEADLINE_S, of the sweep"),
    Allowed(r"actors/engine/proxy.py:Proxy.end", r".*self._gathering.*", "twice ABORT_DEADLINE_S: turn, calls"),
    Allowed(r"actors/engine/proxy.py:Proxy._run", r"answer.read\(\)", "within forward(timeout)"),
    Allowed(r"actors/engine/proxy.py:Proxy.idle", r"self._idle.wait\(\)", "its callers, see BY_CALLER"),
    Allowed(r"actors/engine/server.py:Server.ended", r".*create_future\(\)", "one of _watch's, beside the probes"),
    Allowed(r"actors/engine/torch_server/app.py:Server.(_finish|_stream)", r"(ticket|running).*", SIDECAR),
    Allowed(r"actors/engine/torch_server/app.py:Server._call", r"asyncio.wrap_future\(future\)", SIDECAR),
    Allowed(r"actors/engine/torch_server/app.py:_errors", r"handler\(request\)", OURS),
    Allowed(r"actors/engine/torch_server/gate.py:Gate.enter", r"entry\[1\]", SIDECAR),
    Allowed(
        r"actors/engine/torch_server/groups.py:Groups._broadcast",
        r"(dist.broadcast|work.wait)\(.*",
        "the group was made with group_timeout_s, which gloo's waits obey and the loop before NCCL's does",
    ),
    Allowed(r"actors/engine/torch_server/scheduler.py:Scheduler._take", r"self._inbox.get\(\)", "an idle engine"),
    Allowed(r"actors/engine/torch_server/serve.py:serve", r"server.stopped.wait\(\)", RUN),
    Allowed(
        r"actors/engine/inside/receiver.py:Receiver._receive",
        r"(work|group._end_coalescing\(self._device\)).wait\(\)",
        "gloo has the timeout of the options; for NCCL it only orders streams",
    ),
    Allowed(r"actors/environments/child.py:(Child.\w+|main)", r".*", CHILD),
    Allowed(r"actors/environments/isolated.py:Link.(ask|_spawn|_exchange)", r".*", CHILD),
    Allowed(r"actors/environments/isolated.py:Link._read", r".*", "the child's pipe, which ends with the child"),
    Allowed(r"actors/environments/isolated.py:Link._turn.answer", r"done.result\(\)", "a callback of what is done"),
    Allowed(r"actors/environments/isolated.py:Link._kill", r"self._process.wait\(\)", KILLED),
    Allowed(r"actors/environments/nemo_gym/head.py:(Gym.run|_read)", r".*", "a rollout: rollout.deadline_s"),
    Allowed(r"actors/environments/nemo_gym/keeper.py:sweep", r"os.waitpid\(-1, os.WNOHANG\)", "asks, without waiting"),
    Allowed(r"actors/environments/nemo_gym/rows.py:Rows.read", r"lines.readline\(\)", "a file"),
    Allowed(r"actors/environments/nemo_gym/servers.py:Servers._watch", r"self._process.wait\(\)", RUN),
    Allowed(r"actors/environments/nemo_gym/servers.py:Servers._begin", r".*create_subprocess_exec.*", "no wait"),
    Allowed(r"actors/environments/nemo_gym/servers.py:Servers._end", r"process.wait\(\)", KILLED),
    Allowed(r"actors/gateway/routes.py:Routes.serve", r"handler\(request, episode\)", OURS),
    Allowed(r"actors/gateway/actor.py:GatewayShell.perform", r"asyncio.gather\(\*aborts\)", "ABORT_TIMEOUT_S each"),
    Allowed(
        r"actors/gateway/actor.py:(GatewayShell.(_follow|_post)|_read)",
        r".*",
        "a call ends when the core says AbortCall, whose deadline cuts it off; request deadlines are the core's wake",
    ),
    Allowed(r"actors/gateway/actor.py:GatewayShell._submit", r"entry.answer", "within overdue.after(limit_s)"),
    Allowed(r"actors/gateway/http.py:Server._answered", r"work", "request_deadline_s at most, and BACKSTOP_S more"),
    Allowed(r"actors/gateway/http.py:_rest", r"answer.result\(\)", "it is done"),
    Allowed(r"actors/refit/transports/collective.py:CollectiveSender.send", r"attempt.result\(\)", "it has ended"),
    Allowed(r"actors/refit/transports/gloo.py:GlooCommunicator.broadcast.wait", r"work.wait\(\)", "broadcast_options"),
    Allowed(r"actors/refit/transports/ipc.py:_Attempt._join", r"listener.accept\(\)", "settimeout() before it"),
    Allowed(r"actors/refit/transports/nccl.py:NcclCommunicator.broadcast.wait", r"work.wait\(\)", "it is completed"),
    Allowed(r"actors/source/actor.py:Reader._advance", r"anext\(self._tasks, None\)", CHILD),
    Allowed(r"actors/trainer/megatron/policy.py:MegatronPolicy.\w+", r"dist.(all_reduce|barrier)\(.*", RANKS),
    Allowed(r"actors/trainer/rank.py:main", r"todo.get\(\)", "an idle rank; the end of its trainer's pipe ends it"),
    Allowed(r"actors/trainer/ranks.py:RankedPolicy._together", r"own.result\(\)", "it is done"),
    Allowed(r"actors/trainer/ranks.py:_Rank.(end|_listen)", r"self.process.wait\(\)", KILLED),
    Allowed(r"actors/trainer/ranks.py:_Lead._work", r"self._todo.get\(\)", "an idle thread; stop() ends it"),
    Allowed(
        r"pipeline/broker/choose.py:choose", r".*probe\(url, config.start_deadline_s\).*", "broker.start_deadline_s"
    ),
    Allowed(r"pipeline/broker/embedded.py:Embedded.stop", r"self._(supervisor.wait|monitor.join)\(\)", KILLED),
    Allowed(r"pipeline/broker/embedded.py:Embedded._watch", r"self._supervisor.wait\(\)", "it closed its pipe"),
    Allowed(r"pipeline/broker/supervise.py:Supervisor._stop", r"server.wait\(\)", KILLED),
    Allowed(r"pipeline/bus/cluster.py:_Routed.\w+", r".*", LINK),
    Allowed(r"pipeline/bus/connection.py:(Lean|Pool).\w+", r".*", LINK),
    Allowed(r"pipeline/bus/link.py:Link.close", r".*aclose\(\)", "redis bounds it by socket_connect_timeout, 5 s"),
    Allowed(r"pipeline/bus/reading.py:Reader._sure.once", r"attempt\(\)", LINK),
    Allowed(r"pipeline/cluster.py:_wait", r"ref", RUN),
    Allowed(r"pipeline/cluster.py:_outcome", r"task.result\(\)", "it is done"),
    Allowed(r"pipeline/driver.py:Driver.run", r"asyncio.gather\(following.*", "it was cancelled"),
    Allowed(r"pipeline/forks.py:ForkServer.stop", r"self._process.wait\(\)", KILLED),
    Allowed(
        r"pipeline/forks.py:Server._answer", r"(listener.accept|file.readline)\(\)", "selected; settimeout(REQUEST_S)"
    ),
    Allowed(r"pipeline/forks.py:_reap", r"os.waitpid\(-1, os.WNOHANG\)", "asks, without waiting"),
    Allowed(r"pipeline/eventlog.py:_iterate.take", r"anext\(source, None\)", "who follows a log waits for it"),
    Allowed(r"pipeline/top/feed.py:Feed._follow", r"pages", "who watches a run waits for it"),
    Allowed(r"pipeline/runtime/loop.py:Runtime._work", r"self._wants.wait\(\)", RUN),
    Allowed(r"pipeline/runtime/loop.py:_set_within", r"event.wait\(\)", "its timer, set by core.wake or pace_s"),
    Allowed(
        r"pipeline/ui/_index.py:Index.(_containing|_block|drain)",
        r"(self._blocks\[\w+\]|block).result\(\)",
        "one block is compressed, on a thread of ours",
    ),
    Allowed(r"pipeline/ui/_ahead.py:ahead", r".*(create_subprocess_exec|connect_read_pipe).*", "no wait"),
    Allowed(r"pipeline/ui/_source.py:Source._receive", r"parts", "_parts, which gives every part PART_S"),
    Allowed(r"pipeline/ui/_server.py:_guard.guard", r"handler\(request\)", OURS),
    Allowed(r"pipeline/ui/(_server|command).py:(run.)?serve", r"(asyncio.Event\(\).wait\(\)|task)", "until Ctrl-C"),
    Allowed(r"actors/.*:.*", r"request.read\(\)", CALLER),
    Allowed(r"actors/.*:.*", r"response.(prepare|write|write_eof)\(.*", CALLER),
    Allowed(
        r"(actors|pipeline/ui)/.*:.*",
        r"(self._)?runner.(setup|cleanup)\(\)",
        "local; shutdown_timeout=1.0 for its handlers",
    ),
)


def allowed(found: Found) -> list[Allowed]:
    what = (
        found.what.removeprefix("await ").removeprefix("call ").removeprefix("async for ").removeprefix("async with ")
    )
    return [a for a in ALLOWED if re.fullmatch(a.where, found.where) and re.fullmatch(f"{a.what}.*", what, re.DOTALL)]


SOURCES = parse(ROOT, "actors", "contracts", "pipeline")
BY_CALLER = frozenset(("idle", "abort_running", "_connect", "_say", "_filled", "_next_answer"))
"""Coroutines that leave it to their callers to bound them: each such call is a wait."""
KNOWN = coroutines(SOURCES) - BY_CALLER


FOUND = {name: unbounded(name, tree, KNOWN) for name, tree in SOURCES}


def refused(found: list[Found]) -> list[Found]:
    return [each for each in found if not allowed(each)]


def test_every_wait_of_the_project_has_a_deadline() -> None:
    found = [f"{each.where}: {each.what}" for each in refused([each for found in FOUND.values() for each in found])]
    assert not found, "give it a deadline, or say in ALLOWED what bounds it:\n" + "\n".join(found)


def test_nothing_is_allowed_that_is_not_there() -> None:
    used = {allowance for found in FOUND.values() for each in found for allowance in allowed(each)}
    assert set(ALLOWED) - used == set()


WAITS = (
    "await event.wait()",
    "await queue.get()",
    "await task",
    "await asyncio.wait({task})",
    "await asyncio.gather(task)",
    "await asyncio.shield(task)",
    "await asyncio.wait_for(task, None)",
    "await reader.readexactly(4)",
    "await client.execute_command('PING')",
    "async for chunk in response.content.iter_any(): pass",
    "async with asyncio.timeout(None): await event.wait()",
    "async with session.get(url) as answer: pass",
    "async with session.post(url, timeout=aiohttp.ClientTimeout(total=None)) as answer: pass",
    "async with session.post(url, timeout=NEVER) as answer: pass",
    "async with session.get(url), asyncio.timeout(1.0): pass",
    "async with lock: await event.wait()",
    "thread.join()",
    "queue.get()",
    "work.wait()",
    "process.communicate()",
    "listener.accept()",
    "subprocess.run(command)",
    "ray.get(ref)",
    "dist.barrier()",
    "urllib.request.urlopen(url)",
    "futures.wait(jobs)",
)
BOUNDED = (
    "await asyncio.wait_for(event.wait(), 1.0)",
    "await asyncio.wait({task}, timeout=1.0)",
    "await asyncio.sleep(1.0)",
    "await asyncio.to_thread(work)",
    "await asyncio.gather(*(own(x) for x in y))",
    "async with asyncio.timeout(1.0): await event.wait()",
    "async with asyncio.timeout(1.0), session.get(url) as answer: await answer.read()",
    "async with session.get(url, timeout=aiohttp.ClientTimeout(total=1.0)) as answer: await answer.read()",
    "thread.join(1.0)",
    "queue.get(timeout=1.0)",
    "subprocess.run(command, timeout=1.0)",
    "', '.join(names)",
    "mapping.get(key)",
)


def planted(line: str) -> list[Found]:
    source = f"NEVER = aiohttp.ClientTimeout(total=None)\nasync def f():\n    {line}\n"
    return unbounded("m.py", ast.parse(source), frozenset(("own",)))


@pytest.mark.parametrize("line", WAITS)
def test_a_wait_without_a_deadline_is_found(line: str) -> None:
    assert len(planted(line)) == 1


@pytest.mark.parametrize("line", BOUNDED)
def test_a_wait_with_one_is_not(line: str) -> None:
    assert planted(line) == []


REMOVED = {
    "actors/engine/client.py": ("asyncio.timeout(timeout)", "contextlib.nullcontext()"),
    "actors/engine/operations.py": ("asyncio.timeout(self._left(command.deadline_at))", "self._turn"),
    "actors/engine/colocated.py": ("asyncio.timeout(timeout)", "contextlib.nullcontext()"),
    "actors/engine/in_order.py": ("asyncio.timeout(timeout)", "contextlib.nullcontext()"),
    "actors/gateway/client.py": ("total=deadline_s + MARGIN_S", "total=None"),
    "actors/refit/probes.py": ("asyncio.timeout(self._fleet.probe_deadline_s), ", ""),
    "actors/refit/transports/collective.py": ("attempt.ended.wait(timeout)", "attempt.ended.wait()"),
}
"""Deadlines of the project, and the same source without them."""


@pytest.mark.parametrize("name", REMOVED)
def test_a_deadline_that_is_taken_out_is_missed(name: str) -> None:
    before, after = REMOVED[name]
    source = (ROOT / name).read_text()
    assert before in source
    assert refused(unbounded(name, ast.parse(source.replace(before, after)), KNOWN))


def test_no_module_is_a_place_to_hide_a_wait() -> None:
    """A wait planted into any module is found, whatever is allowed there."""
    (plant,) = ast.parse("async def planted(forever):\n    await forever.wait()\n").body
    for name, _ in SOURCES:
        found = unbounded(name, ast.Module([plant], []), KNOWN)
        assert [each.where for each in refused(found)] == [f"{name}:planted"]
