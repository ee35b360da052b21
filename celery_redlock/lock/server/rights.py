"""The rights that the user of a node needs, for all locks and all commands.

The hint of a denial names them, `doctor` tries them, and docs/operations/security lists them, in
this order. Not here: how an error is recognized as a denial (`error_hints.py`), and who asks the
nodes (`node_status.py`). The rights on the broker are those of `tasks/recovery`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from celery_redlock.lock.model.keys import completion_key, inbox_channel, votes_channel

# words of a trial: a key and channels of the prefix that nobody has
_KEY = "{key}"
_WAKE = "{wake}"
_HANDOFF = "{handoff}"
# Each right, and a command that needs it and changes nothing.
NODE_RIGHTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("~{prefix}:*", ("GET", _KEY)),
    ("&{prefix}:wake:*", ("PUBLISH", _WAKE, "")),
    ("&{prefix}:handoff:*", ("PUBLISH", _HANDOFF, "")),
    ("+get", ("GET", _KEY)),
    ("+set", ("SET", _KEY, "", "XX", "PX", "1")),  # only if there is such a key
    ("+del", ("DEL", _KEY)),
    ("+time", ("TIME",)),
    ("+pexpire", ("PEXPIRE", _KEY, "1")),
    ("+pttl", ("PTTL", _KEY)),
    ("+exists", ("EXISTS", _KEY)),
    ("+zadd", ("ZADD", _KEY, "XX", "0", "x")),
    ("+zrem", ("ZREM", _KEY, "x")),
    ("+zrange", ("ZRANGE", _KEY, "0", "0")),
    ("+zrank", ("ZRANK", _KEY, "x")),
    ("+zrangebyscore", ("ZRANGEBYSCORE", _KEY, "0", "0")),
    ("+zscore", ("ZSCORE", _KEY, "x")),
    ("+hset", ("HSET", _KEY, "x", "", "y")),  # refused by the server: a value is missing
    ("+hget", ("HGET", _KEY, "x")),
    ("+hgetall", ("HGETALL", _KEY)),
    ("+hdel", ("HDEL", _KEY, "x")),
    ("+publish", ("PUBLISH", _WAKE, "")),
    ("+subscribe", ("SUBSCRIBE", _WAKE)),
    ("+unsubscribe", ("UNSUBSCRIBE", _WAKE)),
    ("+pubsub|numsub", ("PUBSUB", "NUMSUB")),
    ("+eval", ("EVAL", "return 1", "0")),
    ("+evalsha", ("EVALSHA", "0" * 40, "0")),
    ("+script", ("SCRIPT", "EXISTS", "0" * 40)),
    ("+info", ("INFO", "server")),
    ("+ping", ("PING",)),
    ("+scan", ("SCAN", "0", "COUNT", "1")),
    ("+mget", ("MGET", _KEY)),
)
ACL_RULES = " ".join(["resetchannels", *(right for right, _ in NODE_RIGHTS)])
_NAME_DENIAL = re.compile(r"access (?:a|one of the) (?:key|channel)")  # Redis 7; Redis 6.2


def commands_tried() -> list[tuple[str, ...]]:
    """Return each command once, in the order to send them on one connection."""
    commands = dict.fromkeys(command for _, command in NODE_RIGHTS)
    # last: a connection with a subscription takes no other command
    return sorted(commands, key=lambda command: command[0] == "SUBSCRIBE")


def trial_words(command: Sequence[str], prefix: str) -> list[str]:
    """Return what a server gets for a command that tries a right, with the names of a prefix."""
    names = {
        _KEY: completion_key(prefix, ""),
        _WAKE: f"{votes_channel(prefix)}\n",
        _HANDOFF: inbox_channel(prefix, "\n"),
    }
    return [names.get(word, word) for word in command]


def denied_right(command: Sequence[str], error: str, prefix: str) -> str:
    """Return the right that a command was denied for, as the server's error says it."""
    if _NAME_DENIAL.search(error):
        for right, tried in NODE_RIGHTS:
            if not right.startswith("+") and tried[1] in command:
                return right.replace("{prefix}", f"{{{prefix}}}")
    # also where a server, or a proxy, speaks of a name that the command does not have
    return next(right for right, tried in NODE_RIGHTS if right[0] == "+" and tried[0] == command[0])
