"""Every end that a run can have, and what must be true after it.

One table, which the matrix measures, its tests check and the page
`docs/reference/how-runs-end.md` shows.
States are those that Celery leaves, right or not; whose lock is free, when and by whom is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

POOLS = ("prefork", "threads", "solo", "gevent")
BROKERS = ("redis", "rabbitmq", "quorum")  # Redis; RabbitMQ's classic queues, and its quorum queues
PREFORK = ("prefork",)
# what is measured: a queue's kind makes no difference to how a pool ends
PLACES = tuple((p, b) for p in POOLS for b in BROKERS if b != "quorum" or p in PREFORK)

RUN = "the run"
PARENT = "the parent"
TTL = "its ttl"
NOBODY = "never held"


@dataclass(frozen=True)
class After:
    """What is true after an end, for good.

    state: of the result; more than one where Celery races to store it. bodies: how many
    ran for the one message. freed: who gave the first one's lock back. heir: the last body is run
    by the worker that comes after this one. instead: what may be true as well, where Celery races.
    """

    state: str
    bodies: int = 1
    freed: str = RUN
    heir: bool = False
    instead: After | None = None

    def before_the_heir(self) -> After:
        """Return what is true as long as no other worker has come; no state is certain by then."""
        return replace(self, state="", bodies=self.bodies - 1) if self.heir else self

    @property
    def may_be(self) -> tuple[After, ...]:
        return (self,) if self.instead is None else (self, self.instead)

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(self.state.split(" or "))


Pair = tuple[After, After]  # acknowledged early, late


@dataclass(frozen=True)
class End:
    """One way in which a run can end.

    usual: what is true after it. pools: that can do it. other: what differs in some. on_rabbitmq:
    what differs in some on that broker. before: what differs in some before Celery 5.7; None: they
    cannot do it; why: that, or not in the other pools.
    alone: it needs a worker of its own, in these pools. apart: and each message one, in these.
    limits: options of the message. options: words on the worker's command line.
    """

    name: str
    usual: Pair
    pools: tuple[str, ...] = POOLS
    other: Mapping[str, Pair] = field(default_factory=dict)
    on_rabbitmq: Mapping[str, Pair | None] = field(default_factory=dict)
    before: Mapping[str, Pair | None] = field(default_factory=dict)
    why: str = "not in this pool"
    alone: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def after(self, pool: str, broker: str, *, late: bool, newest: bool = True) -> After | None:
        """Return what is true after this end in a pool; None where the pool cannot do it.

        newest: in Celery 5.7, else in the versions before.
        """
        other: dict[str, Pair | None] = {**self.other}
        if broker != "redis":
            other.update(self.on_rabbitmq)
        if not newest:
            other.update(self.before)
        pair = other.get(pool, self.usual)
        return None if pair is None or pool not in self.pools else pair[late]


def both(state: str, bodies: int = 1, freed: str = RUN) -> Pair:
    return After(state, bodies, freed), After(state, bodies, freed)


# the worker never hears of the end: a late message is given back when the worker itself ends
IGNORE_REPLY = After("PENDING"), After("SUCCESS", 2, heir=True)
# the body is cut, and a late message given back
CUT = After("RETRY"), After("SUCCESS", 2, heir=True)
# the worker may end before RETRY is stored, which nobody waits for
CUT_GREEN = After("RETRY or PENDING"), CUT[1]
# the same, unless Celery's handler fails before it cuts anything, and the body runs to its end
CUT_OR_NOT = (
    replace(CUT_GREEN[0], instead=After("SUCCESS")),
    replace(CUT[1], instead=After("SUCCESS")),
)
# early: the message is lost with its worker
KILLED = After("PENDING", 1, TTL), After("SUCCESS", 2, TTL, heir=True)
# Celery's own error ends the worker, or comes to nothing in a pool without processes
MEMORY = After("FAILURE"), After("SUCCESS", 2, heir=True)

LIMIT = 8.0  # s: for bodies that wait for it, and time enough to take their locks before

ENDS = (
    End("success", both("SUCCESS")),
    End("exception", both("FAILURE")),
    End("MemoryError", MEMORY, alone=("prefork", "solo"), apart=("prefork", "solo")),
    *(
        End(
            error, IGNORE_REPLY, other={"prefork": both("FAILURE")},
            before={"prefork": both("PENDING")}, alone=("solo",), apart=("solo",),
        )
        for error in ("SystemExit", "KeyboardInterrupt")
    ),
    End("GreenletExit", both("PENDING"), pools=("gevent",)),
    End("Ignore", both("PENDING")),
    End("Reject", both("FAILURE"), before=dict.fromkeys(POOLS, both("PENDING"))),
    End("Reject with requeue", (After("PENDING"), After("SUCCESS", 2))),
    End("self.retry()", both("SUCCESS", 2)),
    End("self.retry() with other arguments", both("SUCCESS", 2)),
    End("autoretry", both("SUCCESS", 2)),
    End("self.replace()", both("SUCCESS", 2)),
    End("unpicklable result", both("FAILURE")),
    End("on_success of the user's raises", both("SUCCESS")),
    End("after_return of the user's raises", both("SUCCESS")),
    End(  # before Celery 5.7 it ends a solo worker
        "on_failure of the user's raises", both("FAILURE"), alone=("solo",), apart=("solo",)
    ),
    End(
        "the result backend fails", IGNORE_REPLY, alone=("solo",), apart=("solo",),
        other={
            "prefork": both("PENDING"),
            # its loop takes the error for the broker's, connects anew and gets the message again
            "solo": (After("PENDING"), After("SUCCESS", 2)),
        },
    ),
    End("soft limit", both("FAILURE"), pools=PREFORK, limits={"soft_time_limit": LIMIT}),
    End("hard limit", both("FAILURE"), pools=("prefork", "gevent"), limits={"time_limit": LIMIT}),
    End(
        "hard limit, SIGTERM ignored", both("FAILURE", 1, PARENT), pools=PREFORK,
        limits={"time_limit": LIMIT},
    ),
    End("kill -9 of the child", both("FAILURE", 1, PARENT), pools=PREFORK),
    End(
        "kill -9 of the child, reject_on_worker_lost",
        (After("FAILURE", 1, PARENT), After("SUCCESS", 2, PARENT)), pools=PREFORK,
    ),
    End("revoked before it runs", both("REVOKED", 0, NOBODY)),
    End("revoked while it waits", both("REVOKED", 0, NOBODY)),
    End("expired before it runs", both("REVOKED", 0, NOBODY)),
    End("expired while it waits", both("REVOKED", 0, NOBODY)),
    *(
        End(
            f"revoked while it runs, {signal}", both("REVOKED"), pools=("prefork", "gevent"),
            other={"prefork": both(state, 1, freed)},
        )
        for signal, state, freed in (
            ("TERM", "REVOKED", RUN),
            ("KILL", "REVOKED", PARENT),
            ("QUIT", "REVOKED", RUN),
            ("HUP", "REVOKED", RUN),
            ("INT", "SUCCESS", RUN),  # a child of the pool does not hear it, and goes on
            ("USR1", "FAILURE or REVOKED", RUN),  # its soft limit; parent and child store both
        )
    ),
    End(
        "max_tasks_per_child", both("SUCCESS"), pools=PREFORK, alone=PREFORK,
        options=("--max-tasks-per-child=1",),
    ),
    End(
        "max_memory_per_child", both("SUCCESS"), pools=PREFORK, alone=PREFORK,
        options=("--max-memory-per-child=1",),
    ),
    End(
        # solo acknowledges when it is back in its loop, so after the body, early or late
        "kill -9 of the main process", KILLED, other={"solo": (KILLED[1], KILLED[1])},
        alone=POOLS, apart=("solo",),
    ),
    End("kill -9 of main process and child", KILLED, pools=PREFORK, alone=PREFORK),
    End("warm shutdown", both("SUCCESS"), alone=POOLS, apart=("solo",)),
    End(
        "soft shutdown", CUT, alone=POOLS, apart=("solo",),
        other={
            "solo": both("FAILURE"),
            "threads": both("SUCCESS"),
            # Celery waits in the event loop, which refuses: its error ends the worker, warmly
            "gevent": both("SUCCESS"),
        },
    ),
    End(
        "cold shutdown", CUT, alone=POOLS, apart=("solo",),
        other={
            "threads": both("SUCCESS"),
            "solo": both("FAILURE"),
            "gevent": CUT_GREEN,
        },
        # Celery waits for RabbitMQ's answer in the event loop, which refuses where it is not there
        on_rabbitmq={"gevent": CUT_OR_NOT},
    ),
)  # fmt: skip
