"""Sends that take the place of the queued one, and runs that keep their order.

What is simulated is the lock of the runs, which one at a time has; the broker, which brings a
message late, twice or never, and may have taken one whose publish failed; revoked messages; and
senders that die between their claim and their confirmation.

- `order_kept`: no run starts after that of a later send
- `order_of_sends`: a send that begins once another is claimed has the larger number
- `replaced_for_a_later`: a message is dropped only for a later one that is published
- `replaced_in_its_burst`: a message that is known to be published, and that no later start ends, is
  dropped only if it, or one after it in its own claim, was replaced
- `two_queued`: without faults, and before the end of a claim, of all messages two at most are
  neither dropped nor before a start
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_redlock.errors import QuorumUnreachable
from celery_redlock.label import RunId
from celery_redlock.lock.engine.acquirer import SupersededError
from celery_redlock.lock.model.keys import completion_key, unique_key
from celery_redlock.tasks.settings.options import BUILT_IN, TaskLockOptions
from celery_redlock.tasks.unique.claim import Claim, ClaimToken
from celery_redlock.tasks.unique.start import start_run
from tests.simulation.clients import SoftTimeLimit
from tests.simulation.faults import TTL

if TYPE_CHECKING:
    from tests.simulation.clients import Process
    from tests.simulation.schedules import Schedule

KEPT = 100.0  # s: of a claim and of the order; no schedule is longer
OPTIONS = TaskLockOptions(
    **{**BUILT_IN, "ttl": TTL, "unique_until": "started", "on_duplicate": "newest"}
)


@dataclass(eq=False)
class Message:
    """One send. Real s: began, and claimed: once a quorum has taken its number.

    has_begun: a worker has told nodes that its run starts. is_confirmed: its sender knows that it
    is published. is_over: it was revoked or lost.
    """

    task_id: str
    name: str
    began: float
    claimed: float
    token: ClaimToken
    is_published: bool = False
    is_confirmed: bool = False
    is_over: bool = False
    has_begun: bool = False

    @property
    def replaces(self) -> str:
        return self.token.replaces.partition(":")[0]


class Orders:
    """What is sent and what runs, of a few names."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.world = schedule.world
        self.messages: dict[str, Message] = {}  # by task id, those with a number
        self.queue: list[tuple[float, Message]] = []  # from which real s they can be taken
        self.running = set[str]()  # names: a run has the lock
        self.started: dict[str, int] = {}  # by name: the number of the last start
        self.ends: dict[str, list[float]] = {}  # by name: the real s at which a claim has ended
        profile = schedule.profile
        self.is_calm = not (profile.breaks or profile.jams or profile.stops or profile.slow)

    def step(self, process: Process) -> None:
        draw = self.world.random.random
        often = self.schedule.profile.claims_end
        if often and draw() < often:
            self.end_claim(f"o{self.world.random.randrange(2)}")
        if draw() < 0.6:
            self.send(process)
        else:
            self.take(process)

    def send(self, process: Process) -> None:
        world, draw = self.world, self.world.random.random
        world.counts["sends"] += 1
        task_id, name = f"m{world.counts['sends']}", f"o{world.random.randrange(2)}"
        claim = Claim(process.redlock.session, name, RunId(task_id, "t"), OPTIONS, KEPT, KEPT)
        began = world.now
        dies = not self.is_calm and draw() < 0.1

        def publish(token: ClaimToken | None) -> None:
            message = self._claimed(task_id, name, began, token)
            process.clock.sleep(draw() * 0.1)
            fails = draw() < 0.1
            if message is not None and (not fails or draw() < 0.3):
                message.is_published = True
                message.is_confirmed = not fails
                self.queue.append((world.now, message))
            if fails:
                raise OSError("no broker")

        try:
            if not dies:
                claim.send(publish)
            elif claim.open() is None and claim.message_token is not None:
                publish(claim.message_token)  # and no more: the sender is dead
        except (OSError, SoftTimeLimit, QuorumUnreachable):
            pass
        if self.is_calm and name not in self.ends:
            self._count(name)

    def end_claim(self, name: str) -> None:
        """Let the time of a claim be over, on all nodes at once, unless a sender is at work."""
        key = unique_key("redlock", name).encode()
        nodes = self.schedule.nodes
        if any(b":sending:" in (node.holder(key) or b"") for node in nodes):
            return
        for node in nodes:
            node.execute([b"DEL", key])
        self.ends.setdefault(name, []).append(self.world.now)
        self.world.note("the claim of %s has ended", name)

    def _claimed(
        self, task_id: str, name: str, began: float, token: ClaimToken | None
    ) -> Message | None:
        if token is None or not token.number:
            return None
        message = Message(task_id, name, began, self.world.now, token)
        self.world.note("%s of %s has number %d, and replaces %r", task_id, name, token.number,
                        message.replaces)  # fmt: skip
        earlier = [
            one for one in self.messages.values() if one.name == name and one.claimed < began
        ]
        if any(one.token.number >= token.number for one in earlier):
            self._violated("order_of_sends", f"{task_id} is not after all earlier ones")
        self.messages[task_id] = message
        return message

    def take(self, process: Process) -> None:
        """Take a message and run it under its lock, if it is still to run."""
        world, draw = self.world, self.world.random.random
        ready = [
            entry
            for entry in self.queue
            if entry[0] <= world.now and entry[1].name not in self.running
        ]
        if not ready:
            return
        entry = ready[0] if draw() < 0.7 else world.random.choice(ready)
        self.queue.remove(entry)
        message = entry[1]
        if draw() < 0.05:
            message.is_over = True
            world.note("%s is revoked or lost", message.task_id)
            if draw() < 0.5:
                message.token.release_at_end(process.redlock.session)
            return
        self.running.add(message.name)
        try:
            self._run(process, message)
        except SoftTimeLimit:
            self._bring_back(message)
        finally:
            self.running.discard(message.name)

    def _run(self, process: Process, message: Message) -> None:
        world, draw, session = self.world, self.world.random.random, process.redlock.session
        message.token.mark_superseded(session, "t", message.task_id)
        mark = completion_key("redlock", str(RunId(message.task_id, "t"))).encode()
        is_late = draw() < 0.2  # the marks are over
        is_marked = not is_late and any(node.holder(mark) for node in self.schedule.nodes)
        if not message.has_begun and is_marked:
            self._dropped(message)
            return
        message.has_begun = True  # from now on it does not count as queued
        try:
            start_run(session, message.token, message.task_id)
        except SupersededError as error:
            self._superseded(message, error.later)
            return
        except QuorumUnreachable:
            self._bring_back(message)
            return
        number = message.token.number
        world.counts["runs in order"] += 1
        world.note("the run of %s starts", message.task_id)
        if number < self.started.get(message.name, 0) and not world.counts["wiped"]:
            self._violated("order_kept", f"{message.task_id} starts after a later send")
        self.started[message.name] = max(number, self.started.get(message.name, 0))
        process.clock.sleep(draw() * 2 * 0.2)
        if draw() < 0.2:
            self._bring_back(message)  # as of a worker that died, or a retry

    def _bring_back(self, message: Message) -> None:
        self.queue.append((self.world.now + self.world.random.random(), message))

    def _dropped(self, message: Message) -> None:
        self.world.counts["superseded"] += 1
        later = [one for one in self.messages.values() if one.replaces == message.task_id]
        if not any(one.is_published and one.token.number > message.token.number for one in later):
            self._violated("replaced_for_a_later", f"{message.task_id} is dropped for nothing")

    def _superseded(self, message: Message, later: str) -> None:
        self.world.counts["superseded"] += 1
        other = self.messages[later]
        if not other.is_published or other.token.number <= message.token.number:
            self._violated("replaced_for_a_later", f"{message.task_id} is dropped for {later}")
        if message.is_confirmed and not self._may_be_replaced(message):
            self._violated("replaced_in_its_burst", f"{message.task_id} is dropped for {later}")

    def _may_be_replaced(self, message: Message) -> bool:
        """Return whether a later one has begun, or it or one after it in its claim was replaced."""
        number, ends = message.token.number, self.ends.get(message.name, [])
        end = next((moment for moment in ends if moment >= message.claimed), math.inf)
        of_name = [one for one in self.messages.values() if one.name == message.name]
        replaced = {one.replaces for one in of_name if one.is_published}
        if any(one.has_begun and one.token.number > number for one in of_name):
            return True
        after = [one for one in of_name if one.token.number >= number and one.began <= end]
        return any(one.task_id in replaced for one in after)

    def _count(self, name: str) -> None:
        of_name = [one for one in self.messages.values() if one.name == name]
        replaced = {one.replaces for one in of_name if one.is_confirmed}
        newest = max((one.token.number for one in of_name if one.has_begun), default=0)
        queued = [
            one.task_id
            for one in of_name
            if one.is_confirmed
            and not one.is_over
            and one.task_id not in replaced
            and one.token.number > newest
        ]
        if len(queued) > 2:
            self._violated("two_queued", ", ".join(queued))

    def _violated(self, name: str, text: str) -> None:
        self.schedule.witness.violated(name, text)
