"""Those in this process that wait for a lock, and what the nodes know of them.

The nodes know since when this process waits for a resource, and a release names the first processes
on their inboxes. A message is only a hint: who is named makes an ordinary round. An `Inbox` has one
name for a `Line`: `Callers` are the threads and coroutines in `Lock.acquire`, a worker's waiting
messages are the other one. What one that waits does next: `model/handoff.py`.
"""

from __future__ import annotations

import functools
import math
import os
import socket
from collections.abc import Callable, Collection
from typing import Any, Protocol

from celery_redlock.lock.engine.rounds import PlaceRound
from celery_redlock.lock.model.handoff import (
    ACTED,
    FALLBACK,
    LADDER,
    LOOK,
    TURN,
    Named,
    Namings,
    Place,
    Step,
)
from celery_redlock.lock.model.keys import inbox_channel
from celery_redlock.lock.model.votes import quorum_of
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.platform.coroutines import ThreadPool, WorkItem
from celery_redlock.lock.server.requests import MOST_ASKED, REGISTER
from celery_redlock.lock.server.restart_guard import Servers
from celery_redlock.lock.transport.command import IGNORE_REPLY, Command
from celery_redlock.lock.transport.subscriber import Subscriber

LONGEST_SPIN = 1.0  # seconds between two tries of a caller that no release can name
LOOK_AGAIN = 3 * TURN  # seconds between two looks for which no majority names this process
Report = Callable[[Place | None], object]
Question = tuple[float, int, tuple[Report, ...]]  # since, passed, and reports of its reply
OnMessage = Callable[[str, str, int], object]


class Line(Protocol):
    """Those in this process that wait under one name."""

    def since(self, resource: str) -> float | None:
        """Return since when the first one waits for a resource; None if nobody does."""

    def resources(self) -> Collection[str]:
        """Return the resources that somebody waits for; called by any thread."""

    def on_step(self, resource: str, step: Step, due: float) -> None:
        """Learn that a release names this process. due: monotonic seconds. Must not wait."""

    def on_listening(self) -> None:
        """Learn that the inbox opens on a node, which may have announced releases before."""


