"""From a resource to the names and values that stand on the nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

# A permit's key ends with "#<number>"; a resource that ends like one gets one "#" more.
_LOOKS_LIKE_A_PERMIT = re.compile(r"#[0-9]+#*$")


def lock_key(prefix: str, resource: str, permit: int = 0) -> str:
    """Return the key of a resource's lock, in one hash slot with all other keys of the prefix.

    permit: which of a semaphore's; the first one is the plain lock's own key, so that holders
    with different limits still count each other.
    """
    name = f"{resource}#" if _LOOKS_LIKE_A_PERMIT.search(resource) else resource
    return f"{{{prefix}}}:lock:{name}#{permit}" if permit else f"{{{prefix}}}:lock:{name}"


def broken_key(key: str) -> str:
    """Return where a node notes the value that an operator broke: no repair brings it back."""
    return key.replace("}:lock:", "}:broken:", 1)


def wake_channel(prefix: str, resource: str) -> str:
    """Return the channel on which a release says that the resource may be free."""
    return f"{{{prefix}}}:wake:{resource}"


def done_key(prefix: str, run: str) -> str:
    """Return where a node notes that a run is done."""
    return f"{{{prefix}}}:done:{run}"


def guard_keys(prefix: str) -> tuple[str, str]:
    """Return where a node notes its run id, and that it is silent since it lost its memory."""
    return f"{{{prefix}}}:run", f"{{{prefix}}}:quiet"


def fence_key(prefix: str) -> str:
    """Return the key of a node's one fencing counter."""
    return f"{{{prefix}}}:fence"


def in_order(resources: Iterable[str]) -> tuple[str, ...]:
    """Return each resource once, in the one order in which everybody takes several."""
    return tuple(sorted(set(resources), key=lambda name: name.encode("utf-8", "surrogatepass")))


def new_token() -> str:
    """Return 128 random bits in hex: the proof that a key is ours. Fresh for each round."""
    return os.urandom(16).hex()


def value_of(token: str, label: str) -> str:
    """Return what a node stores under the key: the token, then who holds it, for people."""
    return f"{token}:{label}"


def label_of(value: str) -> str:
    """Return who a stored value speaks of; the value itself where a stranger wrote it."""
    _, colon, label = value.partition(":")
    return label if colon else value
