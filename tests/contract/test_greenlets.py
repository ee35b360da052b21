"""Greenlets: many of one process exclude each other, and one that is killed leaves nothing behind.

Each story runs in a process of its own, which patches itself before anything else is imported.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from celery_redlock.testing import EmbeddedNode
from tests.conftest import NODE_TIMEOUT, TTL, Nodes, see_freed
from tests.contract import stories
from tests.contract.proxy import Proxy, proxies
from tests.contract.stories import GEVENT, PLAIN, TOGETHER, UNPATCHED

pytestmark = TOGETHER

THREADS = """
import threading
from time import sleep
def spawn(work):
    thread = threading.Thread(target=work)
    thread.start()
    return thread
def join(threads): [thread.join() for thread in threads]
"""
PATCHES = [UNPATCHED, "patch_socket()", "patch_all(thread=False)", GEVENT]
EACH_PATCH = pytest.mark.parametrize("patch", PATCHES, ids=["unpatched", *PATCHES[1:]])


def tell(
    patch: str, story: str, nodes: Sequence[EmbeddedNode | Proxy],
    environment: Mapping[str, str] | None = None,
) -> Any:  # fmt: skip
    """Run a story over `redlock`; returns the value of what it leaves as `told`."""
    frame = (
        f"TTL, URLS = {TTL}, {[node.url for node in nodes]}\n"
        f"with Redlock(URLS, node_timeout={NODE_TIMEOUT}) as redlock:\n"
    )
    body = "".join(f"    {line}\n" for line in story.splitlines())
    return stories.tell(patch, frame + body, environment)


def test_greenlets_exclude_each_other_and_all_get_their_turn(nodes: Nodes) -> None:
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
    assert tell(GEVENT, story, nodes) == {"most": 1, "count": 60}


def test_many_locks_at_once_share_one_connection_a_node(nodes: Nodes) -> None:
    story = """
held = []
def work(n):
    with redlock.lock(f"r{n}", ttl=TTL, wait=60) as lock:
        held.append(lock)
        while len(held) < 40:
            sleep(0.01)
join([spawn(work, n) for n in range(40)])
while ask_nodes(redlock.session).failing:  # the locks may be over before the third node answers
    pass
ours = [node.connection.socket.fileno() for node in redlock.session.nodes.all]
told = {"held": len(held), "connections": len(set(ours))}
"""
    assert tell(GEVENT, story, nodes) == {"held": 40, "connections": len(nodes)}
    see_freed(nodes, "r39")


def test_what_one_nests_another_one_is_refused(nodes: Nodes) -> None:
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
join([spawn(sibling, 60)])
told = seen
"""
    assert tell(GEVENT, story, nodes) == [False, True, False, True, True]


def test_a_killed_one_leaves_no_lock_and_no_shifted_reply(nodes: Nodes) -> None:
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
free = [redlock.lock(f"r{n}").try_acquire(wait=60) for n in range(7)]
told = {"killed": killed[0] > 10, "free": all(free)}
"""
    assert tell(GEVENT, story, nodes) == {"killed": True, "free": True}
    # the process is over: what it still held when it ended stands for a ttl at most


@EACH_PATCH
def test_greenlets_exclude_each_other_whatever_is_patched(patch: str, nodes: Nodes) -> None:
    story = """
inside, most, done = [0], [0], [0]
def work():
    with redlock.lock("r", ttl=TTL, wait=60) as lock, redlock.lock("r") as nested:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        sleep(0.01)
        assert lock.held and nested.held
        inside[0] -= 1
    done[0] += 1
join([spawn(work) for _ in range(5)])
told = {"most": most[0], "done": done[0]}
"""
    assert tell(patch, story, nodes) == {"most": 1, "done": 5}


@pytest.mark.slow
@EACH_PATCH
def test_greenlets_run_while_another_one_waits(patch: str, nodes: Nodes) -> None:
    """The lock is released after some turns of another greenlet, or the wait is in vain."""
    story = """
began, told = [], []
holder = redlock.lock("r").acquire(wait=60)
def wait():
    began.append(True)
    told.append(redlock.lock("r").try_acquire(wait=30))
waiting = spawn(wait)
while not began:
    sleep(0.001)
for _ in range(50):
    sleep(0.001)
told.append("ticked")
holder.release()
join([waiting])
"""
    assert tell(patch, story, nodes) == ["ticked", True]


# the module of each of gevent's event loops
LOOPS = {
    "libev-cext": "gevent.libev.corecext",
    "libev-cffi": "gevent.libev.corecffi",
    "libuv-cffi": "gevent.libuv.loop",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_another_thread_wakes_a_greenlet_that_sleeps(loop: str, nodes: Nodes) -> None:
    story = """
from celery_redlock.lock.platform.threads import new_sleeper, start_thread
woken, resting = [], []
def rest():
    mine = new_sleeper()
    mine.wake()
    early = mine.sleep(float("inf"))
    late = mine.sleep(0.001)  # the wake-up above counts once
    resting.append(mine)
    woken.append((early, late, mine.sleep(float("inf"))))
def wake():
    for sleeper in resting:
        sleeper.wake()
        sleeper.wake()
