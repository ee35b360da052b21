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
from collections.abc import Callable, Collection
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
Question = tuple[int, Report]  # passed, and what is told of the reply
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
        self._others = channels
        self._on_other = on_other
        token = core.platform.new_token()
        self.name = f"{host or socket.gethostname()}:{os.getpid()}:{token[:8]}"
        self.channel = inbox_channel(core.options.prefix, self.name)
        self._subscribers: dict[None, list[Subscriber]] = {}
        self._registered: dict[str, float] = {}  # by resource: since when, as the nodes know it
        self._struck_at: dict[int, float] = {}  # monotonic seconds, by node
        # by resource and limit: those in flight as one, and those that came meanwhile
        self._questions: dict[tuple[str, int | Rate], list[Question]] = {}
        self._counting = core.platform.new_mutex()
        self._namings = Namings(core.nodes.quorum)

    # what the nodes know

    def changed(self, resource: str, *, anew: bool = False) -> None:
        """Let the nodes know since when the first one waits, or that nobody does. Never waits.

        anew: also if they knew it, as another process may have taken this one for dead.
        """
        since = self._line.since(resource)
        known = self._registered.get(resource)
        if since is None:
            if known is not None:
                self._unregister(resource)
            return
        self.listen()
        if known is None or anew:
            if self.is_listening:  # before, a release would take this process for dead
                self._write(self._register(resource, since), REGISTER)
                self._undo_if_left(resource)
        elif known != since:
            self._registered[resource] = since
            self._write(self._core.requests.update(self.name, resource, since))
            self._undo_if_left(resource)

    def _register(
        self, resource: str, since: float, limit: int | Rate = 0, passed: int = 0
    ) -> bytes:
        self._registered[resource] = since
        return self._core.requests.register(self.name, resource, since, limit, passed)

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

    def place(self, resource: str, limit: int | Rate, passed: int) -> Place | None:
        """Register, and return how this process stands; None if the nodes do not say. Waits.

        passed: how many before it have had their turn: they leave the nodes' sets if a permit is
        free. None also if no release would name this process.
        """
        since = self._line.since(resource)
        if since is None or not self.is_listening:
            return None
        round_, until = self._send(resource, limit, since, passed)
        self._core.nodes.wait(round_, until)
        return round_.place

    def ask(self, resource: str, limit: int | Rate, passed: int, report: Report) -> None:
        """Do what `place` does without waiting; report: called in another thread.

        One question for each resource and limit is in flight: those that come meanwhile follow as
        one, so that a flood of messages makes no flood of questions.
        """
        asked = resource, limit
        with self._counting:
            questions = self._questions.setdefault(asked, [])
            is_in_flight = bool(questions)
            questions.append((passed, report))
        if not is_in_flight:
            self._ask(asked)

    def _ask(self, asked: tuple[str, int | Rate]) -> None:
        """Ask what has come since the last question; then report, and go on."""
        resource, limit = asked
        questions: list[tuple[int, Report]] = []

        def on_place(place: Place | None) -> None:
            with self._counting:
                following = self._questions.pop(asked, [])[len(questions) :]
                if following:
                    self._questions[asked] = following
            if following:
                self._ask(asked)
            for _, report in questions:
                report(place)

        try:
            with self._counting:
                questions = self._questions[asked].copy()
            since = self._line.since(resource)
            if since is None:
                on_place(None)
                return
            round_, until = self._send(resource, limit, since, questions[-1][0])
            wait = functools.partial(self._core.nodes.wait, round_, until, native=True)
            self._core.threads.add(WorkItem(wait, lambda: on_place(round_.place)))
        except BaseException:  # for example, no thread can be started: later questions are asked
            with self._counting:
                self._questions.pop(asked, None)
            raise

    def _send(
        self, resource: str, limit: int | Rate, since: float, passed: int
    ) -> tuple[PlaceRound, float]:
        """Send a question; return it, and until when replies count."""
        nodes = self._core.nodes
        request = self._register(resource, since, limit, passed)
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
        return self._others() | ({self.channel} if self._line.resources() else set())

    def listen(self) -> None:
        """Have each subscriber that lacks a subscription make it. Never waits."""
        if not self._subscribers:
            core = self._core
            how = core.nodes.timeout, core.platform, self.channels
            new = core.platform.new_subscriber or Subscriber
            made = [
                new(
                    node.address,
                    *how,
                    functools.partial(self.on_message, node=node.index),
                    functools.partial(core.events.node_unheard, node),
                )
                for node in core.nodes.all
            ]
            self._subscribers.setdefault(None, made)
        channels = self.channels()
        for subscriber in self._subscribers[None]:
            if not channels <= subscriber.asked:
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
            for resource, since in list(self._registered.items()):  # it may have forgotten them
                request = self._core.requests.register(self.name, resource, since)
                self._write(request, REGISTER, node)
                self._undo_if_left(resource)
            self._line.on_listening()
            return
        named = Named.parse(message, self._core.options.prefix)
        if named is None:
            return
        if named.resource not in self._line.resources():
            self._strike(named.resource, node)
            return
        with self._counting:
            turns = self._namings.turns(named, node)
        if turns is None:
            return
        now = self._core.clock.now()
        is_agreed = named.rank == turns  # else the nodes differ, or a majority has not spoken yet
        why = FALLBACK if not is_agreed else LADDER if turns else ACTED
        self._line.on_step(named.resource, Step(why, turns, now), now + turns * TURN)

    def close(self) -> None:
        """Close the connections for ever."""
        for subscriber in self._subscribers.get(None, []):
            subscriber.close()
