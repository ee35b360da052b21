"""The delivery tag of a message that its worker's death moves, and which messages get one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import uuid4

from celery_redlock.errors import SettingsError
from celery_redlock.tasks.declaration import config_of
from celery_redlock.tasks.delivery.header import HEADER
from celery_redlock.tasks.delivery.republish import MOVES
from celery_redlock.tasks.settings.app import DEFAULT_PREFIX
from celery_redlock.tasks.settings.options import TaskLockOptions

MAX_MOVES = 10  # in a row; after that the body itself may be what kills the workers
DECIDING_OPTIONS = (
    "key",
    "args",
    "on_unreachable",
)  # options that say whether a run is sure to hold a lock
PREFIX = "redlock-"  # of the name of each worker lease
ORIGIN_DIGITS = 8  # of that name, by `redlock_prefix`: workers with another one do not know them
_LEASE = re.compile(rf"{PREFIX}[0-9a-f]{{32}}")


class DeliveryTag(NamedTuple):
    """A delivery tag that names the worker lease of its consumer, a number, and a list.

    number: of the deliveries to this worker lease, in their order. list: the key on the broker that
    the message was taken from, without the global prefix: one of the lists of a queue.
    """

    lease: str
    number: int
    list: str

    def __str__(self) -> str:
        return f"{self.lease}:{self.number}:{self.list}"

    @classmethod
    def of(cls, text: object) -> DeliveryTag | None:
        """Read a delivery tag; None for one of another kind, as kombu or a sender makes it."""
        lease, _, number_and_list = str(text).partition(":")
        number, _, name = number_and_list.partition(":")
        if not (_LEASE.fullmatch(lease) and number.isascii() and number.isdecimal() and name):
            return None
        return cls(lease, int(number), name)


def lease_of(tag: object) -> str:
    """Return the worker lease that a delivery tag names, "" for a tag of another kind."""
    lease, colon, _ = str(tag).partition(":")
    return lease if colon and lease.startswith(PREFIX) else ""


def lease_start(prefix: str) -> str:
    """Return how the names of the worker leases begin with a `redlock_prefix`."""
    return f"{PREFIX}{hashlib.sha256(prefix.encode()).hexdigest()[:ORIGIN_DIGITS]}"


def new_lease(start: str = "") -> str:
    """Return the name of a new worker lease. start: as of `lease_start`."""
    start = start or lease_start(DEFAULT_PREFIX)
    return f"{start}{uuid4().hex}"[: len(PREFIX) + 32]


def always_locks(options: TaskLockOptions) -> bool:
    """Return whether each run with these options holds a lock.

    A callable key may return None, and with on_unreachable="run" a run without a quorum holds none.
    """
    return not (options.key is False or callable(options.key) or options.on_unreachable == "run")


def may_be_moved(task: Any, headers: Mapping[str, Any], queue: str) -> bool:
    """Return whether a message may be moved: a lock keeps a second delivery from a run beside it.

    headers: of the message, as the broker delivers them.
    """
    if not hasattr(task, "lock_for"):
        return False
    header = headers.get(HEADER)
    call: Mapping[str, Any] = {}
    try:
        config = config_of(task)
        if isinstance(header, Mapping) and isinstance(header.get("options"), Mapping):
            call = {
                name: value
                for name, value in config.allowed_options(header["options"]).items()
                if name in DECIDING_OPTIONS
            }
        return always_locks(config.options_for(queue, call))
    except SettingsError:  # each run fails with it
        return False


def moved(entry: str, *, anew: bool = False, is_counted: bool = True) -> str | None:
    """Return a message as it goes back to its list, with a new tag; None: it was moved too often.

    entry: JSON, what kombu has noted of a message that is not acknowledged. anew: an operator moves
    it, and its moves are counted from then on. is_counted: its worker has died with it. The message
    counts such moves, and its second delivery is flagged as one. Source: kombu.transport.redis:
    QoS.append notes it, Channel._do_restore_message flags it. Raises ValueError, LookupError,
    TypeError or AttributeError if it is not kombu's.
    """
    raw = json.loads(entry)[0]
    properties = raw["properties"]
    moves = 0 if anew else moves_of(properties) + is_counted
    if moves > MAX_MOVES:
        return None
    properties.update({"delivery_tag": str(uuid4()), MOVES: moves})
    raw.setdefault("headers", {})["redelivered"] = True
    properties.setdefault("delivery_info", {})["redelivered"] = True
    return json.dumps(raw)


def moves_of(properties: Mapping[str, Any]) -> int:
    """Return how often in a row a message was moved, as it says itself."""
    count = properties.get(MOVES)
    return count if type(count) is int and count > 0 else 0