before = len(os.listdir("/proc/self/fd"))
all_of_them = [spawn(rest) for _ in range(400)]
while len(resting) < 400:
    sleep(0.001)
few = len(os.listdir("/proc/self/fd")) - before < 10
start_thread(wake)
join(all_of_them)
loop = type(gevent.get_hub().loop).__module__
told = {"woken": woken, "few": few, "loop": loop}
"""
    told = tell(GEVENT, story, nodes, {"GEVENT_LOOP": loop})
    assert told["woken"] == [[True, False, True]] * 400
    assert told["few"]
    assert told["loop"] == LOOPS[loop]


NO_HUB = pytest.mark.redis_only("a thread that connects needs descriptors for a hub")


@pytest.mark.parametrize(
    ("patch", "flows"),
    [
        pytest.param(PLAIN, THREADS, id="threads"),
        pytest.param(GEVENT, "", id="greenlets", marks=NO_HUB),
    ],
)
def test_many_wait_and_locks_are_renewed_while_no_descriptor_is_left(
    patch: str, flows: str, nodes: Nodes
) -> None:
    story = (
        flows
        + """
import resource
from celery_redlock.errors import QuorumUnreachable
began, got, taken = [], [], []
kept = redlock.lock("kept", ttl=TTL).acquire(wait=60)
first = redlock.lock("r", ttl=TTL).acquire(wait=60)
fresh = Redlock(URLS, node_timeout=redlock.node_timeout)
sleep(0)  # the hub has its own descriptors by now
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
def work():
    began.append(None)
    with redlock.lock("r", ttl=TTL, wait=150):
        got.append(kept.held)
waiting = [spawn(work) for _ in range(40)]
while len(began) < 40:
    sleep(0.001)
kept.extend()
first.release()
join(waiting)
try:
    refused = fresh.lock("other").acquire()
except QuorumUnreachable:
    refused = True
for descriptor in taken:
    os.close(descriptor)
kept.release()
free = fresh.lock("kept").try_acquire(wait=60) and fresh.lock("other").try_acquire(wait=60)
told = {"got": got, "refused": refused, "free": free}
"""
    )
    assert tell(patch, story, nodes) == {"got": [True] * 40, "refused": True, "free": True}


def test_greenlets_without_a_hub_exclude_each_other(nodes: Nodes) -> None:
    story = """
from greenlet import getcurrent, greenlet
main, seen = getcurrent(), []
def work():
    with redlock.lock("r", ttl=TTL, wait=60) as lock:
        main.switch()
        seen.append(lock.held)
one = greenlet(work)
one.switch()
seen.append(redlock.lock("r").try_acquire())
greenlet(lambda: seen.append(redlock.lock("r").try_acquire())).switch()
one.switch()
seen.append(redlock.lock("r").try_acquire(60))
told = seen
"""
    assert tell(PLAIN, story, nodes) == [False, False, True, True]


def test_what_a_task_holds_it_takes_again_in_a_greenlet_that_it_drives(nodes: Nodes) -> None:
    story = """
import asyncio
from greenlet import getcurrent, greenlet
seen = []
def nest():  # as SQLAlchemy's run_sync has it: a greenlet that gives way to the task's own
    with redlock.lock("r") as again:
        getcurrent().parent.switch()
        seen.append(again.held)
async def drive():
    one = greenlet(nest)
    one.switch()
    await asyncio.sleep(0.01)
    one.switch()
async def sibling():
    seen.append(redlock.lock("r").try_acquire())
async def story():
    with redlock.lock("r", ttl=TTL, wait=60):
        await asyncio.create_task(sibling())
        await drive()
asyncio.run(story())
told = seen
"""
    assert tell(PLAIN, story, nodes) == [False, True]


ROUND_TRIPS = 20  # a handshake takes a part of them


def test_a_connection_may_break_while_greenlets_wait_for_its_node(nodes: Nodes) -> None:
    story = """
import logging
from celery_redlock.errors import RedlockError
broken = []
class Count(logging.Handler):
    def emit(self, record):
        if record.event == "node_failed":
            broken.append(record.node)
logging.getLogger("celery_redlock").addHandler(Count())
logging.getLogger("celery_redlock").propagate = False
def work(n):
    while len(broken) < 20:
        try:
            with redlock.lock(f"r{n}", ttl=TTL, wait=5):
                sleep(0.001)
        except RedlockError:
            sleep(0.001)  # too many nodes are cut off at this moment
join([spawn(work, n % 10) for n in range(20)])
told = len(broken)
"""
    with proxies(nodes) as network, cut_again_and_again(network):
        assert tell(GEVENT, story, network) >= 20


@contextlib.contextmanager
def cut_again_and_again(network: Sequence[Proxy]) -> Iterator[None]:
    """Reset the connections of one node after the other, until the end.

    Each is used before that: on a busy machine a handshake takes longer than any fixed pause.
    """
    over = threading.Event()

    def cut() -> None:
        for proxy in itertools.cycle(network):
            enough = proxy.round_trips + ROUND_TRIPS
            while proxy.round_trips < enough:
                if over.wait(0.03):
                    return
            proxy.cut()

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
