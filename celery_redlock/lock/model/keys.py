"""Names and values of keys and channels on the nodes."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

from celery_redlock.lock.transport.command import encoded

# A permit's key ends with "#<number>". A resource name with such an end gets one more "#".
_PERMIT_SUFFIX = re.compile(r"#[0-9]+#*\Z")  # not "$": it also matches before a final newline
# Of what the keys hold. It is on each node, where a missing number is 1, and a change that an older
# release would misread raises it: clients of two formats never lock side by side.
NODE_FORMAT = 1
# begins the value of an operator's hold: lua/permit.lua grants nobody else a permit
HOLD_MARK = "!"
MAX_DIGITS = 15  # of milliseconds since 1970: a time with more is another program's
_LOCK_VALUE = re.compile(
    rf"[^:]*:([0-9]{{1,{MAX_DIGITS}}})(?:\+([0-9]{{1,{MAX_DIGITS}}}))?(?:/([0-9]{{1,9}}))?:(.*)",
    re.DOTALL,
)
# The name of those that wait for a start. A resource name with such a beginning gets one more "/".
_RATE_PREFIX = "rate/"
_RATE_LIKE_PREFIX = re.compile(r"/*rate/")
# the state of a send, as the value of its unique key names it
SENDING = "sending"
SENT = "sent"
RUN_PREFIX = "run:"  # of the resource of a message that may be delivered again
_PERMIT_NAME = re.compile(r"(.*)#([1-9][0-9]{0,8})", re.DOTALL)


def lock_key(prefix: str, resource: str, permit: int = 0) -> str:
    """Return the key of a resource's lock. All keys of a prefix are in one hash slot.

    permit: number of a semaphore's permit. Permit 0 has the plain lock's key, so that holders with
    different limits still count each other.
    """
    looks_like_a_permit = "#" in resource and _PERMIT_SUFFIX.search(resource)
    name = f"{resource}#" if looks_like_a_permit else resource
    return f"{{{prefix}}}:lock:{name}#{permit}" if permit else f"{{{prefix}}}:lock:{name}"


def broken_key(key: str, value: str) -> str:
    """Return the key that records a lock broken by an operator, so that no reclaim restores it.

    Each lock value has a key of its own, so a second break does not overwrite the first record.
    """
    return f"{broken_beginning(key)}:{value.partition(':')[0]}"


def broken_beginning(key: str) -> str:
    """Return how the records of broken locks begin, of a lock's key or of the beginning of one."""
    return key.replace("}:lock:", "}:broken:", 1)


def rate_keys(prefix: str, resource: str) -> tuple[str, str]:
    """Return the keys of a resource's starts: the sorted set of when, and the hash of whose."""
    return f"{{{prefix}}}:rate:{resource}", f"{{{prefix}}}:rate-tokens:{resource}"


def name_of_rate(resource: str) -> str:
    """Return the name under which clients wait for a resource's next start."""
    return f"{_RATE_PREFIX}{resource}"


def name_of_lock(resource: str) -> str:
    """Return the name under which clients wait for a resource's lock: its own in most cases."""
    looks_like_a_rate = "rate/" in resource and _RATE_LIKE_PREFIX.match(resource)
    return f"/{resource}" if looks_like_a_rate else resource


def waiting_for(name: str) -> tuple[str, bool]:
    """Return the resource that clients wait for under a name, and whether for its next start."""
    if name.startswith(_RATE_PREFIX):
        return name.removeprefix(_RATE_PREFIX), True
    return name[1:] if _RATE_LIKE_PREFIX.match(name) else name, False


def name_of_run(run: str) -> str:
    """Return the resource that a run locks of which another delivery may run, too."""
    return f"{RUN_PREFIX}{run}"


def waiting_key(prefix: str, name: str) -> str:
    """Return the key of the sorted set of waiters: processes, by first deferral.

    name: of `name_of_lock` or `name_of_rate`.
    """
    return f"{{{prefix}}}:waiting:{name}"


def inbox_channel(prefix: str, waiter: str) -> str:
    """Return the channel on which a release names this waiter as a successor."""
    return f"{{{prefix}}}:handoff:{waiter}"


def votes_channel(prefix: str) -> str:
    """Return the channel that announces that nodes grant locks again."""
    return f"{{{prefix}}}:wake:"


def pattern_of(key: str) -> str:
    """Return a SCAN pattern that matches exactly this text. A caller may append a "*"."""
    return "".join(f"\\{letter}" if letter in "*?[]^-\\" else letter for letter in key)


