"""Mutants of a beat that holds a lock: what would send twice, or save what it must not."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TESTS = "integration/test_beat.py"

# of each: name; where and what catches it; old and new
# fmt: off
MUTANTS = (
    Mutant("a beat asks for its lock at each tick, not at each send",
           "beat:WrappedScheduler.apply_async", f"{TESTS}::does_not_count",
           "        self.check_held()\n", ""),
    Mutant("Celery takes a send without the lock for one that failed",
           "beat:", f"{TESTS}::does_not_count",
           "class _NotHeldError(BaseException)", "class _NotHeldError(Exception)"),
    Mutant("a beat saves what it has sent when Celery likes",
           "beat:WrappedScheduler._end_send", f"{TESTS}::saved_at_once",
           "        self.sync()\n", ""),
    Mutant("a beat that lost its lock saves its last runs",
           "beat:WrappedScheduler.sync", f"{TESTS}::loser_saves",
           "self.beat_lock.held and not (self.is_sending or self.is_discarded)",
           "not self.is_sending"),
    Mutant("a beat saves a run that a signal has kept from its message",
           "beat:WrappedScheduler.sync", f"{TESTS}::signal_interrupts",
           "(self.is_sending or self.is_discarded)", "self.is_discarded"),
    Mutant("a beat publishes again after it has lost its lock",
           "beat:WrappedScheduler.producer", f"{TESTS}::not_retried",
           '"errback": self.check_held', '"errback": None'),
    Mutant("a shelf of a beat that lost its lock is written when it is collected",
           "beat:WrappedScheduler.discard", f"{TESTS}::does_not_count or loser_saves",
           "store.cache.clear()", "store.cache"),
    Mutant("a beat that waits for its lock has read the last runs before",
           "beat:LockedScheduler.__init__", f"{TESTS}::standby",
           "        self.max_interval = min(",
           "        self._service.get_scheduler()\n        self.max_interval = min("),
    Mutant("a beat sleeps past the end of its lock",
           "beat:LockedScheduler.__init__", f"{TESTS}::short_enough",
           "self.max_interval = min(self.max_interval, self._lock.ttl / 3)", "pass"),
    Mutant("a beat that lost its lock waits for an entry that is due",
           "beat:LockedScheduler.tick", f"{TESTS}::although_nothing_is_due",
           " or not self._lock.held", ""),
    Mutant("a beat that hangs keeps its lock",
           "beat:LockedScheduler._extend_renewal", f"{TESTS}::that_hangs",
           "self.max_interval + 2 * self._lock.ttl", "9999.0"),
    Mutant("a beat releases its lock before it has saved",
           "beat:LockedScheduler.close", f"{TESTS}::clean_end",
           "                scheduler.close()\n",
           "                self._lock.release()\n                scheduler.close()\n"),
    Mutant("a beat whose broker is away counts what it could not send as sent",
           "beat:WrappedScheduler.producer", f"{TESTS}::broker_refuses",
           "                self._check_broker()\n", ""),
    Mutant("a beat gives the lead up for a message that no broker takes",
           "beat:WrappedScheduler.producer", f"{TESTS}::does_not_take",
           "                self._check_broker()\n",
           "                raise _BrokerUnreachableError\n"),
    Mutant("a beat that gave the lead up takes it again at once",
           "beat:LockedScheduler.tick", f"{TESTS}::broker_refuses",
           "self._clock.now() + self.max_interval", "0.0"),
    Mutant("a beat publishes what it prepared before it lost its lock",
           "beat:WrappedScheduler.producer", f"{TESTS}::message_was_prepared",
           "            self.check_held()\n", ""),
)
# fmt: on
