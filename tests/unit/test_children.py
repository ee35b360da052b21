"""What a child writes down for its parent, torn at any byte; and the end of a process."""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, concurrency
from celery.concurrency.base import BasePool
from celery.concurrency.prefork import TaskPool
from hypothesis import example, given
from hypothesis import strategies as st

from celery_redlock.lock.client import Redlock, session_of
from celery_redlock.lock.engine.events import Events
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.lease import LockKey
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.tasks.children import reaper as reaper_module
from celery_redlock.tasks.children.journal import (
    CLAIMED,
    ENTRY_SIZE,
    HEADER_SIZE,
    HELD,
    MAX_ENTRIES,
    RELEASED,
    SIZE,
    JournalEntry,
    JournalSlot,
    encode_entry,
    parse_entry,
)
from celery_redlock.tasks.children.reaper import (
    ChildProcess,
    ChildReaper,
    Children,
    pid_has_exited,
    start_time_of,
    watch_children,
)
from celery_redlock.tasks.per_app import redlock_of
from tests import fork_server

NOWHERE = Redlock(["redis://127.0.0.1:1"])  # never connected to
IDENTITY = NOWHERE.session.identity
TEXTS = st.text(st.characters(codec=None), max_size=60)  # surrogates, too


@Celery("shop", set_as_current=False).task(name="shop.order", shared=False)
def order() -> None:
    """Own a lock."""


def holding_of(
    *resources: str, limit: int = 1, label: str = "label", redlock: Redlock = NOWHERE
) -> Acquisition:
    """Return what is about to be claimed, with a fresh token for each resource."""
    options = LockOptions(
        resources, ttl=30.0, wait=0.0, renew=True, max_hold=None, label=label, sender=order
    )
    keys = [LockKey("redlock", resource, 30.0, limit) for resource in resources]
    session = redlock.session
    holding = Acquisition(options, keys, session.current_owner())
    holding.leases = [session.acquirer.new_lease(options, key) for key in keys]
    return holding


def line_of(holding: Acquisition, session: bytes = IDENTITY) -> bytes:
    return encode_entry(session, 1.0, holding, holding.leases[0])


def a_line(resource: str = "k", label: str = "label") -> bytes:
    return line_of(holding_of(resource, label=label))


def a_slot(memory: bytearray | None = None) -> JournalSlot:
    """Return the slot of this process."""
    slot = JournalSlot(bytearray(SIZE) if memory is None else memory)
    slot.sign(os.getpid(), 0)
    return slot


def claim(slot: JournalSlot, holding: Acquisition, session: bytes = IDENTITY) -> None:
    for lease in holding.leases:
        slot.claiming(session, 1.0, holding, lease)


def read(slot: JournalSlot) -> list[JournalEntry]:
    return list(slot.read())


class Tape(bytearray):
    """Memory that remembers how it was written to."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.strokes: list[tuple[int, bytes]] = []

    def __setitem__(self, where: Any, what: Any) -> None:
        start = where.start if isinstance(where, slice) else where
        self.strokes.append((start, what if isinstance(where, slice) else bytes([what])))
        super().__setitem__(where, what)

    def cuts(self) -> Iterator[bytearray]:
        """Yield the memory, the same each time, after each byte that was ever written."""
        memory = bytearray(len(self))
        yield memory
        for start, stroke in self.strokes:
            for at, byte in enumerate(stroke, start):
                memory[at] = byte
                yield memory


@given(TEXTS, TEXTS, st.integers(0, 2**32 - 1))
def test_a_line_says_all_that_a_release_needs(resource: str, label: str, limit: int) -> None:
    holding = holding_of(resource, limit=limit, label=label)
    slot = a_slot()
    claim(slot, holding)
    slot.held(holding)
    [entry] = read(slot)
    assert (entry.resource, entry.limit, entry.ttl) == (resource, limit, 30.0)
    assert entry.value == holding.leases[0].value
    assert (entry.state, entry.task_name, entry.acquisition) == (HELD, "shop.order", holding.number)
    assert entry.is_requested
    assert entry.session == IDENTITY


class Name(str):
    """A kind of text of a user's own."""

    __slots__ = ()


def test_a_line_takes_any_kind_of_text_as_a_resource() -> None:
    slot = a_slot()
    claim(slot, holding_of(Name("k")))
    assert [entry.resource for entry in read(slot)] == ["k"]


