"""`contracts.producer.MultiTurn` over a NeMo-Gym: its datasets are the tasks, its agents play the rollouts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from actors.environments.nemo_gym.head import Gym, GymError
from actors.environments.nemo_gym.rows import Rows, agent_of, held_out, request, shuffled
from actors.environments.nemo_gym.servers import Launch, Servers, package_file
from contracts.producer import CONTRACT_VERSION, DataError, Outcome, Place, Session, Task

PYTHON = ".venv-gym/bin/python"
"""Where `make gym` puts NeMo-Gym."""


class NemoGym:
    """Drives a NeMo-Gym over HTTP, one that runs already at `head`, or one that it starts itself (`start`).

    `data` are JSONL files of Gym's, paths of this machine or of the installation below `python`. Rows name their agent
    (`agent_ref`), or their file does (`{path: ..., agent: ...}`), or `agent`. `eval_data` are the rows for evaluation;
    without it `held_out_every=k` keeps one row in k for that.

    With `start`, `config_paths` and `overrides` go to `ng_run` as they are, `python` is the interpreter of Gym's own
    environment, and the gateway needs a fixed port, since Gym's model server is told it at its start. The config paths
    must include a model server that speaks chat completions; `responses_api_models/vllm_model/configs/
    vllm_model_for_training.yaml` is meant for that.
    """

    contract = CONTRACT_VERSION

    def __init__(
        self,
        data: Sequence[str | Mapping[str, str]],
        *,
        agent: str | None = None,
        eval_data: Sequence[str | Mapping[str, str]] = (),
        held_out_every: int | None = None,
        head: str | None = None,
        start: bool = False,
        config_paths: Sequence[str] = (),
        overrides: Sequence[str] = (),
        python: str = PYTHON,
        start_deadline_s: float = 300.0,
        head_port: int = 0,
    ) -> None:
        if start == (head is not None):
            raise ValueError("either head=URL of a running Gym, or start=true to start one")
        if start and not config_paths:
            raise ValueError("start=true needs config_paths, as ng_run takes them")
        if held_out_every is not None and held_out_every < 2:
            raise ValueError(f"held_out_every={held_out_every} leaves nothing to train on; 2 or more is expected")
        self._python = Path(python).absolute()
        self._agent = agent
        self._rows = Rows(self._files(data, "data"))
        self._eval_rows = Rows(self._files(eval_data, "eval_data")) if eval_data else None
        self._held_out_every = held_out_every if self._eval_rows is None else None
        self._start = start
        self._config_paths = tuple(config_paths)
        self._overrides = tuple(overrides)
        self._deadline_s = start_deadline_s
        self._head_port = head_port
        self._servers: Servers | None = None
        self._gym = Gym(head) if head is not None else None

    async def start(self, place: Place) -> None:
        """Start Gym if this is the collector to do so, and find its agents. Raises `GymError` or `ValueError`."""
        if not self._start:
            assert self._gym is not None
            await self._gym.agents()
            return
        if place.collectors > 1:
            raise ValueError(
                f"launch.collectors={place.collectors} and start=true: several collectors need one Gym that runs; "
                "start it with ng_run and give its head"
            )
        if place.gateway_url is None:
            raise ValueError("start=true: Gym's model server needs a fixed address of the gateway; set gateway.port")
        self._servers = Servers(
            Launch(
                python=self._python,
                config_paths=self._config_paths,
                overrides=self._overrides,
                policy_url=f"{place.gateway_url}/v1",
                run_dir=Path(place.run_dir),
                deadline_s=self._deadline_s,
                head_port=self._head_port,
            )
        )
        self._gym = self._servers.gym
        await self._servers.start()

    async def close(self) -> None:
        if self._servers is not None:
            await self._servers.close()
        elif self._gym is not None:
            await self._gym.close()

    async def tasks(self, cursor: str | None, seed: int, split: str) -> AsyncIterator[Task]:
        """Rows for ever, shuffled anew each pass. Raises `ValueError` for a bad row or cursor."""
        evaluates = split == "eval"
        if evaluates and self._eval_rows is None and self._held_out_every is None:
            raise ValueError("evaluation needs eval_data, or held_out_every to keep some rows of data for it")
        rows = self._eval_rows if evaluates and self._eval_rows is not None else self._rows
        every = self._held_out_every
        for task in shuffled(rows, cursor, seed, split):
            if every is None or held_out(task.id.rsplit("-", 1)[1], every) == evaluates:
                yield task

    async def rollout(self, task: Task, session: Session) -> Outcome:
        """One rollout by the row's agent, through the session's endpoint. Raises `GymError` or `DataError`."""
        if not isinstance(task.payload.get("row"), dict):
            raise DataError(f"task {task.id} holds no row of Gym's")
        agent = agent_of(task.payload["row"], self._agent)
        endpoint = await session.endpoint()
        if self._servers is not None:
            await self._servers.ready(endpoint.deadline_s)
        if self._gym is None:
            raise GymError("the producer was not started")
        return await self._gym.run(agent, request(task, agent, endpoint))

    def _files(self, entries: Sequence[str | Mapping[str, str]], field: str) -> list[tuple[Path, str | None]]:
        if isinstance(entries, str) or not entries:
            raise ValueError(f"{field}={entries!r}: a list of JSONL files is due")
        found = []
        for entry in entries:
            if not isinstance(entry, str) and entry.keys() - {"agent"} != {"path"}:
                raise ValueError(f"{field}: {entry!r} is neither a file nor {{path: FILE, agent: NAME}}")
            name, agent = (entry, None) if isinstance(entry, str) else (entry["path"], entry.get("agent"))
            path = Path(name).expanduser()
            inside = None if path.is_file() else package_file(self._python, name)
            if inside is None and not path.is_file():
                raise ValueError(f"{field}: {name} is neither a file here nor one of NeMo-Gym below {self._python}")
            found.append((inside or path, agent))
        return found
