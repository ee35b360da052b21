"""Votes of one round, counted: when it is decided, and how; and what an error of a node means."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import Any


class Vote(enum.Enum):
    """One node's answer to a request for a lock."""

    GRANTED = "granted"
    REFUSED = "refused"  # another token stands there
    SILENT = "silent"  # the node lost its memory and must not vote yet
    FAILED = "failed"  # no answer, or an error


GRANTED, REFUSED, SILENT, FAILED = Vote


def quorum_of(nodes: int) -> int:
    """Return how many of so many nodes are a majority."""
    return nodes // 2 + 1


def is_split(holders: Sequence[str], unheard: int, quorum: int) -> bool:
    """Tell whether rivals share the nodes, as far as one can see, so that nobody has the lock.

    holders: what stands on each node that refused. unheard: nodes whose vote is still due.
    A guess by which to try again soon: one of them may have a quorum with what was not heard.
    """
    most = max((holders.count(holder) for holder in holders), default=0)
    return 0 < most < quorum and (len(set(holders)) > 1 or most + unheard < quorum)


class Tally:
    """The votes of one round.

    nodes: how many were asked. Raises nothing.
    Source: redis.io "Distributed Locks with Redis", for the majority; a round is over as soon as
    the votes still due cannot change its outcome.
    """

    __slots__ = ("granted", "nodes", "quorum", "refused", "withheld")

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.quorum = quorum_of(nodes)
        self.granted = self.refused = 0
        self.withheld = 0  # silent or failed: no vote at all

    def add(self, vote: Vote) -> bool:
        """Count one node's vote; True where the outcome is certain by now."""
        if vote is GRANTED:
            self.granted += 1
        elif vote is REFUSED:
            self.refused += 1
        else:
            self.withheld += 1
        return self.granted >= self.quorum or self.impossible

    @property
    def reached(self) -> bool:
        """A quorum granted."""
        return self.granted >= self.quorum

    @property
    def impossible(self) -> bool:
        """So many nodes did not grant that no quorum can any more (a blocking set)."""
        return self.nodes - self.refused - self.withheld < self.quorum

    @property
    def unheard(self) -> int:
        """Nodes whose vote is still due."""
        return self.nodes - self.granted - self.refused - self.withheld

    def taken(self, *, time_is_up: bool) -> bool:
        """Tell whether a failed round means that others hold the lock, not that nodes are away.

        time_is_up: nodes not yet heard had all the time they get; before that, each of them
        still counts as one that can vote.
        """
        voted = self.granted + self.refused
        able = voted if time_is_up else voted + self.unheard
        return self.refused > 0 and able >= self.quorum


_NOT_A_PRIMARY = "not a primary: name its primary, or its Sentinels"
_IN_A_CLUSTER = "a cluster member: name a server that stands alone"
_RIGHTS = (
    "its user needs ~{prefix}:* &{prefix}:wake:* +get +set +del "
    "+time +pexpire +pttl +exists +publish "
    "+subscribe +unsubscribe +eval +evalsha +script +info +ping"
)

