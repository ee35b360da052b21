"""The start of a run in an order of sends: only if no later send has started or replaced it.

Not here: the order itself (`newest.py`).
"""

from __future__ import annotations

from typing import Any

from celery_redlock.errors import QuorumUnreachable
from celery_redlock.lock.engine.acquirer import SupersededError
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.server.error_hints import causes_of
from celery_redlock.lock.transport.command import Command, Handler, text_of
from celery_redlock.lock.validation import MAX_SECONDS
from celery_redlock.tasks.unique.claim import MIN_MARKER_TTL, ClaimToken, resource_text
from celery_redlock.tasks.unique.newest import newest_command
from celery_redlock.tasks.unique.rounds import ClaimRelease, milliseconds


class RunStart(ClaimRelease):
    """The start of the run of a message in an order; it gives up its place, and all before it.

    number, task_id: of the message. kept_for: ms for which the nodes remember the start. later: the
    task id of a later send. If its run has started, the report of one node is enough. That it has
    replaced the message is for a quorum to say: a node that has missed a send does not know where
    the later burst began. Decided by either, or once a quorum has noted the start.
    """

    def __init__(
        self, session: Session, name: str, token: str, expires_in: float, *, number: int,
        task_id: str, kept_for: str,
    ) -> None:  # fmt: skip
        super().__init__(session, name, token, expires_in)
        self._start = str(number), task_id, kept_for
        self._anyway = ""
        self._refusing_nodes: set[int] = set()  # by which the message was replaced
        self.later = ""

    @property
    def is_disputed(self) -> bool:
        """Whether no quorum has noted the start, but would have without what a minority says."""
        voters = self._executed_nodes | self._refusing_nodes
        return not self.decided and len(voters) >= self._session.nodes.quorum

    def send_anyway(self) -> None:
        """Let the nodes that call the message replaced note its start. Does not wait."""
        self._anyway = "anyway"
        self.send(self._refusing_nodes.copy())  # another thread may add a late reply

    def command(self, handler: Handler | None = None) -> Command:
        words = "start", self._token, *self._start, self._anyway
        return newest_command(self._session, self._name, *words, handler=handler or self)

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Count the reply; as of `ClaimRelease`."""
        if type(reply) is not list or [type(part) for part in reply] != [int, bytes]:
            super().on_reply(node, sent, reply, run_id)
            return
        number, later = reply
        if number < 0:
            self._refusing_nodes.add(node)
            if self.decided or len(self._refusing_nodes) < self._session.nodes.quorum:
                return
        self.later = text_of(later)
        self.decide()

    def causes(self) -> list[str]:
        """Return one text for each node that has not replied in time."""
        return causes_of(self._session.nodes.all, voters=self._executed_nodes)


def start_run(session: Session, token: ClaimToken, task_id: str) -> None:
    """Note the start of a run in an order, under its lock, and give up its place.

    token, task_id: of its message. Raises SupersededError if a later send has started or replaced
    it, and QuorumUnreachable if no quorum says that none has started.
    """
    began = session.clock.now()
    kept_for = min(max(token.kept_for, MIN_MARKER_TTL), MAX_SECONDS)
    round_ = RunStart(
        session, token.name, token.token, token.expires_in(session), number=token.number,
        task_id=task_id, kept_for=milliseconds(kept_for),
    )  # fmt: skip
    round_.send()
    is_decided = round_.wait()
    if round_.is_disputed:
        round_.send_anyway()
        is_decided = round_.wait()
    resource = resource_text(token.name)
    if round_.later:
        raise SupersededError(resource, round_.later)
    if not is_decided:
        waited = session.clock.now() - began
        raise QuorumUnreachable(resource, round_.causes(), session.nodes.quorum, waited)
