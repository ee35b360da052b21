"""The mutants. A fault of these that was found once, or that nothing caught once, has its row here.

- `lock`: the lock itself: votes, leases, nodes, and the scripts that run on them
- `rates`: which permit of a rate is free, and when a body may begin
- `handoff`: who waits is known on the nodes, and a release names who is next
- `beat`: a beat that holds a lock
- `hold`: an operator's hold
- `drill`: what a drill counts, and what it leaves
- `unique`: the windows of sends that are unique, and what replaces a message
- `fenced`: updates of rows by SQLAlchemy and Django with a fencing token
- `uninstall`: what goes with the package, and who keeps it
- `admin`: who may see and use the page of Django's admin, and whose lock it breaks

Faults of the rest are for tests of behaviour alone, and faults of the whole for the simulator's
mutants, in tests/simulation/mutants.py.
"""

from __future__ import annotations

from tests.mutants.table import (
    admin,
    beat,
    drill,
    fenced,
    handoff,
    hold,
    lock,
    rates,
    uninstall,
    unique,
)

MUTANTS = (
    *lock.MUTANTS, *rates.MUTANTS, *handoff.MUTANTS, *unique.MUTANTS, *beat.MUTANTS,
    *hold.MUTANTS, *drill.MUTANTS, *fenced.MUTANTS, *admin.MUTANTS,
    *uninstall.MUTANTS,
)  # fmt: skip
