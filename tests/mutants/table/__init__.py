"""The mutants. A fault that was found once, or that nothing caught once, has its row here.

- `lock`: the lock itself: votes, leases, nodes, and the scripts that run on them
- `handoff`: who waits is known on the nodes, and a release names who is next
- `runs`: a task's run with its lock: before its body, beside it, at its end, after a kill
- `messages`: messages that are republished, wait, are redelivered, or are sent once
- `waiting`: a worker's waiting room: whose turn it is, who looks when, who tries at all
- `operate`: settings and their lints, the command line, metrics
- `kit`: what `celery_redlock.testing` gives to users' tests
"""

from __future__ import annotations

from tests.mutants.table import handoff, kit, lock, messages, operate, runs, waiting

MUTANTS = (
    *lock.MUTANTS,
    *handoff.MUTANTS,
    *runs.MUTANTS,
    *messages.MUTANTS,
    *waiting.MUTANTS,
    *operate.MUTANTS,
    *kit.MUTANTS,
)
