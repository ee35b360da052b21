"""What the nodes know of those in this process that wait for a lock, and how releases name them.

The nodes know since when this process waits for a resource, and a release names the first processes
on their inboxes. A message is only a hint: who is named makes an ordinary round. An `Inbox` has one
name for a `Line`: `callers.py` is one, a worker's waiting messages are the other one. What one that
waits does next: `model/handoff.py`.
"""

from __future__ import annotations

import functools
import math
import os
import socket
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from celery_redlock.lock.engine.core import Core
from celery_redlock.lock.engine.rounds import PlaceRound
from celery_redlock.lock.model.handoff import (
    ACTED,
    FALLBACK,
    LADDER,
    TURN,
    Named,
    Namings,
    Place,
    Step,
)
from celery_redlock.lock.model.keys import inbox_channel
from celery_redlock.lock.model.rate import Rate
from celery_redlock.lock.platform.coroutines import WorkItem
from celery_redlock.lock.server.requests import REGISTER
from celery_redlock.lock.transport.command import IGNORE_REPLY, Command
from celery_redlock.lock.transport.subscriber import Subscriber

Report = Callable[[Place | None], object]
Question = tuple[int, Report]  # number of waiters whose turns have passed; called with the place
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

    The connections are made for the first one that waits. A forked child makes another inbox. host:
    the beginning of the name. channels: returns other channels to hear, whose messages go to
    on_other as (channel, message, node).
    """

    def __init__(
        self,
        core: Core,
        line: Line,
        host: str = "",
        channels: Callable[[], set[str]] = set,
        on_other: OnMessage | None = None,
    ) -> None:
        self._core = core
        self._line = line
        self._other_channels = channels
        self._on_other = on_other
        token = core.platform.new_token()
        self.name = f"{host or socket.gethostname()}:{os.getpid()}:{token[:8]}"
        self.channel = inbox_channel(core.options.prefix, self.name)
        self._subscribers: dict[None, list[Subscriber]] = {}
        self._registered: dict[str, float] = {}  # by resource: since when, as the nodes know it
        self._struck_at: dict[int, float] = {}  # monotonic seconds, by node
        # by resource and limit: the questions in flight, which were sent as one, and later ones
        self._questions: dict[tuple[str, int | Rate], list[Question]] = {}
        self._mutex = core.platform.new_mutex()
        self._namings = Namings(core.nodes.quorum)

    # what the nodes know

    def changed(self, resource: str, *, reregister: bool = False) -> None:
        """Let the nodes know since when the first one waits, or that nobody does. Never waits.

        reregister: also if it is registered, because a release may have removed it as dead.
        """
        since = self._line.since(resource)
        registered_since = self._registered.get(resource)
        if since is None:
            if registered_since is not None:
                self._unregister(resource)
            return
        self.listen()
        if registered_since is None or reregister:
            if self.is_listening:  # before, a release would take this process for dead
                self._write(self._register(resource, since), REGISTER)
                self._undo_if_left(resource)
        elif registered_since != since:
            self._registered[resource] = since
            self._write(self._core.requests.update(self.name, resource, since))
            self._undo_if_left(resource)

    def _register(
        self, resource: str, since: float, limit: int | Rate = 0, turns_passed: int = 0
    ) -> bytes:
        self._registered[resource] = since
        return self._core.requests.register(self.name, resource, since, limit, turns_passed)

    def _unregister(self, resource: str) -> None:
        self._write(self._core.requests.unregister(self.name, resource))
        self._registered.pop(resource, None)  # last: an exception may cut this off before
        if self._line.since(resource) is not None:  # another thread has begun to wait meanwhile
            self.changed(resource)
            self._line.on_listening()  # a release may have named nobody in between

    def _undo_if_left(self, resource: str) -> None:
        """Unregister if another thread ended the last wait as this one registered."""
        if self._line.since(resource) is None:
            self._unregister(resource)

    def _strike(self, resource: str, node: int) -> None:
        """Let one node, once a turn, forget a registration that came late or was not undone.

        So a node that sends any number of messages causes few commands, and to itself alone.
        """
        now = self._core.clock.now()
        if now - self._struck_at.get(node, -math.inf) < TURN:
            return  # each release names this process again
        self._struck_at[node] = now
        self._write(self._core.requests.unregister(self.name, resource), node=node)
        if resource in self._line.resources():  # somebody has begun to wait meanwhile
            self._line.on_listening()

    def _write(self, request: bytes, script: Any = None, node: int | None = None) -> None:
        nodes = self._core.nodes
        command = Command(request, IGNORE_REPLY, script)
        now = self._core.clock.now()
        if node is None:
            nodes.broadcast(command, now)
        else:
            nodes.send_to(node, command)
        self._core.watchdog.run_maintenance_by(now + nodes.timeout)

    def leave(self) -> None:
        """Let the nodes forget this name."""
        for resource in list(self._registered):
            self._registered.pop(resource, None)
            self._write(self._core.requests.unregister(self.name, resource))

    # whose turn it is

    def place(self, resource: str, limit: int | Rate, turns_passed: int) -> Place | None:
        """Register, and return the place of this process; None if no quorum says it. Waits.

        turns_passed: number of waiters before it that have had their turn. They leave the nodes'
        sets if a permit is free. Returns None also if no release would name this process.
        """
        since = self._line.since(resource)
        if since is None or not self.is_listening:
            return None
        round_, until = self._send(resource, limit, since, turns_passed)
        self._core.nodes.wait(round_, until)
        return round_.place

    def ask(self, resource: str, limit: int | Rate, turns_passed: int, report: Report) -> None:
        """Do what `place` does, without waiting. report: called with the place, in another thread.

        One question for each resource and limit is in flight. Questions that come meanwhile are
        sent as one after that, so a flood of messages causes no flood of questions.
        """
        subject = resource, limit
        with self._mutex:
            questions = self._questions.setdefault(subject, [])
            is_in_flight = bool(questions)
            questions.append((turns_passed, report))
        if not is_in_flight:
            self._ask(subject)

    def _ask(self, subject: tuple[str, int | Rate]) -> None:
        """Send all questions about a subject that have come so far, as one. Never waits."""
        resource, limit = subject
        try:
            with self._mutex:
                batch = self._questions[subject].copy()
            since = self._line.since(resource)
            if since is None:
                self._answer(subject, batch, None)
                return
            turns_passed, _ = batch[-1]
            round_, until = self._send(resource, limit, since, turns_passed)
            wait = functools.partial(self._core.nodes.wait, round_, until, native=True)
            answer = WorkItem(wait, lambda: self._answer(subject, batch, round_.place))
            self._core.threads.add(answer)
        except BaseException:  # for example, no thread can be started: later questions are asked
            with self._mutex:
                self._questions.pop(subject, None)
            raise

    def _answer(
        self, subject: tuple[str, int | Rate], batch: Sequence[Question], place: Place | None
    ) -> None:
        """Report the place to a batch of questions. Before that, send the questions after it."""
        with self._mutex:
            later_questions = self._questions.pop(subject, [])[len(batch) :]
            if later_questions:
                self._questions[subject] = later_questions
        if later_questions:
            self._ask(subject)
        for _, report in batch:
            report(place)

    def _send(
        self, resource: str, limit: int | Rate, since: float, turns_passed: int
    ) -> tuple[PlaceRound, float]:
        """Send a question; return it, and until when replies count."""
        nodes = self._core.nodes
        request = self._register(resource, since, limit, turns_passed)
        round_ = PlaceRound(len(nodes.all))
        now = self._core.clock.now()
        nodes.broadcast(Command(request, round_, REGISTER), now)
        self._undo_if_left(resource)
        # also a reply that nobody waits for is read: the server may have forgotten the script
        self._core.watchdog.run_maintenance_by(now + nodes.timeout)
        return round_, now + nodes.timeout

    # what the nodes say

    def channels(self) -> set[str]:
        """Return the channels to subscribe to; called by any thread."""
        return self._other_channels() | ({self.channel} if self._line.resources() else set())

    def listen(self) -> None:
        """Have each subscriber that lacks a subscription make it. Never waits."""
        if not self._subscribers:
            core = self._core
            connection_options = core.nodes.timeout, core.platform, self.channels
            new_subscriber = core.platform.new_subscriber or Subscriber
            subscribers = [
                new_subscriber(
                    node.address,
                    *connection_options,
                    functools.partial(self.on_message, node=node.index),
                    functools.partial(core.events.node_unheard, node),
                )
                for node in core.nodes.all
            ]
            self._subscribers.setdefault(None, subscribers)
        channels = self.channels()
        for subscriber in self._subscribers[None]:
            if not channels <= subscriber.requested:
                subscriber.resubscribe()

    def subscriptions(self, channel: str) -> int:
        """Return how many nodes have confirmed the subscription to a channel."""
        return sum(
            channel in subscriber.confirmed for subscriber in self._subscribers.get(None, [])
        )

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
            for resource, since in list(self._registered.items()):  # it may have forgotten them
                request = self._core.requests.register(self.name, resource, since)
                self._write(request, REGISTER, node)
                self._undo_if_left(resource)
            self._line.on_listening()
            return
        naming = Named.parse(message, self._core.options.prefix)
        if naming is None:
            return
        if naming.resource not in self._line.resources():
            self._strike(naming.resource, node)
            return
        with self._mutex:
            turns = self._namings.turns(naming, node)
        if turns is None:
            return
        now = self._core.clock.now()
        is_agreed = naming.rank == turns  # else the nodes differ, or a majority has not spoken yet
        reason = FALLBACK if not is_agreed else LADDER if turns else ACTED
        self._line.on_step(naming.resource, Step(reason, turns, now), now + turns * TURN)

    def close(self) -> None:
        """Close the connections for ever."""
        for subscriber in self._subscribers.get(None, []):
            subscriber.close()