def test_no_two_acquisitions_are_taken_for_one() -> None:
    """Also where the first one is forgotten, and only what it left is still to be released."""
    numbers = [parse_entry(HELD, a_line()).acquisition for _ in range(20)]  # type: ignore[union-attr]
    assert len(set(numbers)) == 20


DOES = st.one_of(
    st.tuples(st.just("claim"), st.text(max_size=8)),
    st.tuples(st.sampled_from(["hold", "release", "settle"]), st.integers(0, 3)),
)


@given(st.lists(DOES, min_size=1, max_size=8))
@example([("claim", "a"), ("hold", 0), ("settle", 0), ("claim", "b"), ("claim", "c")])
def test_a_child_that_is_killed_at_any_byte_leaves_whole_lines(doings: list[Any]) -> None:
    tape = Tape(SIZE)
    slot, lines, stages = a_slot(tape), [], [set()]
    for what, which in doings:
        if what == "claim":
            holding = holding_of(which)
            claim(slot, holding)
            lines.append([holding, CLAIMED])
        elif which < len(lines) and what == "settle":
            slot.settled(lines.pop(which)[0].leases[0])
        elif which < len(lines):
            holding, lines[which][1] = lines[which][0], HELD if what == "hold" else RELEASED
            (slot.held if what == "hold" else slot.released)(holding)
        stages.append({(state, line_of(holding)) for holding, state in lines})
    wanted = [{parse_entry(state, line) for state, line in stage} for stage in stages]
    seen = 0
    for memory in tape.cuts():
        found = set(read(JournalSlot(memory)))
        while found != wanted[seen]:
            seen += 1
            assert seen < len(wanted), "what stands there is neither the old nor the new"
    assert wanted[seen] == wanted[-1]


@given(st.binary(min_size=200, max_size=ENTRY_SIZE - 1), st.integers(1, 255))
def test_garbage_is_no_entry(garbage: bytes, state: int) -> None:
    assert parse_entry(state, garbage) is None


@given(st.integers(1, 200), st.integers(1, 255))
def test_a_line_that_was_scribbled_over_is_no_entry(where: int, change: int) -> None:
    line = bytearray(a_line("resource", "label" * 20))
    line[where % len(line)] ^= change
    assert parse_entry(HELD, bytes(line)) is None


def test_a_child_is_known_by_its_last_byte_alone() -> None:
    tape = Tape(SIZE)
    JournalSlot(tape).sign(4711, 123_456_789_012)
    *before, last = [JournalSlot(memory).child for memory in tape.cuts()]
    assert not any(before)
    assert last == (4711, 123_456_789_012)


def test_what_is_too_long_or_too_much_is_not_written_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tape = Tape(SIZE)
    slot = a_slot(tape)
    del tape.strokes[:]
    too_long = holding_of("k" * ENTRY_SIZE)
    claim(slot, too_long)
    slot.held(too_long)
    slot.released(too_long)
    slot.settled(too_long.leases[0])
    assert not tape.strokes
    many = [holding_of("k") for _ in range(MAX_ENTRIES)]
    for holding in many:
        claim(slot, holding)
    places = {start for start, stroke in tape.strokes if stroke == bytes([CLAIMED])}
    assert (min(places), max(places)) == (HEADER_SIZE, SIZE - ENTRY_SIZE)
    del tape.strokes[:]
    claim(slot, holding_of("one too many"))
    assert not tape.strokes
    slot.settled(many[7].leases[0])
    claim(slot, holding_of("again"))
    assert [entry.resource for entry in read(slot)].index("again") == 7
    assert [record.getMessage().count("expires with its ttl") for record in caplog.records] == [1]


def test_a_journal_follows_each_claim_from_its_request_to_its_last_release() -> None:
    slot = a_slot()
    holding = holding_of("one", "two")
    claim(slot, holding)
    assert [(e.resource, e.state) for e in read(slot)] == [("one", CLAIMED), ("two", CLAIMED)]
    slot.held(holding)
    assert {entry.state for entry in read(slot)} == {HELD}
    slot.released(holding)
    assert {entry.state for entry in read(slot)} == {RELEASED}
    for lease in holding.leases:
        slot.settled(lease)
        slot.settled(lease)  # also where a second release was under way
    assert read(slot) == []


