"""Mutants of rates: which permit is free, when a body may begin, and who waits for a start."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RATES = "contract/test_rates.py::"
# of each: name; where and what catches it; old and new
# fmt: off
MUTANTS = (
    Mutant("a late body keeps the moment of its first request",
           "lock.engine.acquirer:Acquirer.begin_body", RATES + "late_moves_its_start",
           "late_starts = [start for start in acquisition.starts if not start.held(now)]",
           "late_starts = []"),
    Mutant("a start without a body is not given back",
           "lock.engine.releaser:Releaser.cancel_starts", RATES + "without_a_body_is_given_back",
           "if start.started_at is None:", "if False:"),
    Mutant("a release gives back the start of its body",
           "lock.engine.releaser:Releaser.cancel_starts", RATES + "a_release_gives_no_start_back",
           "if start.started_at is None:", "if True:"),
    Mutant("a node that was away never learns of a start",
           "lock.engine.acquirer:Acquirer._count_starts", RATES + "where_a_node_was_away",
           "if len(start.granted) < len(start.ends):", "if False:"),
    Mutant("a plain lock counts no start",
           "lock.engine.acquirer:Acquirer._take_starts", RATES + "gives_no_start_back",
           "for resource in (key.resource for key in acquisition.keys if key.resource in rates):",
           "for resource in ():"),
    Mutant("a refusal by another key leaves a start behind",
           "lock.engine.acquirer:Acquirer.try_acquire", RATES + "uses_up_no_start",
           "        failure = self._lock_keys(acquisition)\n",
           "        self._take_starts(acquisition, options.rates or {})\n"
           "        failure = self._lock_keys(acquisition)\n"
           "        acquisition.starts.clear()\n"),
    Mutant("a refusal does not say when the next start is",
           "lock.engine.acquirer:Acquirer._failed", RATES + "when_the_next_start_is",
           'LockTaken(resource, "", round_.expires_in(), rate=str(lease.key.rate))',
           'LockTaken(resource, "", None, rate=str(lease.key.rate))'),
    Mutant("who waits for a start waits for the lock",
           "lock.model.rate:awaited", RATES + "goes_on_as_one_is_given_back",
           "return name_of_rate(resource), parsed_rate", "return name_of_lock(resource), 1"),
    Mutant("a run begins its body without a start",
           "tasks.execution.run:LockedRun._try_to_acquire", "integration/test_rate.py::no_period",
           "self.lock.ownership.begin_body()", "pass"),
    Mutant("STARTED is stored before a start is granted",
           "tasks.execution.run:LockedRun._try_to_acquire",
           "integration/test_states.py::rate_refuses_stores",
           "            self._acquire(wait_in_slot)\n",
           "            self._report_started()\n            self._acquire(wait_in_slot)\n"),
    Mutant("a message whose rate is used up tries by its backoff",
           "tasks.execution.deferral:countdown_of", "unit/test_contention.py::next_start",
           "return min(cap, max(lease_end, countdown)) if refusal.rate else", "return"),
    Mutant("a timer of gevent kills the greenlet that it runs in",
           "tasks.waiting.loop:EventLoop.cancel", "integration/test_rate.py::is_due",
           "if entry is not None and not _is_running(entry):", "if entry is not None:"),
)
# fmt: on
