"""From a recipe's `producer.name` and `producer.args` to a producer."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeGuard

from contracts.producer import CONTRACT_VERSION, GROUP, MultiTurn, Producer, SingleTurn


class ProducerError(ValueError):
    """No usable producer has this name or takes these arguments: says which, and what would work."""


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
    try:
        producer = factory(**args)
    except (TypeError, ValueError, AssertionError) as error:
        raise ProducerError(
            f"producer {name!r} refuses producer.args={dict(args)!r}: {type(error).__name__}: {error}"
        ) from error
    _check(name, producer)
    return producer


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