def test_a_process_that_was_forked_without_a_hook_writes_nothing_in_its_parents_slot() -> None:
    slot = JournalSlot(bytearray(SIZE))
    slot.sign(os.getppid(), 0)
    claim(slot, holding_of("k"))
    assert read(slot) == []


class ForkingPool(BasePool):
    """One of another author's, that may fork."""


class PreforkOfTheirs(TaskPool):
    """Celery's own, made a little different."""


class GreenPool(BasePool):
    """One of greenlets."""

    is_green = True


@pytest.mark.parametrize(
    ("pool", "forks"),
    [
        *((pool, True) for pool in ("prefork", "processes", concurrency.ALIASES["prefork"])),
        *((pool, False) for pool in ("solo", "threads", "gevent")),
        ("celery.concurrency.thread:TaskPool", False),
        *((pool, True) for pool in (f"{__name__}:ForkingPool", f"{__name__}:PreforkOfTheirs")),
        (f"{__name__}:GreenPool", False),
        (concurrency.get_implementation("prefork"), True),
        (concurrency.get_implementation("solo"), False),
        (concurrency.get_implementation("threads"), False),
    ],
    ids=str,
)
def test_only_a_pool_that_may_fork_is_looked_after(
    pool: object, forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper_module.this_process, "children", None)
    monkeypatch.setattr(Events, "sending", Events.sending)
    known = reaper_module.expect_children(SimpleNamespace(pool_cls=pool))
    assert (known is not None) == forks
    looks = SimpleNamespace(uses_semaphore=True, num_processes=2)
    watch_children(None, looks)  # no child, no thread
    assert known is None or not known.has_reaper


def test_slots_that_no_child_ever_signed_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper_module, "MAX_UNWATCHED", 3)
    made = Children()
    for _ in range(10):
        made.before_fork()
        made.after_fork()
    assert len(made.slots) == 3


def test_a_fork_waits_until_signals_of_a_release_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper_module, "FORK_WAIT", 0.01)
    made = Children()
    made.before_fork()
    assert not made.sending.acquire(False)
    made.after_fork()
    assert made.sending.acquire(False)
    made.before_fork()  # not for ever
    made.after_fork()
    assert not made.sending.acquire(False), "it was another's"


def test_forks_of_two_threads_at_once_have_a_slot_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper_module, "FORK_WAIT", 0.01)
    made = Children()
    made.before_fork()
    [own] = made.slots
    other = threading.Thread(target=made.before_fork)
    other.start()
    other.join()
    made.become_child()
    assert own.child is not None
    assert own.child[0] == os.getpid()


GENERATIONS = """
import os
from types import SimpleNamespace
from celery_redlock.lock.engine.events import Events
from celery_redlock.tasks.children import reaper as reaper_module

def fork(run):
    pid = os.fork()
    if not pid:
        try:
            run()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return pid

def say(who):
    children, slot = reaper_module.this_process.children, reaper_module.this_process.slot
    has_journal = Events.journal is not None and Events.journal is slot
    waits = children is not None and Events.sending is children.sending
    print(who, "journal" if has_journal else "-", "mutex" if waits else "-", flush=True)

def child():
    say("child")
    fork(lambda: say("grandchild"))
    say("child")

fork(lambda: say("of no pool"))
slots = reaper_module.expect_children(SimpleNamespace(pool_cls="prefork")).slots
pids = [fork(child), fork(child)]
assert [slot.child[0] for slot in slots] == pids
say("parent")
"""


@pytest.mark.xdist_group("fork server")
def test_each_child_writes_in_its_own_slot_and_a_childs_child_in_none() -> None:
    made = fork_server.run([sys.executable, "-c", GENERATIONS], check=True, package=False)
    child = ["child journal -", "grandchild - -", "child journal -"]
    assert made.stdout.splitlines() == ["of no pool - -", *child, *child, "parent - mutex"]


