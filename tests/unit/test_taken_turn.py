"""A turn of reading that is taken from one that keeps it for too long."""

from celery_redlock import NodeError, Redlock
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.lock.transport.command import PING, Command


class Leaping(SystemClock):
    """Each look at it is two seconds after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self._looks = 0
        self.now = self._leap

    def _leap(self) -> float:
        self._looks += 1
        return 2.0 * self._looks


def test_who_lost_the_turn_goes_on_though_another_told_of_the_broken_connections() -> None:
    quorum = Redlock([f"redis://127.0.0.1:{port}/0" for port in (1, 2, 3)]).session.node_set
    quorum.clock = Leaping()
    told: list[int] = []

    class Interrupted:
        wanted = True

        def on_reply(self, node: int, sent: float, reply: object, run_id: str) -> None:
            raise AssertionError(reply)

        def on_error(self, node: int, command: Command, error: NodeError) -> None:
            told.append(node)
            if len(told) == 1:  # here a signal handler keeps the turn for long, and it is taken
                for _ in range(6):
                    quorum.recover_turn()
                quorum.hand_on_mail()

    quorum.close()
    quorum.broadcast(Command(PING, Interrupted()), 0.0)
    quorum.hand_on_mail()

    assert told == [0, 0, 1, 2]
