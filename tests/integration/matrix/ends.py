"""Every end that a run can have, and what must be true after it.

One table, which the matrix measures, its tests check and `docs/ends-of-life.md` shows. States are
those that Celery 5.7 leaves, right or not; whose lock is free, when and by whom is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

POOLS = ("prefork", "threads", "solo", "gevent", "eventlet")
BROKERS = ("redis", "rabbitmq")
PREFORK = ("prefork",)
GREENLETS = ("gevent", "eventlet")
SHUT_DOWN = ("prefork", "threads", "solo")  # softly or coldly; in a hub, Celery's own way fails

RUN = "the run"
PARENT = "the parent"
TTL = "its ttl"
NOBODY = "never held"


@dataclass(frozen=True)
class After:
    """What is true after an end, for good.

    state: of the result; more than one where Celery's processes race to store it. bodies: how many
    ran for the one message. freed: who gave the first one's lock back. heir: the last body is run
    by the worker that comes after this one.
    """

    state: str
    bodies: int = 1
    freed: str = RUN
    heir: bool = False

    def before_the_heir(self) -> After:
        """Return what is true as long as no other worker has come; no state is certain by then."""
        return replace(self, state="", bodies=self.bodies - 1) if self.heir else self

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(self.state.split(" or "))


Pair = tuple[After, After]  # acknowledged early, late


@dataclass(frozen=True)
class End:
    """One way in which a run can end.

    usual: what is true after it. pools: that can do it. other: what differs in some. alone: it
    needs a worker of its own, in these pools. apart: and each message one, in these.
    limits: options of the message. options: words on the worker's command line.
    """

    name: str
    usual: Pair
    pools: tuple[str, ...] = POOLS
    other: Mapping[str, Pair] = field(default_factory=dict)
    alone: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def after(self, pool: str, *, late: bool) -> After | None:
        """Return what is true after this end in a pool; None where the pool cannot do it."""
        return self.other.get(pool, self.usual)[late] if pool in self.pools else None


def both(state: str, bodies: int = 1, freed: str = RUN) -> Pair:
    """Return what is true for early and late acknowledgement alike."""
    return After(state, bodies, freed), After(state, bodies, freed)


# the worker never hears of the end: a late message is given back when the worker itself ends
UNHEARD = After("PENDING"), After("SUCCESS", 2, heir=True)
# the body is cut, and a late message given back
CUT = After("RETRY"), After("SUCCESS", 2, heir=True)
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
        End(error, UNHEARD, other={"prefork": both("FAILURE")}, alone=("solo",), apart=("solo",))
        for error in ("SystemExit", "KeyboardInterrupt")
    ),
    End("GreenletExit", both("PENDING"), pools=GREENLETS),
    End("Ignore", both("PENDING")),
    End("Reject", both("FAILURE")),
    End("Reject with requeue", (After("PENDING"), After("SUCCESS", 2))),
    End("self.retry()", both("SUCCESS", 2)),
    End("self.retry() with other arguments", both("SUCCESS", 2)),
    End("autoretry", both("SUCCESS", 2)),
    End("self.replace()", both("SUCCESS", 2)),
    End("unpicklable result", both("FAILURE")),
    End("on_success of the user's raises", both("SUCCESS")),
    End("after_return of the user's raises", both("SUCCESS")),
    End(
        "the result backend fails", UNHEARD, alone=("solo",), apart=("solo",),
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
            f"revoked while it runs, {signal}", both("REVOKED"), pools=("prefork", *GREENLETS),
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
    *(
        End(
            f"{how} shutdown", CUT, pools=SHUT_DOWN, alone=SHUT_DOWN, apart=("solo",),
            other={"threads": both("SUCCESS"), "solo": both("FAILURE")},
        )
        for how in ("soft", "cold")
    ),
)  # fmt: skip
