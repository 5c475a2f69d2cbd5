"""docker-compose.yml starts what `pipeline up` starts."""

from __future__ import annotations

from pathlib import Path

import yaml
from click.testing import CliRunner

from actors import registry
from config.loading import load
from pipeline.cli import main

COMPOSE = yaml.safe_load((Path(__file__).parents[3] / "docker-compose.yml").read_text())["services"]
DRIVER = [word.replace("${RECIPE:-quickstart}", "quickstart") for word in COMPOSE["driver"]["command"]]


def test_it_has_every_actor_of_its_recipe_on_the_drivers_run() -> None:
    recipe, *settings = DRIVER[2:]
    config = load(recipe, settings)
    assert DRIVER[:2] == ["pipeline", "up"]
    assert config.launch.mode == "external"
    actors = {name: service["command"] for name, service in COMPOSE.items() if name not in ("redis", "driver")}
    expected = {name: ["pipeline", "actor", name, "--run", str(config.run_dir)] for name in registry.names(config)}
    assert actors == expected


def test_its_actors_are_restarted_and_its_commands_exist() -> None:
    for name, service in COMPOSE.items():
        if name == "redis":
            assert "noeviction" in service["command"]
            continue
        assert service["restart"] == ("no" if name == "driver" else "on-failure")
        assert service["environment"]["REDIS_URL"] == "redis://redis:6379/0"
        answer = CliRunner().invoke(main, [service["command"][1], "--help"])
        assert answer.exit_code == 0, answer.output
