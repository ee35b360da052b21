"""The broker of a storm, looked at and meddled with from outside: which messages stand in it."""

from __future__ import annotations

import json
import random
import re
import threading
import uuid
from typing import Any

from redis import Redis
from redis.client import Monitor

from tests.integration.storm.ledger import KINDS
from tests.integration.storm.tasks import now

NAME = "celery"
SIGHT = 60.0  # s in which the broker has told of all that it did
_ID, _TAG = re.compile(r'"id": "([^"]+)"'), re.compile(r'"delivery_tag": "([^"]+)"')


class Transit:
    """Tells which messages were given out, and noted by nobody; and which were given back.

    The Redis transport takes a message from its queue, and notes that it is not acknowledged, in
    two steps; what a process has taken that is killed between the two stands nowhere. Here the
    broker itself tells of each copy that is put into the queue, and of each that is noted. What is
    noted has another delivery tag than in the queue if its worker keeps a worker lease. A script
    moves what a dead worker had.
    Source: kombu.transport.redis, Channel._put, QoS.append and Channel._do_restore_message.
    """

    def __init__(self, client: Redis, port: int) -> None:
        self._client = client
        self._unnoted: dict[str, str] = {}  # id by the delivery tag with which it was put
        self._tags: set[str] = set()  # all that there were
        self._given_back: list[tuple[str, float]] = []
        self._barrier, self._seen = "", threading.Event()
        self._patient = Redis(port=port, decode_responses=True, socket_timeout=None)
        self._monitor: Monitor = self._patient.monitor()
        self._monitor.__enter__()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def lost(self) -> frozenset[str]:
        self._catch_up()
        queued = {_found(_TAG, text) for text in self._client.lrange(NAME, 0, -1)}
        return frozenset(id_ for tag, id_ in self._unnoted.items() if tag not in queued)

    def given_back(self) -> dict[str, list[float]]:
        self._catch_up()
        times: dict[str, list[float]] = {}
        for message, at in self._given_back:
            times.setdefault(message, []).append(at)
        return times

    def close(self) -> None:
        self._catch_up("the end of it")
        self._thread.join()
        self._monitor.__exit__()
        self._patient.close()

    def _catch_up(self, word: str = "") -> None:
        """Return when all has been heard that the broker did until now."""
        self._seen.clear()
        self._barrier = word or uuid.uuid4().hex
        self._client.echo(self._barrier)
        if not self._seen.wait(SIGHT):
            raise RuntimeError("the broker's MONITOR tells nothing more")

    def _listen(self) -> None:
        for heard in self._monitor.listen():
            command, _, rest = heard["command"].partition(" ")
            name, _, text = rest.partition(" ")
            if command in ("LPUSH", "RPUSH") and name == NAME:
                is_moved = heard["client_type"] == "lua"
                self._put(_found(_TAG, text), _found(_ID, text), is_moved)
            elif command == "HSET" and name == "unacked":
                self._note(text.partition(" ")[0], _found(_ID, text))
            elif command == "ECHO" and rest == self._barrier:
                self._seen.set()
                if rest == "the end of it":
                    return

    def _note(self, tag: str, message: str) -> None:
        """Strike out the copy that was put with this tag, or one of the message."""
        if tag not in self._unnoted:
            tag = next((other for other, id_ in self._unnoted.items() if id_ == message), tag)
        self._unnoted.pop(tag, None)

    def _put(self, tag: str, message: str, is_moved: bool) -> None:
        self._unnoted[tag] = message
        if is_moved or tag in self._tags:
            self._given_back.append((message, now()))
        self._tags.add(tag)


def deliver_again(client: Redis, chance: random.Random) -> bool:
    """Put a late message that a worker has into the queue once more, as brokers do."""
    held = [json.loads(text)[0] for text in client.hvals("unacked")]
    fit = [m for m in held if _kind(m) in KINDS and KINDS[_kind(m)].late]
    if not fit:
        return False
    message = chance.choice(fit)
    message["headers"]["redelivered"] = True
    message["properties"]["delivery_info"]["redelivered"] = True
    message["properties"]["delivery_tag"] = str(uuid.UUID(int=chance.getrandbits(128)))
    client.lpush(NAME, json.dumps(message))
    return True


def _found(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    assert found is not None, text
    return found[1]


def _kind(message: Any) -> str:
    return str(message["headers"]["task"]).removeprefix("storm.")
