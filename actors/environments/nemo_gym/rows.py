"""Gym's datasets: one JSON object a line, in an order that a seed decides and a cursor resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from contracts.producer import DataError, Endpoint, Task

ROW_MIB = 8
"""Longest row that is taken."""


class Rows:
    """The rows of some JSONL files, addressed by number. Raises `ValueError` naming the file and what is wrong.

    Only where each row begins is kept in memory.
    """

    def __init__(self, files: Sequence[tuple[Path, str | None]]) -> None:
        """`files`: path, and the agent of rows in it that name none."""
        self._places: list[tuple[Path, int, int]] = []
        self._agents = dict(files)
        for file, _ in files:
            before = len(self._places)
            try:
                with file.open("rb") as lines:
                    start = 0
                    for number, line in enumerate(lines, 1):
                        if len(line) > ROW_MIB * 2**20:
                            raise ValueError(f"{file}:{number}: the row exceeds {ROW_MIB} MiB")
                        if line.strip():
                            self._places.append((file, number, start))
                        start += len(line)
            except OSError as error:
                raise ValueError(f"data: {file} can't be read: {error.strerror}") from error
            if len(self._places) == before:
                raise ValueError(f"data: {file} holds no row")

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> tuple[str, dict[str, Any]]:
        """The stable name and the content of a row. Raises `ValueError` naming file and line."""
        file, number, start = self._places[index]
        with file.open("rb") as lines:
            lines.seek(start)
            line = lines.readline()
        where = f"{file}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("responses_create_params"), dict):
            raise ValueError(f"{where}: a Gym row is an object with responses_create_params")
        agent = self._agents[file]
        if agent is not None and not row.get("agent_ref"):
            row["agent_ref"] = {"type": "responses_api_agents", "name": agent}
        return f"{file.stem}-{number}", row


def shuffled(rows: Rows, cursor: str | None, seed: int, split: str) -> Iterator[Task]:
    """Tasks for ever: every row once a pass, each pass in an order of its own. Raises `ValueError` for a bad cursor."""
    if cursor is not None and not cursor.isdigit():
        raise ValueError(f"cursor {cursor!r} is not one of nemo_gym's: a number of tasks is expected")
    position = int(cursor or 0)
    count = len(rows)
    while True:
        number, start = divmod(position, count)
        order = list(range(count))
        Random(f"{split}/{seed}/{number}").shuffle(order)
        for index in order[start:]:
            name, row = rows.read(index)
            position += 1
            yield Task(id=f"{split}-{number}-{name}-{index}", payload={"row": row}, cursor=str(position))


def held_out(name: str, every: int) -> bool:
    """Whether a row is kept for evaluation: one in `every`, by the hash of its name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) % every == 0


def agent_of(row: dict[str, Any], default: str | None) -> str:
    """The agent that plays a row. Raises `DataError` if neither the row nor the recipe names one."""
    ref = row.get("agent_ref")
    name = ref.get("name") if isinstance(ref, dict) else None
    if isinstance(name, str):
        return name
    if default is None:
        raise DataError("the row has no agent_ref, and neither its entry in producer.args.data nor agent names one")
    return default


def request(task: Task, agent: str, endpoint: Endpoint) -> dict[str, Any]:
    """Body of the agent's /run: the row, with the run's sampling and the episode that its turns belong to.

    What a row says of temperature and top_p does not count: all tokens are sampled as the trainer expects.
    """
    row = json.loads(json.dumps(task.payload["row"]))
    params = row["responses_create_params"]
    for name in ("top_p", "model"):
        params.pop(name, None)
    asked = params.get("max_output_tokens")
    params["temperature"] = endpoint.temperature
    params["max_output_tokens"] = min(asked or endpoint.max_new_tokens, endpoint.max_new_tokens)
    metadata = dict(params.get("metadata") or {})
    extra = json.loads(metadata.get("extra_body") or "{}")
    # Values of metadata must be strings; Gym's model server puts those of extra_body into its request.
    metadata["extra_body"] = json.dumps({**extra, "session": endpoint.session})
    params["metadata"] = metadata
    index = int.from_bytes(hashlib.blake2b(task.id.encode(), digest_size=4).digest()) >> 1
    row["agent_ref"] = {"type": "responses_api_agents", **(row.get("agent_ref") or {}), "name": agent}
    row["_ng_task_index"], row["_ng_rollout_index"] = index, endpoint.sample
    return row