class Inbox:
    """One name of this process on the nodes, and a subscriber connection to each of them.

    The connections are made for the first one that waits. drain_by: has replies read by a monotonic
    second. threads: in which `ask` waits for replies. host: the beginning of the name. channels:
    returns other channels to hear, whose messages go to on_other as (channel, message, node).
    """

    def __init__(
        self,
        servers: Servers,
        threads: ThreadPool,
        drain_by: Callable[[float], None],
        platform: Platform,
        line: Line,
        host: str = "",
        channels: Callable[[], set[str]] = set,
        on_other: OnMessage | None = None,
    ) -> None:
        self._servers, self._threads, self._drain_by = servers, threads, drain_by
        self._platform, self._line, self._host = platform, line, host or socket.gethostname()
        self._others, self._on_other = channels, on_other
        self.forget()

    def forget(self) -> None:
        """Reset in a forked child, which gets another name: connections stay with the parent."""
        options, token = self._servers.options, self._platform.new_token()
        self.name = f"{self._host}:{os.getpid()}:{token[:8]}"
        self.channel = inbox_channel(options.prefix, self.name)
        self._subscribers: dict[None, list[Subscriber]] = {}
        self._registered: dict[str, float] = {}  # by resource: since when, as the nodes know it
        self._struck_at: dict[int, float] = {}  # monotonic seconds, by node
        # by resource and limit: the one in flight, and the next one
        self._questions: dict[tuple[str, int], list[Question]] = {}
        self._counting = self._platform.new_mutex()
        self._namings = Namings(quorum_of(len(self._servers.nodes.nodes)))

    # what the nodes know

    def changed(self, resource: str) -> None:
        """Let the nodes know since when the first one waits, or that nobody does. Never waits."""
        since, known = self._line.since(resource), self._registered.get(resource)
        if since is None:
            if known is not None:
                self._unregister(resource)
            return
        self.listen()
        if known is None:
            if self.is_listening:  # before, a release would take this process for dead
                self._write(self._register(resource, since), REGISTER)
        elif known != since:
            self._registered[resource] = since
            self._write(self._servers.requests.update(self.name, resource, since))

    def _register(self, resource: str, since: float, limit: int = 0, passed: int = 0) -> bytes:
        self._registered[resource] = since
        return self._servers.requests.register(self.name, resource, since, limit, passed)

    def _unregister(self, resource: str) -> None:
        self._write(self._servers.requests.unregister(self.name, resource))
        self._registered.pop(resource, None)  # last: an exception may cut this off before
        if self._line.since(resource) is not None:  # another thread has begun to wait meanwhile
            self.changed(resource)

    def _strike(self, resource: str, node: int) -> None:
        """Let one node forget a registration that came late, or that was not undone.

        No other node, and once a turn: one that sends any number of messages causes few commands,
        and to itself alone.
        """
        now = self._platform.clock.now()
        if now - self._struck_at.get(node, -math.inf) < TURN:
            return  # each release names this process again
        self._struck_at[node] = now
        request = self._servers.requests.unregister(self.name, resource)
        self._servers.nodes.send_to(node, Command(request, IGNORE_REPLY))
        self._drain_by(now + self._servers.nodes.timeout)
        if resource in self._line.resources():  # somebody has begun to wait meanwhile
            self._line.on_listening()

    def register_again(self, resource: str) -> None:
        """Register anew: another process may have taken this one for dead. Never waits."""
        since = self._line.since(resource)
        if since is not None and self.is_listening:
            self._write(self._register(resource, since), REGISTER)

    def _write(self, request: bytes, script: Any = None) -> None:
        nodes = self._servers.nodes
        now = nodes.clock.now()
        nodes.broadcast(Command(request, IGNORE_REPLY, script), now)
        self._drain_by(now + nodes.timeout)

    def leave(self) -> None:
        """Let the nodes forget this name."""
        for resource in list(self._registered):
            self._registered.pop(resource, None)
            self._write(self._servers.requests.unregister(self.name, resource))

    # whose turn it is

    def place(self, resource: str, limit: int, passed: int) -> Place | None:
        """Register, and return how this process stands; None if the nodes do not say. Waits.

        passed: how many before it have had their turn: they leave the nodes' sets if a permit is
        free. None also if no release would name this process, or if the lock has more permits than
        one question asks about.
        """
        since = self._line.since(resource)
        if since is None or limit > MOST_ASKED or not self.is_listening:
            return None
        round_, until = self._send(resource, limit, since, passed)
        self._servers.nodes.wait(round_, until)
        return round_.place

    def ask(self, resource: str, limit: int, passed: int, report: Report) -> None:
        """Do what `place` does without waiting; report: called in another thread.

        One question for each resource and limit is in flight: those that come meanwhile follow as
        one, so that a flood of messages makes no flood of questions.
        """
        since = self._line.since(resource)
        if since is None or limit > MOST_ASKED:
            report(None)
            return
        asked = resource, limit
        with self._counting:
            questions = self._questions.setdefault(asked, [])
            is_in_flight = bool(questions)
            reports: tuple[Report, ...] = questions[1][2] if questions[1:] else ()
            question = since, passed, (*reports, report)
            questions[1:] = [question]
        if not is_in_flight:
            self._ask(asked, question)

    def _ask(self, asked: tuple[str, int], question: Question) -> None:
        since, passed, reports = question

        def wait() -> None:
            self._servers.nodes.wait(round_, until, native=True)

        def on_place() -> None:
            with self._counting:
                following = self._questions.pop(asked, [])[1:]
                if following:
                    self._questions[asked] = following
            if following:
                self._ask(asked, following[0])
            for report in reports:
                report(round_.place)

        try:
            round_, until = self._send(*asked, since, passed)
            self._threads.add(WorkItem(wait, on_place))
        except BaseException:  # for example, no thread can be started: later questions are asked
            with self._counting:
                self._questions.pop(asked, None)
            raise

    def _send(
        self, resource: str, limit: int, since: float, passed: int
    ) -> tuple[PlaceRound, float]:
        """Send a question; return it, and until when replies count, in monotonic seconds."""
        nodes = self._servers.nodes
        request = self._register(resource, since, limit, passed)
        round_, now = PlaceRound(len(nodes.nodes)), nodes.clock.now()
        nodes.broadcast(Command(request, round_, REGISTER), now)
        return round_, now + nodes.timeout

    # what the nodes say

    def channels(self) -> set[str]:
        """Return the channels to subscribe to; called by any thread."""
        return self._others() | ({self.channel} if self._line.resources() else set())

    def listen(self) -> None:
        """Have each subscriber that lacks a subscription make it. Never waits."""
        if not self._subscribers:
            servers = self._servers
            how = servers.options.node_timeout, self._platform, self.channels
            new = self._platform.new_subscriber or Subscriber
            made = [
                new(node.address, *how, functools.partial(self.on_message, node=node.index))
                for node in servers.nodes.nodes
            ]
            self._subscribers.setdefault(None, made)
        channels = self.channels()
        for subscriber in self._subscribers[None]:
            if not channels <= subscriber.confirmed:
                subscriber.resubscribe()

    def subscriptions(self, channel: str) -> int:
        """Return how many nodes have confirmed the subscription to a channel."""
        return sum(channel in one.confirmed for one in self._subscribers.get(None, []))

    @property
    def is_listening(self) -> bool:
        """Whether at least one node can name this process."""
        return self.subscriptions(self.channel) > 0

    def on_message(self, channel: str, message: str, node: int) -> None:
        """Take one node's message; "" as a subscription begins. In the subscribers' threads."""
        if channel != self.channel:
            if self._on_other is not None:
                self._on_other(channel, message, node)
            return
        if not message:
            self._line.on_listening()  # the node may have forgotten this process
            return
        named = Named.parse(message, self._servers.options.prefix)
        if named is None:
            return
        if named.resource not in self._line.resources():
            self._strike(named.resource, node)
            return
        with self._counting:
            turns = self._namings.turns(named, node)
        if turns is None:
            return
        now = self._platform.clock.now()
        is_agreed = named.rank == turns  # else the nodes differ, or a majority has not spoken yet
        why = FALLBACK if not is_agreed else LADDER if turns else ACTED
        self._line.on_step(named.resource, Step(why, turns, now), now + turns * TURN)

    def close(self) -> None:
        """Close the connections for ever."""
        for subscriber in self._subscribers.get(None, []):
            subscriber.close()


