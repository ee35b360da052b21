"""A node whose keys and channels another program writes costs its own vote, and nothing more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from celery_redlock import Redlock
from celery_redlock.testing import WorkerProcess
from tests.conftest import PATIENCE, Nodes, eventually, settle
from tests.integration.conftest import MakeStage, Stage
from tests.integration.test_command import command

PREFIX = "{redlock}"
MOST_MEMORY = 64_000_000  # bytes that the main process may grow by
HUGE, DIGITS = "x" * 1_000_000, "9" * 400
TEXTS: dict[str, str | bytes] = {
    "empty": "", "a word": "forged", "a negative number": "-1",
    "the last number of Lua": str(2**53), "a float": "1e308", "not a number": "nan",
    "400 digits": DIGITS, "5000 digits": "9" * 5000, "a number and a word": f"{2**53} forged",
    "400 digits and a word": f"{DIGITS} forged",
    "a lock's value": f"token:{DIGITS}:forged\nline \x1b[31m", "bytes": b"\xff\x00\xfe",
    "a MB": HUGE,
}  # fmt: skip
OTHER_TYPES: dict[str, tuple[Any, ...]] = {
    "a list": ("RPUSH", "forged", DIGITS),
    "a hash": ("HSET", "forged", DIGITS),
    "a set": ("SADD", "forged", DIGITS),
    "scores": ("ZADD", "inf", "forged:9:x", "-inf", HUGE, "1e308", f"x:{DIGITS}:y", "0", b"\xff"),
}

VALUES: list[Any] = [*TEXTS.values(), *OTHER_TYPES.values()]


def messages(release: str) -> Iterator[str | bytes]:
    yield from TEXTS.values()
    for number, rank in enumerate(("0", "1", "99", "-1", DIGITS, "9" * 5000)):
        for id_ in (f"{release}-{number}", HUGE):
            yield f"{rank} {id_} {PREFIX}:waiting:k:k"


@pytest.fixture
def hostile_stage(make_stage: MakeStage, nodes: Nodes) -> tuple[Stage, WorkerProcess]:
    """Give a stage whose leases are longer than the test, and a worker with a waiting message."""
    stage = make_stage(nodes, redlock_max_ttl=200)
    return stage, stage.worker(concurrency=2)


def run_some(stage: Stage, number: int) -> None:
    tasks = stage.tasks
    results = [task.delay(f"{number}") for task in (tasks.work, tasks.late, tasks.once_early)]
    for result in results:
        result.get(timeout=60)


def write(client: Redis, key: str, value: Any) -> None:
    """Overwrite a key: with a value, or by a command with what follows the key."""
    client.delete(key)
    if isinstance(value, tuple):
        client.execute_command(value[0], key, *value[1:])
    else:
        client.set(key, value)


def assert_commands_work(client: Redis) -> None:
    """Fail if the commands for operators do not show a node with any of the values."""
    for number, value in enumerate(VALUES):
        for name in (f"lock:{number}", f"lock:{number}#{DIGITS}", f"waiting:{number}"):
            write(client, f"{PREFIX}:{name}", value)
    for words in (["locks"], ["show", "k:k"], ["show", "3"], ["waiters"], ["doctor"]):
        for more in ([], ["--json"]):
            told = command(*words, *more)
            assert told.exception is None or isinstance(told.exception, SystemExit), words
            assert not set(told.output) & {"\x1b", "\x00"}


def memory_of(worker: WorkerProcess) -> int:
    return int(Path(f"/proc/{worker.pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_forged_keys_and_messages_of_one_node_stop_neither_locks_nor_workers(
    hostile_stage: tuple[Stage, WorkerProcess],
) -> None:
    stage, worker = hostile_stage
    client = stage.nodes[0].client()
    with stage.tasks.patient.lock_for("k", wait=60) as held:
        result = stage.tasks.patient.delay("k", "a")
        stage.see_deferred(result)
        waiting = f"{PREFIX}:waiting:k:k"
        eventually(lambda: client.zcard(waiting) == 1)
        inbox = f"{PREFIX}:handoff:{client.zrange(waiting, 0, 0)[0]}"
        run_some(stage, 0)
        keys = set(map(str, client.keys(f"{PREFIX}:*"))) | {
            f"{PREFIX}:{name}" for name in ("run", "quiet", "fence", "terms", "tenure")
        }
        before, number = memory_of(worker), 0
        for value in VALUES:
            number += 1
            of_next = (f"lock:k:{number}", f"lock:u:{number}", f"waiting:k:{number}")
            for key in {*keys, *(f"{PREFIX}:{name}" for name in of_next)}:
                write(client, key, value)
            run_some(stage, number)
            assert held.held
        for channel in (inbox, f"{PREFIX}:wake:"):
            for message in messages(f"token{number}"):
                for _ in range(2):  # as if a majority of the nodes had said it
                    client.publish(channel, message)
            number += 1
            run_some(stage, number)
        assert held.held
        assert memory_of(worker) - before < MOST_MEMORY
        assert stage.runs_of("k") == 0
        assert_commands_work(client)
        urls = [node.url for node in stage.nodes]
        with Redlock(urls, node_timeout=PATIENCE, max_ttl=200) as redlock:
            redlock.trust()
            settle(redlock)
            with redlock.lock("r"):
                settle(redlock)
                assert all(node.client().exists(f"{PREFIX}:lock:r") for node in stage.nodes)
    assert result.get(timeout=60) == "a"
    for line in worker.output().splitlines():
        assert "\x1b[31m" not in line
        assert not line.startswith("line ")
    assert "Traceback" not in worker.output()
