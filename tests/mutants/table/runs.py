"""Mutants of a task's run with its lock: before its body, beside it, at its end, after a kill."""

from __future__ import annotations

from tests.mutants.mutant import CONTRACT, INTEGRATION, KIT, UNIT, Mutant

MUTANTS = (
    Mutant(
        "an error ends the watch over a pool's children",
        "tasks.children.reaper:ChildReaper.run",
        "except BaseException:",
        "except Exception:",
        (
            f"{INTEGRATION}/test_killed_child.py::"
            "test_a_receiver_that_exits_does_not_end_the_watch_over_children",
        ),
    ),
    Mutant(
        "a worker keeps a descriptor of each child that has ended",
        "tasks.children.reaper:ChildReaper.reap",
        "        process.close()\n",
        "",
        (
            f"{INTEGRATION}/test_killed_child.py::"
            "test_children_that_come_and_go_leave_nothing_behind",
        ),
    ),
    Mutant(
        "a child keeps descriptors of the other children",
        "tasks.children.forks:Children.become_child",
        "            process.close()\n",
        "            pass\n",
        (
            f"{INTEGRATION}/test_killed_child.py::"
            "test_children_that_come_and_go_leave_nothing_behind",
        ),
    ),
    Mutant(
        "a message is published before DEFERRED is stored",
        "tasks.execution.outcomes:defer",
        "    deferral = report(delivery",
        "    republish(delivery, delivery.header.deferred(request, deferral), deferral.countdown)\n"
        "    deferral = report(delivery",
        (f"{INTEGRATION}/test_states.py::test_deferred_is_stored_before_the_message_is_published",),
    ),
    Mutant(
        "a late acknowledging run releases its lock before its result is stored",
        "tasks.execution.run:LockedRun._run_body",
        "if not delivery.acks_late:",
        "if True:",
        (
            f"{INTEGRATION}/test_ends_of_life.py::"
            "test_a_late_acknowledging_task_keeps_its_lock_until_its_result_is_stored",
        ),
    ),
    Mutant(
        "a message that its body hands back counts as completed",
        "tasks.execution.completion:is_completed",
        "return isinstance(outcome, Reject) and not outcome.requeue",
        "return isinstance(outcome, Reject)",
        (f"{UNIT}/test_wrapping.py",),
    ),
    Mutant(
        "a MemoryError counts as completed, though its message comes back",
        "tasks.execution.completion:is_completed",
        "return not isinstance(outcome, MemoryError)",
        "return True",
        (f"{UNIT}/test_wrapping.py",),
    ),
    Mutant(
        "a redelivery of a message that runs is deferred like any other message",
        "tasks.execution.redelivery:is_held_by_own_run",
        "return isinstance(refusal, LockTaken) and",
        "return False and",
        (f"{INTEGRATION}/test_twins.py::test_nothing_that_ends_a_wait_ends_that_of_a_twin",),
    ),
    Mutant(
        "a deferral ends its send's window",
        "tasks.execution.outcomes:defer",
        "    request.__dict__[CONTINUES] = True\n",
        "",
        (f"{INTEGRATION}/test_unique.py",),
        "test_is_the_first_one_until or test_returns_the_result",
    ),
    Mutant(
        "STARTED is not stored over DEFERRED",
        "tasks.execution.run:LockedRun._report_started",
        "was_deferred = delivery.header.deferral.count > 0",
        "was_deferred = False",
        (f"{INTEGRATION}/test_states.py::test_started_means_that_the_lock_is_held",),
    ),
    Mutant(
        "a body that ends without its lock is a success",
        "tasks.execution.run:LockedRun._run_monitored",
        "if aborts:\n                    self._ensure_held_to_the_end()",
        "if aborts:\n                    pass",
        (f"{INTEGRATION}/test_loss.py::test_a_body_that_ends_without_its_lock_is_no_success",),
        "threads",
    ),
    Mutant(
        "a task class goes by the settings of an app that had it before",
        "tasks.declaration:config_of",
        "which = (task.name, id(task.app))",
        "which = (task.name, 0)",
        (
            f"{UNIT}/test_settings.py::"
            "test_a_task_class_goes_by_the_settings_of_the_app_that_has_it_now",
        ),
    ),
    Mutant(
        "a receiver of the user's that exits keeps the lock",
        "wiring:",
        "completion.release_after_run, first=True",
        "completion.release_after_run",
        (
            f"{INTEGRATION}/test_call_styles.py::"
            "test_the_lock_is_released_before_any_receiver_of_a_users_own",
        ),
    ),
    Mutant(
        "a late run whose result cannot be stored counts as completed",
        "tasks.execution.completion:is_completed_before_hook",
        "if run is None or not run.outcome_stored:",
        "if run is None:",
        (
            f"{INTEGRATION}/test_ends_of_life.py::test_a_result_backend_that_fails_keeps_no_lock_and_loses_no_run",
        ),
    ),
    Mutant(
        "STARTED is stored before the lock is held",
        "tasks.task:LockedTask.on_bound",
        "cls._redlock_track_started, cls.track_started = tracks, False",
        "cls._redlock_track_started, cls.track_started = tracks, tracks",
        (f"{INTEGRATION}/test_states.py::test_started_means_that_the_lock_is_held",),
    ),
    Mutant(
        "a soft limit that strikes as STARTED is stored is swallowed",
        "tasks.reporting:StateReporter.started",
        "let_through=(SoftTimeLimitExceeded,),",
        "let_through=(),",
        (
            f"{UNIT}/test_states.py::"
            "test_a_soft_limit_that_strikes_as_started_is_stored_ends_the_run",
        ),
    ),
    Mutant(
        "a result backend that cannot be read counts as one that has a final state",
        "tasks.reporting:StateReporter.has_final_state",
        """"cannot read the state of %s[%s]: %s", error)
            return False""",
        """"cannot read the state of %s[%s]: %s", error)
            return True""",
        (f"{UNIT}/test_states.py::test_of_a_backend_that_cannot_be_read_no_message_is_dropped",),
    ),
    Mutant(
        "receivers of task_revoked are not called for a message that the run revokes",
        "tasks.reporting:StateReporter.revoked",
        "        task_revoked.send(self._task, request=self._request, **fields)\n",
        "",
        (
            f"{UNIT}/test_states.py::"
            "test_receivers_hear_of_what_the_gate_revokes_as_of_what_celery_does",
        ),
    ),
    Mutant(
        "a body runs though another run holds its lock",
        "tasks.execution.run:LockedRun._try_to_acquire",
        "outcomes.end_refused(delivery, found, self.cancelled)",
        "pass",
        (f"{KIT}/test_as_a_user.py::test_a_run_is_refused_while_another_owner_holds_it",),
    ),
    Mutant(
        "a task that has ended keeps its lock",
        "tasks.execution.run:LockedRun.release",
        "release_all(self.lock, ended=completed)",
        "pass",
        (f"{KIT}/test_as_a_user.py",),
        "lets_it_go",
    ),
    Mutant(
        "a late run that its body hands back is marked as completed, and never runs again",
        "tasks.execution.completion:end_run",
        "completed = is_completed(state, retval)",
        "completed = True",
        (f"{INTEGRATION}/test_twins.py::test_a_message_that_its_body_hands_back_is_not_done",),
    ),
    Mutant(
        "a redelivery of a message that runs is discarded, and lost if the first delivery dies",
        "tasks.execution.outcomes:wait_for_first_delivery",
        "    republish(delivery, header, countdown)\n",
        "",
        (f"{INTEGRATION}/test_twins.py::test_a_message_that_is_delivered_again_while_it_runs",),
        "killed",
    ),
    Mutant(
        "a redelivery that has expired stores REVOKED over its first delivery, which runs",
        "tasks.execution.outcomes:end_refused",
        "if may_wait and is_to_wait",
        "if cancelled is None and is_to_wait",
        (
            f"{INTEGRATION}/test_second_deliveries.py::"
            "test_a_second_delivery_that_expires_ends_nothing_while_the_first_one_runs",
        ),
    ),
    Mutant(
        "a lost lock does not interrupt its body",
        "tasks.body:MonitoredBody.on_loss",
        "if self.abort:",
        "if False:",
        (f"{KIT}/test_kit.py",),
        "a_body_is_told_of_its_lease_by_the_clock",
    ),
    Mutant(
        "LockLost is raised in code that swallows it",
        "tasks.body:_is_uninterruptible",
        "return releases or module.startswith(_PREFIXES)",
        "return releases",
        (f"{UNIT}/test_interrupts.py",),
        "handler_of_a_log or run_inside_a_body",
    ),
    Mutant(
        "the lock of a child that still runs is released",
        "tasks.children.forks:ChildProcess.has_exited",
        "return self._exited or self.descriptor in ready",
        "return True",
        (f"{UNIT}/test_children.py",),
        "a_process_is_gone_when_it_is_dead",
    ),
    Mutant(
        "the lock of a killed child stays for its ttl",
        "tasks.children.reaper:ChildReaper._reap_exited",
        "if process.has_exited(ready):",
        "if False:",
        (f"{INTEGRATION}/test_killed_child.py::test_the_lock_of_a_killed_child_is_released",),
        "early",
    ),
    Mutant(
        "of several locks of a killed child one is released",
        "tasks.children.journal:JournalSlot.read",
        "range(HEADER_SIZE, SIZE, ENTRY_SIZE)",
        "range(HEADER_SIZE, HEADER_SIZE + ENTRY_SIZE, ENTRY_SIZE)",
        (f"{UNIT}/test_children.py",),
        "a_child_that_is_killed_at_any_byte or garbage or journal",
    ),
    Mutant(
        "a run whose child was killed counts as done, and its message is lost",
        "tasks.children.reaper:ChildReaper.reap",
        "slot.is_end_announced(own[0].run_id)",
        "True",
        (f"{INTEGRATION}/test_killed_child.py::test_the_lock_of_a_killed_child_is_released",),
        "late",
    ),
    Mutant(
        "a run that never had its lock counts as done, and its message is lost",
        "tasks.children.reaper:Orphans.is_done",
        "return self.is_ended and self.states != {CLAIMED}",
        "return self.is_ended",
        (
            f"{CONTRACT}/test_left_behind.py::test_a_run_that_was_ended_is_done_only_where_it_had_its_lock",
        ),
    ),
    Mutant(
        "a message that can never be republished leaves the claim of its send",
        "tasks.execution.outcomes:defer",
        "    deferral = report(delivery",
        "    request.__dict__[CONTINUES] = True\n    deferral = report(delivery",
        (
            f"{INTEGRATION}/test_put_back.py::"
            "test_what_is_refused_for_good_is_the_end_of_its_sends_window",
        ),
    ),
    Mutant(
        "a message that ran in its slot runs again, as the copy whose confirm was lost",
        "tasks.execution.run:LockedRun._acquire_or_end",
        "self.delivery = self.delivery.going_on(error.header)",
        "pass",
        (
            f"{INTEGRATION}/test_rabbitmq.py::"
            "test_early_acknowledged_what_runs_in_its_slot_does_not_run_again_as_a_copy",
        ),
        "classic",
    ),
    Mutant(
        "a message for a queue that is gone is confirmed, and dropped",
        "tasks.delivery.republish:_send_to_queue",
        "send(**options, mandatory=True)",
        "send(**options)",
        (
            f"{INTEGRATION}/test_odd_queues.py::test_a_queue_that_has_gone_is_declared_again_for_a_deferral",
        ),
    ),
    Mutant(
        "a message that stays with the broker ends as FAILURE",
        "tasks.delivery.republish:_republish_or_requeue",
        "raise Requeue(error, requeue=True) from error",
        "raise",
        (f"{INTEGRATION}/test_put_back.py",),
        "late_acknowledged_it_stays",
    ),
    Mutant(
        "a run does not wait in its slot",
        "tasks.execution.run:lock_of",
        "wait=options.wait if wait is None else wait,",
        "wait=wait or 0.0,",
        ("tests/testing/test_as_a_user.py::test_a_run_that_may_wait_gets_it_from_who_lets_it_go",),
    ),
    Mutant(
        "a run without a lock keeps the lock that it was granted",
        "tasks.execution.run:LockedRun._try_to_acquire",
        "            release_all(self.lock)  # it may have been granted, and `_begin` failed\n",
        "",
        (
            f"{INTEGRATION}/test_unique.py::"
            "test_a_run_that_fails_between_its_grant_and_its_body_runs_beside_a_free_lock",
        ),
    ),
    Mutant(
        "a revoked retry that is redelivered runs",
        "tasks.delivery.header:LockHeader.of",
        "or header.waits > 0",
        "or header.is_flagged",
        (
            f"{UNIT}/test_delivery.py::"
            "test_a_revocation_that_is_left_to_the_run_survives_in_a_retry_that_is_redelivered",
        ),
    ),
    Mutant(
        "an exception before the release of a run leaks its lock",
        "tasks.execution.completion:release_after_run",
        "    error = sys.exc_info()[1]",
        "    request = sender.request\n    run_of(request)\n    error = sys.exc_info()[1]",
        (f"{INTEGRATION}/test_cut_release.py",),
    ),
)
