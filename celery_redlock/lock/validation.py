"""Checks of settings and arguments; each raises a SettingsError with a hint.

`tasks/settings` uses the same checks, so settings and arguments are rejected alike.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from celery_redlock.errors import SettingsError
from celery_redlock.lock.engine.acquirer import ROUNDS_IN_TTL
from celery_redlock.lock.model.keys import in_order
from celery_redlock.lock.model.rate import MAX_PERIOD, MAX_STARTS, MIN_PERIOD, Rate
from celery_redlock.lock.transport.address import parse_address
from celery_redlock.lock.transport.command import encoded
from celery_redlock.lock.transport.credentials import redact_url

RESTART_GUARDS = ("auto", "strict", "off")
MAX_SECONDS = 366 * 86_400.0  # seconds; no clock, timer or node counts wrong up to there
MAX_PERMITS = 1000  # of a lock or a rate: a try may look at all of them
MAX_NAME_BYTES = 1024  # of a resource's name, which is in keys, channels, errors and log lines


def is_number(value: object) -> bool:
    """Return whether a value is a finite number; a bool is not, nor an int beyond all floats."""
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def is_too_long(resource: str) -> bool:
    return len(resource) > MAX_NAME_BYTES // 4 and len(encoded(resource)) > MAX_NAME_BYTES


def check_seconds(level: str, name: str, value: object, *, above: float = 0.0) -> float:
    """Return a number of seconds above a bound; raises SettingsError for anything else."""
    if not is_number(value) or not above < value <= MAX_SECONDS:  # type: ignore[operator]
        hint = f"must be a number of seconds above {above:g}, at most {MAX_SECONDS:.0f}"
        raise SettingsError(level, name, repr(value), hint)
    return float(value)  # type: ignore[arg-type]


def check_ttl(level: str, name: str, ttl: object, node_timeout: float, max_ttl: float) -> float:
    """Return a ttl in seconds that leaves time for renewals and is at most max_ttl."""
    seconds = check_seconds(level, name, ttl)
    if seconds < ROUNDS_IN_TTL * node_timeout:
        hint = (
            f"must be at least {ROUNDS_IN_TTL} x node_timeout = "
            f"{ROUNDS_IN_TTL * node_timeout:g} s: raise it, or lower redlock_node_timeout"
        )
        raise SettingsError(level, name, repr(ttl), hint)
    if seconds > max_ttl:
        hint = f"must be at most redlock_max_ttl = {max_ttl:g} s: raise that for every client"
        raise SettingsError(level, name, repr(ttl), hint)
    return seconds


def check_prefix(level: str, name: str, prefix: object) -> str:
    if not isinstance(prefix, str) or not prefix or "{" in prefix or "}" in prefix:
        hint = "must be a text, not empty, without { and }"
        raise SettingsError(level, name, repr(prefix), hint)
    return prefix


def check_drift(level: str, name: str, drift: object) -> float:
    if not is_number(drift) or not 0 <= drift < 0.5:  # type: ignore[operator]
        hint = "must be a fraction from 0 to below 0.5; 0.01 allows for 1 %"
        raise SettingsError(level, name, repr(drift), hint)
    return float(drift)  # type: ignore[arg-type]


def check_guard(level: str, name: str, guard: object) -> str:
    if guard not in RESTART_GUARDS:
        hint = f"must be one of {', '.join(map(repr, RESTART_GUARDS))}"
        if guard == "on":
            hint += "; take 'strict'. `celery -A APP redlock trust --all` ends a new cluster's wait"
        raise SettingsError(level, name, repr(guard), hint)
    return str(guard)


def check_nodes(level: str, name: str, nodes: Any) -> list[Any]:
    """Return the addresses of nodes, each named once; raises SettingsError."""
    if isinstance(nodes, (str, bytes)) or not isinstance(nodes, Iterable):
        value = repr(redact_url(nodes)) if isinstance(nodes, str) else f"a {type(nodes).__name__}"
        raise SettingsError(level, name, value, "must be a list of URLs or redis-py clients")
    addresses = [parse_address(node, level, name) for node in nodes]
    if not addresses:
        raise SettingsError(level, name, "[]", "must name one node at least, better three or five")
    names: dict[str, str] = {}
    for address in addresses:
        if address.server in names:
            value = f"{names[address.server]}, {address.name}"
            hint = "name each server once: the same one twice is one vote counted twice"
            raise SettingsError(level, name, value, hint)
        names[address.server] = address.name
    kinds = {address.keeps_locks for address in addresses}
    if len(addresses) > 1 and True in kinds:
        hint = (
            "nodes of two kinds have no common majority: name Redis nodes, or one PostgreSQL"
            if len(kinds) > 1
            else "name one PostgreSQL: its durability replaces the majority"
        )
        raise SettingsError(level, name, ", ".join(address.name for address in addresses), hint)
    return addresses


def check_resources(level: str, resources: object) -> tuple[str, ...]:
    """Return the resources in the common order in which every client acquires them."""
    names = resources
    if isinstance(names, str) or not isinstance(names, Iterable) or isinstance(names, bytes):
        names = (names,)
    checked = list(names)
    for name in checked or [""]:
        if not isinstance(name, str) or not name:
            hint = "must be a text, or a list of texts, none of them empty"
            raise SettingsError(level, "resource", repr(resources), hint)
        if is_too_long(name):
            hint = f"a resource has at most {MAX_NAME_BYTES} bytes: use a digest of a longer name"
            raise SettingsError(level, "resource", repr(resources), hint)
    return in_order(checked)


def check_text(level: str, name: str, text: object) -> str:
    """Return a text that is not empty; raises SettingsError, also for a list of texts."""
    if not isinstance(text, str) or not text:
        raise SettingsError(level, name, repr(text), "must be one text, not empty")
    return text


def check_flag(level: str, name: str, flag: object) -> bool:
    if not isinstance(flag, bool):
        raise SettingsError(level, name, repr(flag), "must be True or False")
    return flag


def check_callback(level: str, name: str, call: Any) -> Any:
    if not callable(call) or inspect.iscoroutinefunction(call):
        hint = "must be a function that takes the error and is not a coroutine function, or None"
        raise SettingsError(level, name, repr(call), hint)
    return call


def check_wait(level: str, name: str, wait: object, *, most: float = MAX_SECONDS) -> float:
    """Return a number of seconds from 0 to `most`; raises SettingsError."""
    if not is_number(wait) or not 0 <= wait <= most:  # type: ignore[operator]
        hint = f"must be a number of seconds from 0 to {most:.0f}"
        raise SettingsError(level, name, repr(wait), hint)
    return float(wait)  # type: ignore[arg-type]


def check_limit(level: str, name: str, limit: Any) -> Any:
    """Return a limit, or a dict of its own with one for each name; raises SettingsError."""
    for permits in limit.values() if isinstance(limit, Mapping) else [limit]:
        if type(permits) is not int or not 1 <= permits <= MAX_PERMITS:
            hint = f"must be a whole number from 1 to {MAX_PERMITS}, or a mapping to such numbers"
            raise SettingsError(level, name, repr(limit), hint)
    return dict(limit) if isinstance(limit, Mapping) else limit


def check_permits(
    level: str, *, limit: Any, fencing: object, names: Sequence[str]
) -> dict[str, int] | None:
    """Return the limits above 1 by name, None without one; raises SettingsError.

    names: of resources, or templates. A name that a mapping leaves out has the limit 1.
    """
    check_flag(level, "fencing", fencing)
    if type(limit) is int and limit == 1:  # most locks
        return None
    check_limit(level, "limit", limit)
    limit_error = functools.partial(SettingsError, level, "limit", repr(limit))
    if isinstance(limit, Mapping):
        _check_names(limit, names, limit_error)
        semaphores = {name: permits for name, permits in limit.items() if permits > 1}
    else:
        if len(names) > 1:
            raise limit_error(
                f"one number applies to one resource: name it, as {{{names[0]!r}: {limit}}}"
            )
        semaphores = dict.fromkeys(names or ("",), limit)  # "": each call has a name of its own
    if semaphores and fencing:
        raise limit_error(
            "a lock with several holders has no fencing tokens: set limit=1, or no fencing"
        )
    return semaphores or None


def _check_names(
    named: Iterable[str], names: Sequence[str], error_of: Callable[[str], SettingsError]
) -> None:
    """Raise the error that `error_of` makes of a hint if a mapping names what is not in the key."""
    unknown = [name for name in named if name not in names]
    if unknown:
        known = f"whose resources are {', '.join(map(repr, names))}"
        known = known if names else "which has no templates"
        raise error_of(f"{unknown[0]!r} is not in the key, {known}")


def check_rate(level: str, name: str, rate: Any) -> Any:
    """Return a rate as a `Rate`, or a dict of those for several names; raises SettingsError.

    None: no rate.
    """
    if isinstance(rate, Mapping):
        return {resource: _rate_of(level, name, rate, rate[resource]) for resource in rate}
    return None if rate is None else _rate_of(level, name, rate, rate)


def _rate_of(level: str, name: str, setting: Any, value: Any) -> Rate:
    """Return the rate that a value means; raises SettingsError for any other value.

    value: the rate of one resource. setting: the whole argument, which the error shows.
    """
    rate = value if isinstance(value, Rate) else None
    if isinstance(value, str):
        rate = Rate.parse(value.strip())
    elif isinstance(value, (tuple, list)) and len(value) == 2 and is_number(value[1]):
        rate = Rate(value[0], float(value[1]))
    if rate is None or type(rate.starts) is not int or rate.starts < 1:
        hint = (
            'must be a text as "10/s", "100/m", "100/h" or "5/d", or (starts, seconds), with one '
            "start at least; or a mapping to such rates"
        )
        raise SettingsError(level, name, repr(setting), hint)
    if rate.starts > MAX_STARTS:
        hint = f"at most {MAX_STARTS} starts: each one is kept on the nodes. For more take a "
        raise SettingsError(level, name, repr(setting), f"{hint}token bucket in the client's code")
    if not MIN_PERIOD <= rate.period <= MAX_PERIOD:
        hint = f"its period must be from {MIN_PERIOD:g} to {MAX_PERIOD:.0f} seconds, a day"
        raise SettingsError(level, name, repr(setting), hint)
    return rate


def check_rates(level: str, *, rate: Any, names: Sequence[str]) -> dict[str, Rate] | None:
    """Return the rates by name, None without one; raises SettingsError.

    names: of resources, or templates. A name that a mapping leaves out has no rate.
    """
    checked = check_rate(level, "rate", rate)
    if not checked:
        return None
    rate_error = functools.partial(SettingsError, level, "rate", repr(rate))
    if isinstance(checked, dict):
        _check_names(checked, names, rate_error)
        return checked
    if len(names) > 1:
        raise rate_error(
            f"one rate applies to one resource: name it, as {{{names[0]!r}: '{checked}'}}"
        )
    return dict.fromkeys(names or ("",), checked)  # "": each call has a name of its own
