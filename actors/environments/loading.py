"""From a recipe's `producer.name` and `producer.args` to a producer."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from inspect import Parameter, signature
from typing import Any, TypeGuard

from contracts.producer import CONTRACT_VERSION, GROUP, MultiTurn, Producer, SingleTurn


class ProducerError(ValueError):
    """No usable producer has this name or takes these arguments: says which, and what would work."""


class SettingError(ProducerError):
    """The producer is there, and what it was given in `producer.args` is wrong."""


def load(name: str, args: Mapping[str, Any]) -> Producer:
    """Construct the producer registered as `name` in entry-point group `sluice.producers`.

    Raises `ProducerError` for an unknown or ambiguous name, a class that can't be imported or constructed, a producer
    written for another contract version, and one that lacks the methods of both kinds of producer.
    """
    entry = _find(name)
    try:
        factory = entry.load()
    except (ImportError, AttributeError) as error:
        raise ProducerError(f"producer {name!r} ({entry.value}) can't be imported: {error}") from error
    _fit(name, factory, args)
    try:
        producer = factory(**args)
    except Exception as error:  # whatever a plug-in raises, its settings are what it was given
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise SettingError(f"producer {name!r} refuses producer.args={dict(args)!r}: {what}") from error
    _check(name, producer)
    return producer


def _fit(name: str, factory: Any, args: Mapping[str, Any]) -> None:
    """Raises `ProducerError` for a setting that the producer does not have, and one that it needs."""
    try:
        parameters = signature(factory).parameters.values()
    except (TypeError, ValueError):
        return
    named = {p.name: p for p in parameters if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)}
    takes = ", ".join(named) or "none"
    if not any(p.kind is Parameter.VAR_KEYWORD for p in parameters):
        for unknown in sorted(args.keys() - named.keys()):
            near = get_close_matches(unknown, named, 1)
            hint = f", did you mean {near[0]!r}?" if near else "."
            raise SettingError(f"producer {name!r} has no setting {unknown!r}{hint} It takes: {takes}")
    missing = [p.name for p in named.values() if p.default is Parameter.empty and p.name not in args]
    if missing:
        raise SettingError(f"producer {name!r} needs producer.args.{missing[0]}. It takes: {takes}")


def is_multi_turn(producer: Producer) -> TypeGuard[MultiTurn]:
    """Whether the producer drives its episodes itself; else it is prompted and scored once a sample."""
    return isinstance(producer, MultiTurn)


def _find(name: str) -> EntryPoint:
    registered = entry_points(group=GROUP)
    found = {entry.value: entry for entry in registered if entry.name == name}
    if not found:
        known = ", ".join(sorted({entry.name for entry in registered})) or "none"
        raise ProducerError(
            f"producer.name={name!r} is not registered under entry-point group {GROUP!r}; known: {known}. "
            "Install the distribution that provides it."
        )
    if len(found) > 1:
        raise ProducerError(f"producer.name={name!r} is registered more than once: {', '.join(sorted(found))}")
    return next(iter(found.values()))


def check_contract(name: str, contract: Any) -> None:
    """Raises `ProducerError` unless the producer was written for this version of the contract."""
    if contract != CONTRACT_VERSION:
        raise ProducerError(
            f"producer {name!r} states contract={contract!r}, this version speaks {CONTRACT_VERSION}; "
            f"set `contract = {CONTRACT_VERSION}` once it follows contracts.producer"
        )


def _check(name: str, producer: Any) -> None:
    check_contract(name, getattr(producer, "contract", None))
    if not isinstance(producer, SingleTurn | MultiTurn):
        raise ProducerError(
            f"producer {name!r} ({type(producer).__name__}) needs `tasks` and either `prompt` and `score` or `rollout`"
        )
