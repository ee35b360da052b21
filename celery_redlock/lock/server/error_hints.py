"""What an error of a node means: whether it ends by itself, and what an operator must do."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

from celery_redlock import anchors
from celery_redlock.errors import NodeError, abstention_cause
from celery_redlock.label import escaped
from celery_redlock.lock.server.rights import ACL_RULES
from celery_redlock.lock.transport.node import MAX_CAUSE_LENGTH, Node

_NOT_A_PRIMARY = "not a primary: name its primary, or its Sentinels"
_IN_A_CLUSTER = "a cluster member: name a standalone server"
_RIGHTS = f"its user needs {ACL_RULES}"
# Each entry: a regular expression that recognizes an error, and the hint. Besides the codes it has
# the servers' sentences, because redis-py removes some codes from replies to its own commands.
_TEMPORARY = {  # costs a vote in this round; some of these errors end only if an operator acts
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
    "[Cc]onnection (?:closed|reset) by [a-z ]+ instead of a reply": (
        "see what answers there: a proxy without its server, or one that reads the commands"
    ),
    "[Cc]onnection (?:closed|reset)|Broken pipe|EOF occurred": "",
    "an unexpected answer|interrupted a command": "",
    "not a reply of its script": "see what answers there: a proxy, or another program",
}
# fmt: off
_MISCONFIGURED = {  # no vote before an operator changes a setting
    "READONLY|read only replica|previous master|it is a replica": _NOT_A_PRIMARY,
    "MASTERDOWN|Link with MASTER": _NOT_A_PRIMARY,
    r"Sentinel .*(?:Auth\w+ required|invalid (?:password|username)|password configured)":
        "correct sentinel_username and sentinel_password in its URL: Sentinels have their own",
    "NOAUTH|Authentication required": "name a user and a password in its URL",
    "WRONGPASS|invalid (?:password|username)": "correct user and password in its URL",
    "any password configured|no password is set": "it has no password: name none in its URL",
    "OTHERFORMAT": "clients of another release lock there: install that release here, too",
    "DENIED|protected mode": "give it a password, or set its protected-mode to no",
    "NOPERM|[Nn]o permissions": _RIGHTS,
    "ACL failure|user executing the script": _RIGHTS,
    "MOVED|ASK|CROSSSLOT|in cluster mode": _IN_A_CLUSTER,
    "DB index|Invalid Database": "name a database in its URL that it has",
    "WRONGTYPE": "another program uses the key: delete it, or use another prefix",
    "NOPROTO|[Uu]nknown (?:Redis )?(?:sub)?command":
        "a server before Redis 6.2, or one whose commands are renamed: name another",
    "FENCE|:fence":
        "a clock or another program spoiled {prefix}:fence: correct that, then `trust --all`",
    "certificate verify failed: certificate (?:has expired|is not yet valid)":
        "renew its certificate; if that is valid, correct this machine's clock",
    "certificate verify failed: (?:Hostname|IP address) mismatch":
        "its certificate names other hosts: name one of them in its URL, or renew it",
    "certificate verify failed": "name the CA of its certificate in its URL, as ssl_ca_certs",
    "WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|it answers without TLS":
        "no TLS there: name its TLS port, or redis://",
    r"cannot read ssl_\w+": "correct this path in its URL, or the rights of the file",
    "NO_CERTIFICATE_OR_CRL_FOUND|PEM lib|KEY_VALUES_MISMATCH":
        "ssl_ca_certs or ssl_certfile is not a PEM file, or ssl_keyfile is not its key",
    "alert certificate required|alert handshake failure":
        "it asks for a client certificate: name one in its URL, as ssl_certfile and ssl_keyfile",
    "alert unknown ca|alert bad certificate|alert certificate":
        "it refuses our certificate: name one in its URL whose CA it knows, as ssl_certfile",
    "not a Redis server|reply type byte": "another kind of server listens there",
}
# fmt: on
_REPLICA = {_NOT_A_PRIMARY}  # hints of errors of a server that is no primary
_OF_POSTGRESQL: set[str] = set()  # signs


@functools.cache
def _known() -> tuple[re.Pattern[str], list[tuple[str, str]]]:
    """Return what finds the first sign in a text, and all signs, each with its hint."""
    signs = {**_TEMPORARY, **_MISCONFIGURED}
    return re.compile("|".join(rf"((?<!\w)(?:{sign})(?!\w))" for sign in signs)), list(
        signs.items()
    )


def add_signs(temporary: Mapping[str, str], misconfigured: Mapping[str, str], replica: str) -> None:
    """Know the errors of a PostgreSQL, too. replica: the hint of those of a standby."""
    _TEMPORARY.update(temporary)
    _MISCONFIGURED.update(misconfigured)
    _REPLICA.add(replica)
    _OF_POSTGRESQL.update(temporary, misconfigured)
    _known.cache_clear()


def _meaning(text: str) -> tuple[str, str]:
    """Return the sign of the first known words of a text, and its hint; "" for each if unknown."""
    # Anywhere in the text: servers before 7 wrap an error of a script in their own ERR. Only the
    # first match: a later one may be in an argument of ours that the server repeats.
    pattern, signs = _known()
    match = pattern.search(text, 0, MAX_CAUSE_LENGTH)
    if match is None or match.lastindex is None:
        return "", ""
    return signs[match.lastindex - 1]


def is_misconfigured(text: str) -> bool:
    """Return whether a node cannot vote before an operator changes a setting."""
    return _meaning(text)[0] in _MISCONFIGURED


def passage_of(text: str) -> str:
    """Return the command that prints the passage about an error of a node; as `hint_of`."""
    is_of_postgresql = _meaning(text)[0] in _OF_POSTGRESQL
    return anchors.POSTGRESQL_FAILS if is_of_postgresql else anchors.NODE_FAILS


def hint_of(text: str) -> str:
    """Return what an operator must do about an error, as a short clause; "" for nothing.

    text: an error reply, or the system's or redis-py's text about a connection. Also temporary
    errors that do not end by themselves have a hint, such as a full memory.
    """
    return _meaning(text)[1]


def is_of_a_replica(text: str) -> bool:
    return hint_of(text) in _REPLICA


def with_hint(text: str) -> str:
    clause = hint_of(text)
    return f"{text} ({clause})" if clause else text


def strip_args(text: str) -> str:
    """Return an error reply on one line, without our arguments: a token is a secret."""
    return escaped(text.partition(", with args")[0], MAX_CAUSE_LENGTH)


def causes_of(
    nodes: Sequence[Node],
    errors: dict[int, NodeError] | None = None,
    abstaining: dict[int, float] | None = None,
    voters: set[int] | None = None,
) -> list[str]:
    """Return one text for each node that gave no vote.

    errors, abstaining: by node index. voters: if given, the time is up for all other nodes.
    """
    errors = errors or {}
    abstaining = abstaining or {}
    causes = []
    for node in nodes:
        error = errors.get(node.index) or node.error
        if node.index in abstaining:
            keeps_locks = node.address.keeps_locks
            cause = abstention_cause(abstaining[node.index], keeps_locks=keeps_locks)
            causes.append(f"{node.name}: {cause}")
        elif error is not None:
            causes.append(f"{node.name}: {with_hint(error.cause)}")
        elif voters is not None and node.index not in voters:  # frozen or partitioned: no error yet
            causes.append(f"{node.name}: no answer in time")
    return causes or [f"{node.name}: no answer in time" for node in nodes]
