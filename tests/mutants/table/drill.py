"""Mutants of a drill: what would hide an overlap or a loss, or leave something of it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

UNIT, STORIES = "unit/test_drill.py", "integration/test_drill.py"
QUEUE, KEYS = "integration/test_drill_queue.py", "contract/test_drill_keys.py"
AUDIT, COMMAND = "operate.drill.audit", "operate.cli.drill:drill"
OWN = "operate.drill.own_queue"

# of each: name; where and what catches it; old and new
# fmt: off
MUTANTS = (
    Mutant("a drill counts no overlap",
           f"{AUDIT}:_overlaps", f"{UNIT}::an_overlap_is_found",
           "run.began < latest.until", "run.began < latest.began"),
    Mutant("a drill misses an overlap with a body before the last one",
           f"{AUDIT}:_overlaps", f"{UNIT}::an_overlap_is_found",
           "if latest is None or run.until > latest.until:", "if True:"),
    Mutant("a drill compares bodies of different locks",
           f"{AUDIT}:audit", f"{UNIT}::of_two_locks",
           "if run.resource == name", "if True"),
    Mutant("a body that has lost its lock had it until it noticed",
           f"{AUDIT}:RunsSoFar.add", f"{UNIT}::the_journal_gives_bodies",
           "run.until if line.what == LOCK_GONE else max", "max"),
    Mutant("a message that is nowhere is not lost",
           f"{AUDIT}:audit", f"{UNIT}::unless_the_broker_has_it",
           "if message_id not in still_there", "if message_id in still_there"),
    Mutant("a message whose body was killed has ended",
           f"{AUDIT}:audit", f"{UNIT}::unless_the_broker_has_it",
           "{run.message for run in runs if run.end} |", "{run.message for run in runs} |"),
    Mutant("a message that never began is not lost",
           f"{AUDIT}:audit", f"{UNIT}::unless_the_broker_has_it",
           "for message in sent if message.id not in ended",
           "for message in sent if message.id not in ended and "
           "any(run.message == message.id for run in runs)"),
    Mutant("a message that a dead worker has counts as lost",
           f"{OWN}:OwnQueue._in_keys", f"{QUEUE}::removes_each_key",
           "for _, entry in ledger.entries():", "for _, entry in ():"),
    Mutant("a body that ends at once has never begun",
           "operate.drill.body:hold_for", f"{KEYS}::that_ends_at_once",
           "what == KEPT and at >= end", "at >= end"),
    Mutant("a body that never saw its lock counts as lost",
           f"{AUDIT}:audit", f"{UNIT}::before_it_looked",
           " | {*unheld}", ""),
    Mutant("an overlap is nothing bad",
           f"{AUDIT}:Audit.is_bad", f"{UNIT}::an_overlap_is_found",
           "self.overlaps or self.lost", "self.lost"),
    Mutant("a loss is nothing bad",
           f"{AUDIT}:Audit.is_bad", f"{UNIT}::unless_the_broker_has_it",
           "self.overlaps or self.lost", "self.overlaps"),
    Mutant("a drill without a grant is nothing bad",
           f"{AUDIT}:Audit.is_bad", f"{UNIT}::without_a_grant",
           " or not self.grants", ""),
    Mutant("the exit status of a loss is 0",
           COMMAND, f"{STORIES}::gone_is_lost",
           "if report.audit.is_bad:", "if False:"),
    Mutant("the exit status of a drill that leaves something is 0",
           COMMAND, f"{STORIES}::frozen_nodes_keep",
           "if planned.left:", "if False:"),
    Mutant("a drill leaves the record of a lock that was broken",
           "operate.drill.removal:keys_of", f"{KEYS}::each_key_of_a_drill",
           "        *map(broken_beginning, locks),  # an operator has broken one\n", ""),
    Mutant("kombu keeps the binding of a drill",
           f"{OWN}:", f"{QUEUE}::removes_each_key",
           '("keyprefix_queue", "keyprefix_binding_permanent")', '("keyprefix_queue",)'),
    Mutant("RabbitMQ keeps the exchange of a drill that was killed",
           f"{OWN}:drill_queue", f"{QUEUE}::that_was_killed",
           ", auto_delete=True", ""),
    Mutant("a worker of a drill sends events",
           "operate.drill.worker:isolate", f"{QUEUE}::an_app_may_set",
           "        task_send_sent_event=False,  # a message that is deferred is sent\n", ""),
)
# fmt: on
