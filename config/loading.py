"""From a recipe and `key=value` overrides to a checked `RunConfig`.

Layers, later ones winning: the schema's defaults, the recipe that `extends` names (and what that one extends), the
recipe, the overrides. Mappings are merged key by key, lists are replaced; a layer that names another model.source or
producer.name starts with empty model.params or producer.args, which were meant for the former one. Interpolations such
as `${oc.env:HOME}` are resolved. Every problem found is reported at once, each as one sentence that names the key and
the fix.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config import checks, rules
from config.schema import RunConfig

RECIPES = Path(__file__).parent / "recipes"
"""The shipped recipes."""

CHOICES = {"model.source": "model.params", "producer.name": "producer.args"}
"""What is chosen by name -> the free-form settings that belong to the choice."""

_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class ConfigError(ValueError):
    """The configuration can't be used. `problems` holds one sentence each."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class Recipe(msgspec.Struct, frozen=True):
    """A shipped recipe."""

    name: str
    description: str
    path: Path


def recipes() -> list[Recipe]:
    """The shipped recipes, by name."""
    found = []
    for path in sorted(RECIPES.glob("*.yaml")):
        data = _read(path)
        found.append(Recipe(path.stem, str(data.get("description", "")), path))
    return found


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of `recipe`: a shipped name, or the path of a YAML file.

    Raises `ConfigError`: unknown recipe, unreadable YAML, malformed override, unknown key, value of another type or out
    of bounds, and settings that contradict each other.
    """
    path = find(recipe)
    changes = _parse(overrides)
    merged = _resolve(_merge(OmegaConf.merge({"name": path.stem}, _layers(path)), changes), path)
    _imply(merged, changes)
    return build(merged)


def build(data: Mapping[str, Any]) -> RunConfig:
    """Check plain data against the schema, whole. Raises `ConfigError`."""
    problems = checks.against_schema(data)
    if problems:
        raise ConfigError(*problems)
    config = msgspec.convert(data, RunConfig)
    problems = rules.across_fields(config)
    if problems:
        raise ConfigError(*problems)
    return config


def find(recipe: str | Path) -> Path:
    """The file of a recipe given by shipped name or by path. Raises `ConfigError` naming the shipped ones."""
    text = str(recipe)
    if isinstance(recipe, Path) or "/" in text or text.endswith((".yaml", ".yml")):
        if not Path(recipe).is_file():
            raise ConfigError(f"recipe {text!r}: no such file")
        return Path(recipe)
    path = RECIPES / f"{text}.yaml"
    if path.is_file():
        return path
    names = sorted(p.stem for p in RECIPES.glob("*.yaml"))
    near = get_close_matches(text, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise ConfigError(f"no recipe {text!r}{hint} Shipped are {', '.join(names)}; or give the path of a YAML file")


def dump(config: RunConfig) -> str:
    """YAML that `load` reads back to an equal configuration."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False)


def digest(config: RunConfig) -> str:
    """SHA-256 over the configuration's canonical JSON: equal digests mean equal settings."""
    return hashlib.sha256(msgspec.json.encode(config, order="sorted")).hexdigest()


# --- layers ----------------------------------------------------------------------------------------------------------


def _layers(path: Path, seen: tuple[Path, ...] = ()) -> DictConfig:
    if path.resolve() in seen:
        chain = " -> ".join(p.stem for p in (*seen, path))
        raise ConfigError(f"recipes extend each other in a circle: {chain}")
    data = _read(path)
    parent = data.pop("extends", None)
    own = OmegaConf.create(data)
    if parent is None:
        return own
    if not isinstance(parent, str):
        raise ConfigError(f"{path}: extends={parent!r}, expected the name or the path of one recipe")
    nearby = path.parent / parent
    base = _layers(nearby if nearby.is_file() else find(parent), (*seen, path.resolve()))
    return _merge(base, own)


def _merge(base: Any, layer: DictConfig) -> DictConfig:
    for choice, belongings in CHOICES.items():
        chosen = OmegaConf.select(layer, choice)
        if chosen is not None and chosen != OmegaConf.select(base, choice) and OmegaConf.select(base, belongings):
            OmegaConf.update(base, belongings, {}, merge=False)
    return _merged(base, layer)


def _merged(base: Any, layer: DictConfig) -> DictConfig:
    """Raises `ConfigError` where one is a list and the other keys and values."""
    try:
        merged = OmegaConf.merge(base, layer)
    except TypeError as error:
        key = _clash(OmegaConf.to_container(base), OmegaConf.to_container(layer))
        value = OmegaConf.select(layer, key)
        raise ConfigError(f"{key}={value}: a list and keys with values can't be merged: give one of them") from error
    assert isinstance(merged, DictConfig)
    return merged


def _clash(base: Any, layer: Any) -> str:
    """Where a list meets a mapping."""
    for key, value in layer.items():
        before = base.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := _clash(before, value):
                return f"{key}.{inner}"
        elif {type(value), type(before)} == {dict, list}:
            return str(key)
    return ""


def _read(path: Path) -> dict[str, Any]:
    try:
        data = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a list, expected keys and values such as `steps: 100`")
    if problems := checks.unmergeable(data):
        raise ConfigError(*(f"{path}: {problem}" for problem in problems))
    return {str(key): value for key, value in data.items()}


def _resolve(merged: Any, path: Path) -> dict[str, Any]:
    try:
        data = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        said = str(error).partition("\n")[0].removeprefix("KeyError raised while resolving interpolation: ")
        where = f"{error.full_key} in {path} or on the command line" if error.full_key else str(path)
        raise ConfigError(f"{where}: {said.strip(chr(34))}") from error
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


# --- overrides -------------------------------------------------------------------------------------------------------


def _parse(overrides: Sequence[str]) -> DictConfig:
    problems = []
    parsed = OmegaConf.create()
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not _KEY.fullmatch(key):
            problems.append(f"override {text!r}: expected key=value, such as steps=200 or trainer.lr=1e-5")
            continue
        try:
            one = _one(key, value)
            if wrong := checks.unmergeable(OmegaConf.to_container(one)):
                problems += wrong
                continue
            parsed = _merged(parsed, one)
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            problems.append(f"override {text!r}: the value is no YAML: {' '.join(str(error).split())}")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return parsed


def _one(key: str, value: str) -> DictConfig:
    """One override as a nested mapping; a setting that holds text takes the value as it was typed."""
    if checks.is_text(key) and value not in ("", "null"):
        nested: Any = value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        return OmegaConf.create(nested)
    return OmegaConf.from_dotlist([f"{key}={value}"])


def _imply(data: dict[str, Any], changes: DictConfig) -> None:
    """Settings that follow from others: `sync` from staleness 0, the number of external engines from their URLs."""
    if data.get("sync") is True:
        asked = OmegaConf.select(changes, "buffer.max_staleness")
        if asked not in (None, 0) and OmegaConf.select(changes, "sync") is True:
            raise ConfigError(f"sync=true means buffer.max_staleness=0, but {asked} was asked for: leave one out")
        section = data.setdefault("buffer", {})
        if isinstance(section, dict):
            section["max_staleness"] = 0
    engine = data.get("engine")
    if isinstance(engine, dict) and engine.get("kind") == "external" and isinstance(engine.get("urls"), list):
        engine.setdefault("count", len(engine["urls"]))