# How an error is recognized (a regular expression), and the way out of it. Beside the codes stand
# the servers' sentences, for redis-py takes some codes off the replies to its own commands.
_TEMPORARY = {  # costs a vote in this round; some of them end by an operator's hand alone
    "Connection refused|No route to host|[Nn]etwork is unreachable": "",
    "No such file or directory|Timeout connecting|No master found": "",
    "[Nn]ame or service not known|name resolution|nodename nor servname": "",
    "LOADING|is loading the dataset|TRYAGAIN|BUSY|NOSCRIPT": "",
    "max number of clients": "raise its maxclients",
    "CLUSTERDOWN": _IN_A_CLUSTER,
    "NOREPLICAS": "bring back as many replicas as its min-replicas-to-write asks for",
    "MISCONF": "it cannot save to disk: its log says why",
    "OOM|when used memory >": "its memory is full: raise its maxmemory",
    "no answer (?:within|in time)|timed out|Timeout (?:reading|writing)": "",
    "[Cc]onnection (?:closed|reset)|Broken pipe|EOF occurred": "",
    "nobody asked for|in the middle of a command": "",
    "not a reply of its script": "see what answers there: a proxy, or another program",
}
_MISCONFIGURED = {  # no vote before somebody changes a setting
    "READONLY|read only replica|previous master": _NOT_A_PRIMARY,
    "MASTERDOWN|Link with MASTER": _NOT_A_PRIMARY,
    "NOAUTH|Authentication required": "name a user and a password in its URL",
    "WRONGPASS|invalid (?:password|username)": "correct user and password in its URL",
    "any password configured|no password is set": "it has no password: name none in its URL",
    "DENIED|protected mode": "give it a password, or set its protected-mode to no",
    "NOPERM|[Nn]o permissions": _RIGHTS,
    "ACL failure|user executing the script": _RIGHTS,
    "MOVED|ASK|CROSSSLOT|in cluster mode": _IN_A_CLUSTER,
    "DB index|Invalid Database": "name a database in its URL that it has",
    "WRONGTYPE": "another program uses the key: delete it, or choose another prefix",
    "NOPROTO|[Uu]nknown (?:Redis )?(?:sub)?command": (
        "a server before Redis 6.2, or one whose commands are renamed: name another"
    ),
    "FENCE|:fence": "its clock or another program spoiled {prefix}:fence: correct both",
    "certificate verify failed": "name the CA of its certificate in its URL, as ssl_ca_certs",
    "WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE": "no TLS there: name its TLS port, or redis://",
    "not a Redis server|reply type byte": "another kind of server listens there",
}
_SIGNS = {**_TEMPORARY, **_MISCONFIGURED}
_MEANINGS = [(sign in _MISCONFIGURED, hint) for sign, hint in _SIGNS.items()]
_KNOWN = re.compile("|".join(rf"((?<!\w)(?:{sign})(?!\w))" for sign in _SIGNS))


def _meaning(text: str) -> tuple[bool, str]:
    """Return whether the first known words of a text mean a wrong setting, and the way out."""
    # wherever they stand: servers before 7 wrap what a script raised in an ERR of their own. And
    # no later ones, which may be an argument of ours that a server repeats
    found = _KNOWN.search(text)
    if found is None or found.lastindex is None:
        return False, ""
    return _MEANINGS[found.lastindex - 1]


def is_misconfigured(text: str) -> bool:
    """Return whether an error means that a node cannot vote before somebody changes a setting.

    text: a server's reply, or the system's or redis-py's words on a connection. Raises nothing.
    """
    return _meaning(text)[0]


def hint_of(text: str) -> str:
    """Return what an operator must do about an error, as a short clause; "" where there is nothing.

    text: as for `is_misconfigured`. Every misconfiguration has one, and so have temporary
    errors that do not end by themselves, as a full memory.
    """
    return _meaning(text)[1]


def is_of_a_replica(text: str) -> bool:
    """Tell whether a reply says that the server is no primary, or not any more."""
    return hint_of(text) == _NOT_A_PRIMARY


def advised(text: str) -> str:
    """Return an error with the way out behind it, where there is one."""
    clause = hint_of(text)
    return f"{text} ({clause})" if clause else text


class UnexpectedReplyError(Exception):
    """A node's reply that its script, or its command, cannot give. reply: what came."""

    def __init__(self, reply: Any) -> None:
        super().__init__(f"not a reply of its script: {outline_of(reply)}")


def outline_of(reply: Any, depth: int = 2) -> str:
    """Return what a reply looks like, without longer texts, for one may be a token."""
    if reply is None:
        return "nil"
    if isinstance(reply, (list, tuple)):
        inside = [outline_of(word, depth - 1) for word in reply[:5]] if depth else ["..."]
        return f"[{', '.join([*inside, *(['...'] if len(reply) > 5 else [])])}]"
    if isinstance(reply, (bytes, str)):
        return repr(reply) if len(reply) <= 16 else f"a text of {len(reply)}"
    return repr(reply) if isinstance(reply, (bool, int, float)) else f"a {type(reply).__name__}"


def in_short(text: str) -> str:
    """Return a reply without the arguments of ours that a server repeats: a token is a secret."""
    return text.partition(", with args")[0]