@pytest.fixture(params=["pidfd", "waitid", "kill"])
def process(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that runs, on a system with less and less to watch it by."""
    for name in {"pidfd": [], "waitid": ["pidfd_open"], "kill": ["pidfd_open", "waitid"]}[
        request.param
    ]:
        monkeypatch.delattr(os, name)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def gone(process: ChildProcess) -> bool:
    """Tell whether it is gone, after a look at its descriptor where it has one."""
    ready = []
    if process.descriptor >= 0:
        ready, _, _ = select.select([process.descriptor], [], [], 0)
    return process.has_exited(set(ready))


def test_a_process_is_gone_when_it_is_dead_and_not_before(process: subprocess.Popen[bytes]) -> None:
    watched = ChildProcess(process.pid, start_time_of(process.pid))
    assert not gone(watched)
    process.send_signal(signal.SIGSTOP)
    assert not gone(watched)
    process.kill()
    if hasattr(os, "waitid"):  # it shows also while nobody has waited for it
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    else:
        process.wait()
    assert gone(watched)
    assert process.wait() == -signal.SIGKILL  # left to whom it belongs
    assert gone(watched)
    assert gone(ChildProcess(process.pid, 1))
    assert pid_has_exited(process.pid)
    watched.close()
    watched.close()


def test_a_pid_that_is_anothers_by_now_is_gone(process: subprocess.Popen[bytes]) -> None:
    watched = ChildProcess(process.pid, start_time_of(process.pid) + 1)
    assert gone(watched)
    watched.close()


@pytest.mark.parametrize("unknown", ["to the child", "to the parent", "later"])
def test_a_process_of_which_nobody_can_say_when_it_started_is_not_gone(
    process: subprocess.Popen[bytes], unknown: str
) -> None:
    started = 0 if unknown == "to the child" else start_time_of(process.pid)
    if unknown == "to the parent":
        with no_descriptor_left():
            watched = ChildProcess(process.pid, started)
    else:
        watched = ChildProcess(process.pid, started)
    if unknown == "later":
        with no_descriptor_left():
            assert not watched.has_exited(set())
    assert not gone(watched)
    process.kill()
    process.wait()
    assert gone(watched)
    watched.close()


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Let this process open nothing, as one that has all the descriptors that it may."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    ("state", "warns"), [(CLAIMED, True), (HELD, True), (RELEASED, False)]
)  # fmt: skip
def test_the_parent_warns_of_a_ttl_only_where_something_may_be_left(
    caplog: pytest.LogCaptureFixture, state: int, warns: bool
) -> None:
    strangers = Redlock(["redis://127.0.0.1:2"])
    holding = holding_of("k", redlock=strangers)
    identity = strangers.session.identity
    slot = JournalSlot()
    slot.sign(os.getpid(), 0)
    claim(slot, holding, identity)
    if state != CLAIMED:
        (slot.held if state == HELD else slot.released)(holding)
    strangers.close()
    del strangers, holding
    gc.collect()
    assert session_of(identity) is None  # so that it is of nodes that this process does not know
    app = Celery("warns", set_as_current=False)
    app.conf.redlock_nodes = ["redis://127.0.0.1:1"]
    known = Children()
    known.slots.append(slot)
    known.watched[slot] = process = ChildProcess(os.getpid(), start_time_of(os.getpid()))
    with redlock_of(app):
        assert ChildReaper(known, app).reap(slot, process) == []
    assert ("expires with its ttl" in caplog.text) == warns


def test_a_child_is_told_that_its_run_was_ended_and_no_other_child_or_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = [JournalSlot(), JournalSlot(), JournalSlot()]
    for pid, slot in enumerate(slots[:2], start=1):
        slot.sign(pid, 0)
    known = Children()
    known.slots += slots
    slots[2].close()  # of one that was reaped meanwhile
    monkeypatch.setattr(reaper_module.this_process, "children", known)
    reaper_module.announce_end(1, "a run")
    reaper_module.announce_end(3, "a run")
    assert [slot.is_end_announced("a run") for slot in slots[:2]] == [True, False]
    assert not slots[0].is_end_announced("another run")


def test_a_release_that_fails_leaves_out_no_other_and_closes_the_slot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slot = JournalSlot()
    slot.sign(os.getpid(), 0)
    for name in ("first", "second"):
        claim(slot, holding_of(name))

    def fail(identity: bytes) -> None:
        raise OSError("a release")

    known = Children()
    known.slots.append(slot)
    known.watched[slot] = process = ChildProcess(os.getpid(), 0)
    monkeypatch.setattr(reaper_module, "session_of", fail)
    assert ChildReaper(known, Celery("reaps", set_as_current=False)).reap(slot, process) == []
    told = [record.getMessage().split("'")[1] for record in caplog.records]
    assert sorted(told) == ["first", "second"]
    with pytest.raises(ValueError, match="closed"):
        read(slot)
