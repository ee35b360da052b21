"""From a resource to the names and values that stand on the nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from celery_redlock.lock.transport.encoding import encoded

# A permit's key ends with "#<number>"; a resource that ends like one gets one "#" more.
_LOOKS_LIKE_A_PERMIT = re.compile(r"#[0-9]+#*\Z")  # "$" would match before a last newline, too
_IS_A_PERMIT = re.compile(r"(.*)#([1-9][0-9]{0,8})", re.DOTALL)


def lock_key(prefix: str, resource: str, permit: int = 0) -> str:
    """Return the key of a resource's lock, in one hash slot with all other keys of the prefix.

    permit: which of a semaphore's; the first one is the plain lock's own key, so that holders
    with different limits still count each other.
    """
    name = f"{resource}#" if _LOOKS_LIKE_A_PERMIT.search(resource) else resource
    return f"{{{prefix}}}:lock:{name}#{permit}" if permit else f"{{{prefix}}}:lock:{name}"


def broken_key(key: str, value: str) -> str:
    """Return where a node notes that an operator broke a lock: no repair brings it back.

    One for each value, so that a second break does not make the first one forgotten.
    """
    return f"{key.replace('}:lock:', '}:broken:', 1)}:{value.partition(':')[0]}"


def wake_channel(prefix: str, resource: str) -> str:
    """Return the channel on which a release says that the resource may be free."""
    return f"{{{prefix}}}:wake:{resource}"


def votes_channel(prefix: str) -> str:
    """Return the channel on which is said that nodes grant locks again; no resource is empty."""
    return wake_channel(prefix, "")


def pattern_of(key: str) -> str:
    """Return a pattern for SCAN that means just this text; a "*" behind it is the caller's."""
    return "".join(f"\\{letter}" if letter in "*?[]^-\\" else letter for letter in key)


def completion_key(prefix: str, run: str) -> str:
    """Return where a node notes that a run is done."""
    return f"{{{prefix}}}:done:{run}"


def unique_key(prefix: str, name: str) -> str:
    """Return where a node keeps which send of what is sent once is good."""
    return f"{{{prefix}}}:unique:{name}"


def guard_keys(prefix: str) -> tuple[str, str]:
    """Return where a node notes its run id, and that it is silent since it lost its memory."""
    return f"{{{prefix}}}:run", f"{{{prefix}}}:quiet"


def tenure_key(prefix: str, address: str = "") -> str:
    """Return where a node notes its own tenure, or the newest under another node's address."""
    return f"{{{prefix}}}:tenure:{address}" if address else f"{{{prefix}}}:tenure"


def fence_key(prefix: str) -> str:
    """Return the key of a node's one fencing counter."""
    return f"{{{prefix}}}:fence"


def in_order(resources: Iterable[str]) -> tuple[str, ...]:
    """Return each resource once, in the one order in which everybody takes several."""
    return tuple(sorted(set(resources), key=encoded))


def name_of_all(resources: Sequence[str]) -> str:
    """Return one name for several resources together; of one alone it is that."""
    # quoted where there are several, or it looks like that: so two lists never give one name
    alone = len(resources) == 1 and not resources[0].startswith(("'", '"'))
    return resources[0] if alone else ", ".join(map(repr, resources))


def resource_of(prefix: str, key: str) -> tuple[str, int]:
    """Return the resource and the permit that a lock's key is of; the inverse of `lock_key`."""
    name, permit = key.removeprefix(f"{{{prefix}}}:lock:"), 0
    found = _IS_A_PERMIT.fullmatch(name)
    if found is not None:
        name, permit = found[1], int(found[2])
    if name.endswith("#") and _LOOKS_LIKE_A_PERMIT.search(name):
        name = name[:-1]
    return name, permit


def value_of(token: str, since_ms: int, label: str) -> str:
    """Return what a node stores under the key: the token, then since when and who, for people.

    since_ms: ms since 1970, by the holder's clock.
    """
    return f"{token}:{since_ms}:{label}"


def label_of(value: str) -> str:
    """Return who a stored value speaks of; the value itself where a stranger wrote it."""
    parts = _parts_of(value)
    return value if parts is None else parts[1]


def is_of_run(label: str, run: str) -> bool:
    """Tell whether a label says that this run holds a lock: behind its name is its worker's."""
    return label.startswith(f"{run} ")


def since_of(value: str) -> float | None:
    """Return since when its holder asks for it, s since 1970; None where a stranger wrote it."""
    parts = _parts_of(value)
    return None if parts is None else parts[0] / 1000


def _parts_of(value: str) -> tuple[int, str] | None:
    """Return what stands behind the token: ms since 1970, and who; None for a stranger's value."""
    parts = value.split(":", 2)
    return (int(parts[1]), parts[2]) if len(parts) == 3 and parts[1].isdecimal() else None
