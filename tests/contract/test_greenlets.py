"""Greenlets: many of one process exclude each other, and one that is killed leaves nothing behind.

Each story runs in a process of its own, which patches itself before anything else is imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from celery_redlock.testing import EmbeddedNode
from tests.conftest import NODE_TIMEOUT, TTL, see_freed

GEVENT = """
import gevent.monkey
gevent.monkey.patch_all()
import gevent
spawn, kill, sleep = gevent.spawn, gevent.kill, gevent.sleep
def join(greenlets): gevent.joinall(greenlets)
Exit = gevent.GreenletExit
"""
EVENTLET = """
import eventlet
eventlet.monkey_patch()
import greenlet
spawn, kill, sleep = eventlet.spawn, eventlet.kill, eventlet.sleep
def join(greenlets):
    for one in greenlets:
        try:
            one.wait()
        except greenlet.GreenletExit:
            pass
Exit = greenlet.GreenletExit
"""
BOTH = pytest.mark.parametrize("patch", [GEVENT, EVENTLET], ids=["gevent", "eventlet"])


def tell(patch: str, story: str, nodes: list[EmbeddedNode]) -> Any:
    """Run a story over `redlock`; returns the value of what it leaves as `told`."""
    urls = [node.url for node in nodes]
    frame = (
        f"{patch}\nimport json, random, time\nfrom celery_redlock import Redlock, LockTaken\n"
        "from celery_redlock.lock.inspection import ask_nodes\n"
        f"TTL = {TTL}\nwith Redlock({urls}, node_timeout={NODE_TIMEOUT}) as redlock:\n"
    )
    body = "".join(f"    {line}\n" for line in story.splitlines())
    script = f"{frame}{body}    print(json.dumps(told))\n"
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@BOTH
def test_greenlets_exclude_each_other_and_all_get_their_turn(
    patch: str, nodes: list[EmbeddedNode]
) -> None:
    story = """
inside, most, count = [0], [0], [0]
def work():
    for _ in range(5):
        with redlock.lock("r", wait=150) as lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            before = count[0]
            sleep(0.002)
            count[0] = before + 1
            assert lock.held
            inside[0] -= 1
join([spawn(work) for _ in range(12)])
told = {"most": most[0], "count": count[0]}
"""
    assert tell(patch, story, nodes) == {"most": 1, "count": 60}


@BOTH
def test_many_locks_at_once_share_one_connection_a_node(
    patch: str, nodes: list[EmbeddedNode]
) -> None:
    story = """
held = []
def work(n):
    with redlock.lock(f"r{n}", ttl=TTL, wait=60) as lock:
        held.append(lock)
        while len(held) < 40:
            sleep(0.01)
join([spawn(work, n) for n in range(40)])
while ask_nodes(redlock).failing:  # two nodes suffice, and the locks may be over before the third
    pass
ours = [node.wire.socket.getsockname()[1] for node in redlock.session.quorum.nodes]
told = {"held": len(held), "connections": len(set(ours))}
"""
    assert tell(patch, story, nodes) == {"held": 40, "connections": 3}
    see_freed(nodes, "r39")


@BOTH
def test_one_that_waits_does_not_hold_up_the_others(patch: str, nodes: list[EmbeddedNode]) -> None:
    story = """
ticks, done = [0], []
holder = redlock.lock("r", ttl=TTL).acquire(wait=60)
def tick():
    while not done:
        ticks[0] += 1
        sleep(0.001)
def wait():
    try:
        redlock.lock("r").acquire(wait=7)  # a stall of 5 s leaves time for ticks
    except LockTaken:
        done.append("taken")
    finally:
        done.append("over")
join([spawn(tick), spawn(wait)])
holder.release()
told = {"ticked": ticks[0] > 50, "done": done}
"""
    assert tell(patch, story, nodes) == {"ticked": True, "done": ["taken", "over"]}


@BOTH
def test_what_one_nests_another_one_is_refused(patch: str, nodes: list[EmbeddedNode]) -> None:
    story = """
seen = []
def sibling(wait=0):
    seen.append(redlock.lock("r").try_acquire(wait))
def nest():
    with redlock.lock("r", wait=60) as lock:
        with redlock.lock("r") as again:
            join([spawn(sibling)])
            seen.append(again.held)
        join([spawn(sibling)])
        seen.append(lock.held)
join([spawn(nest)])
join([spawn(sibling, 20)])
told = seen
"""
    assert tell(patch, story, nodes) == [False, True, False, True, True]


@BOTH
def test_a_killed_one_leaves_no_lock_and_no_shifted_reply(
    patch: str, nodes: list[EmbeddedNode]
) -> None:
    story = """
killed = [0]
def work(n):
    try:
        with redlock.lock(f"r{n % 7}", wait=60):
            sleep(0.01)
    except Exit:
        killed[0] += 1
        raise
for turn in range(60):
    some = [spawn(work, turn + k) for k in range(4)]
    sleep(random.uniform(0, 0.02))
    for one in some[:2]:
        kill(one)
    join(some)
free = [redlock.lock(f"r{n}").try_acquire(wait=20) for n in range(7)]
told = {"killed": killed[0] > 10, "free": all(free)}
"""
    assert tell(patch, story, nodes) == {"killed": True, "free": True}
    # the process is over: what it still held when it ended stands for a ttl at most