class Caller:
    """A thread or coroutine that waits until a lock may be free; it sleeps on its own wake-up.

    resource: that it waits for; of several, the one that refused it. limit: of its lock, because a
    resource may be free for a higher limit only. since: seconds since 1970 by the nodes' clocks.
    step, due: why it may act, and from which monotonic second; None and inf: not yet. looked_at:
    the monotonic second of its last look at the nodes. was_first: it leaves as the first one.
    """

    __slots__ = ("decided", "due", "limit", "looked_at", "resource", "since", "step", "wake",
                 "was_first")  # fmt: skip

    def __init__(self, resource: str, limit: int, since: float) -> None:
        self.resource, self.limit, self.since = resource, limit, since
        self.step: Step | None = None
        self.due, self.looked_at = math.inf, -math.inf
        self.decided = self.was_first = False
        self.wake: Callable[[], None] | None = None

    def wake_up(self) -> None:
        """Wake the caller. Never waits."""
        self.decided = True
        wake = self.wake
        if wake is not None:
            wake()

    def plan(self, step: Step, due: float) -> None:
        """Let the caller act at a monotonic second; a step that is due before is never put off.

        If it were put off by each release, a stopped process in front would stay there for as long
        as releases follow each other faster than turns.
        """
        if due < self.due:
            self.step, self.due = step, due
            self.wake_up()

    def take_step(self, now: float) -> Step | None:
        """Return the step that is due, once."""
        if self.due > now:
            return None
        self.due = math.inf  # first: a step that comes now is for the next time
        step, self.step = self.step, None
        return step