def completion_key(prefix: str, run: str) -> str:
    return f"{{{prefix}}}:done:{run}"


def unique_key(prefix: str, name: str) -> str:
    """Return the key that names the valid send of a unique task."""
    return f"{{{prefix}}}:unique:{name}"


def order_key(prefix: str, name: str) -> str:
    """Return the key of the order of a unique task's sends, and of its newest start."""
    return f"{{{prefix}}}:order:{name}"


def guard_keys(prefix: str) -> tuple[str, str]:
    """Return the key of a node's run id, and the key that exists during its grace_period."""
    return f"{{{prefix}}}:run", f"{{{prefix}}}:quiet"


def tenure_key(prefix: str, address: str = "") -> str:
    """Return the key of a node's own tenure, or of the newest tenure at another node's address."""
    return f"{{{prefix}}}:tenure:{address}" if address else f"{{{prefix}}}:tenure"


def format_key(prefix: str) -> str:
    """Return the key of the number of the format that a node's keys have."""
    return f"{{{prefix}}}:format"


def settings_key(prefix: str) -> str:
    """Return the key of the settings that all clients of a prefix share."""
    return f"{{{prefix}}}:terms"


def fence_key(prefix: str) -> str:
    """Return the key of a node's fencing counter. A node has one counter for all locks."""
    return f"{{{prefix}}}:fence"


def in_order(resources: Iterable[str], permits: Collection[str] | None = None) -> tuple[str, ...]:
    """Return each resource once, in the order in which all clients acquire several.

    One order for all clients keeps them from refusing each other. permits: the resources with a
    limit above 1. They are last, so that nobody has a permit who is then refused by a plain lock.
    """
    if type(resources) is tuple and len(resources) == 1:  # those of most runs
        return resources
    ordered = sorted(set(resources), key=encoded)
    if permits:
        ordered.sort(key=permits.__contains__)
    return tuple(ordered)


def name_of_all(resources: Sequence[str]) -> str:
    """Return one name for several resources together. A single resource keeps its own name."""
    # a single name that looks quoted is quoted, too, so that two lists never get the same name
    is_single = len(resources) == 1 and not resources[0].startswith(("'", '"'))
    return resources[0] if is_single else ", ".join(map(repr, resources))


def resources_of(name: str) -> tuple[str, ...]:
    """Return the resources of one name: the inverse of `name_of_all`."""
    if name.startswith(("'", '"')):
        with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # others'
            resources = tuple(ast.literal_eval(f"[{name}]"))
            is_text = all(isinstance(resource, str) for resource in resources)
            if is_text and name_of_all(resources) == name:
                return resources
    return (name,)


def resource_of(prefix: str, key: str) -> tuple[str, int]:
    """Return the resource and the permit of a lock's key: the inverse of `lock_key`."""
    name = key.removeprefix(f"{{{prefix}}}:lock:")
    permit = 0
    match = _PERMIT_NAME.fullmatch(name)
    if match is not None:
        name = match[1]
        permit = int(match[2])
    if name.endswith("#") and _PERMIT_SUFFIX.search(name):
        name = name[:-1]
    return name, permit


def value_of(token: str, since_ms: int, label: str, ttl: float, limit: int = 1) -> str:
    """Return the value of a lock's key: a random token; then, for people, times and the holder.

    since_ms: milliseconds since 1970, by the holder's clock. ttl: seconds, the lease on a node.
    limit: the number of permits, in the value if it is above 1.
    """
    permits = f"/{limit}" if limit > 1 else ""
    return f"{token}:{since_ms}+{int(ttl * 1000)}{permits}:{label}"


def parts_of_claim(value: str) -> tuple[str, bool, str]:
    """Return what a unique key's value says of a send: token, whether it is confirmed, run id.

    A value that another program wrote is a send that was never confirmed.
    """
    token, _, state_and_run = value.partition(":")
    state, _, run_id = state_and_run.partition(":")
    return token, state == SENT and bool(run_id), run_id


def label_of(value: str) -> str:
    """Return the holder's label in a value, or the value itself if another program wrote it."""
    return parts_of(value)[0]


def parts_of(value: str) -> tuple[str, float | None, float | None, int]:
    """Return the holder's label in a value, since when it wants the lock, its lease, and the limit.

    Seconds since 1970, and seconds. If another program wrote it: the value itself, None, None, 1.
    """
    match = _LOCK_VALUE.fullmatch(value)
    if match is None:
        return value, None, None, 1
    since, ttl, limit, label = match.groups()
    return label, int(since) / 1000, None if ttl is None else int(ttl) / 1000, int(limit or 1)