class Callers:
    """The callers of this process that wait, by resource and in order of arrival.

    Of the callers for one lock only the first of each limit looks at the nodes, and only this one
    is told of a release: the others would collide. Each change is atomic and needs no mutex. So a
    finalizer or a signal handler may interrupt a change and wait for a lock, too.
    """

    def __init__(self, new_inbox: Callable[[Line], Inbox], platform: Platform) -> None:
        self._clock = platform.clock
        self._lines: dict[str, dict[int, Caller]] = {}
        self.inbox = new_inbox(self)

    def forget(self) -> None:
        """Reset in a forked child: no caller of its parent waits in it."""
        self._lines = {}
        self.inbox.forget()

    def join(self, caller: Caller) -> None:
        """Let a caller wait. The first one is to ask: a release may have come before it joined."""
        self._add(caller)
        if self.inbox.is_listening and self.first_of(caller) is caller:
            caller.plan(Step(LOOK), self._clock.now())  # which registers it, too
        else:
            self.inbox.changed(caller.resource)

    def _add(self, caller: Caller) -> None:
        while True:
            line = self._lines.setdefault(caller.resource, {})
            line[id(caller)] = caller
            if self._lines.get(caller.resource) is line:
                return
            line.pop(id(caller), None)  # another thread has just removed the empty line

    def leave(self, caller: Caller, *, acquired: bool = False) -> None:
        """Let a caller wait no more; the next one goes on for it. A second call has no effect.

        acquired: it has the lock, so that the next one need not ask whether it is free. Of several
        permits more may be.
        """
        # kept in the caller: an exception may cut this off, and it is called again
        caller.was_first = caller.was_first or self.first_of(caller) is caller
        self._remove(caller)
        following = self.first_of(caller)
        if following is not None and caller.was_first:
            following.looked_at = self._clock.now()
            if caller.step is not None:
                following.plan(caller.step, caller.due)
            elif not acquired or caller.limit > 1:
                following.plan(Step(LOOK), following.looked_at)
            following.wake_up()
        caller.was_first = False
        if following is not None and acquired:  # another process may have taken this one for dead
            self.inbox.register_again(caller.resource)
        else:
            self.inbox.changed(caller.resource)

    def _remove(self, caller: Caller) -> None:
        line = self._lines.get(caller.resource, {})
        line.pop(id(caller), None)
        if not line and self._lines.get(caller.resource) is line:
            gone = self._lines.pop(caller.resource, line)
            if gone:  # another thread has just joined
                self._lines.setdefault(caller.resource, gone).update(gone)

    def move(self, caller: Caller, resource: str) -> None:
        """Let a caller wait for another one of its resources, which has refused it."""
        self.leave(caller)
        caller.resource = resource
        self.join(caller)

    def pass_over(self, caller: Caller) -> None:
        """Put a first caller to the end that does not act: its event loop stands still or is closed.

        Also if it waits below a signal handler that waits for the same lock.
        """
        line = self._lines.get(caller.resource, {})
        if line.pop(id(caller), None) is not None:
            self._add(caller)

    def line(self, resource: str) -> list[Caller]:
        """Return the callers that wait for a resource, in order of arrival."""
        return list(self._lines.get(resource, {}).values())

    def first_of(self, caller: Caller) -> Caller | None:
        """Return the first caller that waits for the same lock."""
        for one in self.line(caller.resource):
            if one.limit == caller.limit:
                return one
        return None

    @property
    def count(self) -> int:
        """For how many resources somebody waits."""
        return len(self._lines)

    def close(self) -> None:
        """Wake all callers, which end their waits, and close the inbox for ever."""
        for resource in self.resources():
            for caller in self.line(resource):
                caller.wake_up()
        self.inbox.close()

    # as a `Line`

    def since(self, resource: str) -> float | None:
        """Return since when the first caller waits for a resource; None if none does."""
        line = self.line(resource)
        return line[0].since if line else None

    def resources(self) -> Collection[str]:
        """Return the resources that callers wait for."""
        return list(self._lines)

    def on_step(self, resource: str, step: Step, due: float) -> None:
        """Let the first caller of each limit act; each release of a permit is for another one."""
        told = set()
        for caller in self.line(resource):
            if caller.limit not in told and (caller.limit == 1 or caller.due > due):
                told.add(caller.limit)
                # what one node alone says makes nobody look all the time
                soonest = caller.looked_at + LOOK_AGAIN if step.why == FALLBACK else due
                caller.plan(step, max(due, soonest))

    def on_listening(self) -> None:
        """Let the first caller of each limit ask, once a second: a node may open again and again."""
        now = self._clock.now()
        for resource in self.resources():
            told = set()
            for caller in self.line(resource):
                if caller.limit not in told:
                    told.add(caller.limit)
                    caller.plan(Step(LOOK), max(now, caller.looked_at + LONGEST_SPIN))
