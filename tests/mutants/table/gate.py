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
        """    reporting.show_deferred(task, request, info, why)
    republish(task, request, following, countdown)
""",
        """    republish(task, request, following, countdown)
    reporting.show_deferred(task, request, info, why)
""",
        (f"{INTEGRATION}/test_states.py::test_deferred_is_stored_before_the_message_is_published",),
    ),
    Mutant(
        "a late acknowledging run lets go before its result is stored",
        "tasks.execution.run:_run_body",
        "if not passage.late:",
        "if True:",
        (
            f"{INTEGRATION}/test_ends_of_life.py::"
            "test_a_late_acknowledging_task_keeps_its_lock_until_its_result_is_stored",
        ),
    ),
    Mutant(
        "a message that its body hands back counts as done",
        "tasks.execution.completion:is_done",
        "return isinstance(outcome, Reject) and not outcome.requeue",
        "return isinstance(outcome, Reject)",
        (f"{UNIT}/test_gate.py",),
    ),
    Mutant(
        "a MemoryError counts as done, though its message comes back",
        "tasks.execution.completion:is_done",
        "return not isinstance(outcome, MemoryError)",
        "return True",
        (f"{UNIT}/test_gate.py",),
    ),
    Mutant(
        "a redelivery of what runs is deferred like any other message",
        "tasks.execution.redelivery:is_twin",
        "return isinstance(refused, LockTaken) and",
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
        "tasks.execution.run:_run_body",
        "deferred=slip.deferrals > 0",
        "deferred=False",
        (f"{INTEGRATION}/test_states.py::test_started_means_that_the_lock_is_held",),
    ),
    Mutant(
        "a body that ends without its lock is a success",
        "tasks.execution.run:_run_held",
        'if rules.on_lost == "abort":\n            ensure_to_the_end(lock)',
        'if rules.on_lost == "abort":\n            pass',
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
        "a late run whose result cannot be stored counts as done",
        "tasks.execution.completion:is_stored",
        'if passage is None or not getattr(passage, "stored", False):',
        "if passage is None:",
        (
            f"{INTEGRATION}/test_ends_of_life.py::test_a_result_backend_that_fails_keeps_no_lock_and_loses_no_run",
        ),
    ),
    Mutant(
        "STARTED is stored before the lock is held",
        "tasks.task:LockedTask.on_bound",
        "cls._redlock_track_started, cls.track_started = wanted, False",
        "cls._redlock_track_started, cls.track_started = wanted, wanted",
        (f"{INTEGRATION}/test_states.py::test_started_means_that_the_lock_is_held",),
    ),
    Mutant(
        "a soft limit that strikes as STARTED is stored is swallowed",
        "tasks.reporting:show_started",
        "let_through=(SoftTimeLimitExceeded,),",
        "let_through=(),",
        (
            f"{UNIT}/test_states.py::"
            "test_a_soft_limit_that_strikes_as_started_is_stored_ends_the_run",
        ),
    ),
    Mutant(
        "a result backend that cannot be read counts as one that has an end",
        "tasks.reporting:has_end",
        "logger.warning(text, task.name, request.id, error, extra=told)\n        return False",
        "logger.warning(text, task.name, request.id, error, extra=told)\n        return True",
        (f"{UNIT}/test_states.py::test_of_a_backend_that_cannot_be_read_no_message_is_dropped",),
    ),
    Mutant(
        "receivers of task_revoked do not hear of what the gate revokes",
        "tasks.reporting:show_revoked",
        "    task_revoked.send(task, request=request, **told)\n",
        "",
        (
            f"{UNIT}/test_states.py::"
            "test_receivers_hear_of_what_the_gate_revokes_as_of_what_celery_does",
        ),
    ),
    Mutant(
        "a body runs though another holds its lock",
        "tasks.execution.run:run_locked",
        "turn_away(task, request, rules, slip, refused, in_order(resources), args, kwargs)",
        "pass",
        (f"{KIT}/test_as_a_user.py::test_a_run_is_refused_while_another_owner_holds_it",),
    ),
    Mutant(
        "a task that has ended keeps its lock",
        "tasks.execution.run:let_go",
        "release_all(passage.lock, ended=done)",
        "pass",
        (f"{KIT}/test_as_a_user.py",),
        "lets_it_go",
    ),
    Mutant(
        "a late run that its body hands back is marked as done, and never runs again",
        "tasks.execution.completion:end_run",
        "done = is_done(state, retval)",
        "done = True",
        (f"{INTEGRATION}/test_twins.py::test_a_message_that_its_body_hands_back_is_not_done",),
    ),
    Mutant(
        "a redelivery of what runs is dropped, and lost if the first delivery dies",
        "tasks.execution.outcomes:await_first",
        "    republish(task, request, slip.next_redelivery(request.retries, request.id), "
        "countdown)\n",
        "",
        (f"{INTEGRATION}/test_twins.py::test_a_message_that_is_delivered_again_while_it_runs",),
        "killed",
    ),
    Mutant(
        "a redelivery that has expired stores REVOKED over its first delivery, which runs",
        "tasks.execution.outcomes:turn_away_unrun",
        "if may_be_twin(task, request, slip, refused):",
        "if False:",
        (
            f"{INTEGRATION}/test_second_deliveries.py::"
            "test_a_second_delivery_that_expires_ends_nothing_while_the_first_one_runs",
        ),
    ),
    Mutant(
        "a lost lock does not interrupt its body",
        "tasks.body.monitored:MonitoredBody.on_loss",
        "if self.abort:",
        "if False:",
        (f"{KIT}/test_kit.py",),
        "a_body_is_told_of_its_lease_by_the_clock",
    ),
    Mutant(
        "LockLost is raised in code that swallows it",
        "tasks.body.monitored:_is_uninterruptible",
        "return releases or module.startswith(_PREFIXES)",
        "return releases",
        (f"{UNIT}/test_interrupts.py",),
        "handler_of_a_log or run_inside_a_body",
    ),
    Mutant(
        "the lock of a child that still runs is released",
        "tasks.children.process:ChildProcess.has_exited",
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
        "a message that cannot be put back for good leaves its send's window open",
        "tasks.execution.outcomes:defer",
        "    reporting.show_deferred",
        "    request.__dict__[CONTINUES] = True\n    reporting.show_deferred",
        (
            f"{INTEGRATION}/test_put_back.py::"
            "test_what_is_refused_for_good_is_the_end_of_its_sends_window",
        ),
    ),
    Mutant(
        "a message that stays with the broker ends as FAILURE",
        "tasks.delivery.republish:_put_back_or_keep",
        "raise Requeue(error, requeue=True) from error",
        "raise",
        (f"{INTEGRATION}/test_put_back.py",),
        "late_acknowledged_it_stays",
    ),
    Mutant(
        "a run does not wait in its slot",
        "tasks.execution.run:lock_of",
        "wait=rules.wait if wait is None else wait,",
        "wait=wait or 0.0,",
        ("tests/testing/test_as_a_user.py::test_a_run_that_may_wait_gets_it_from_who_lets_it_go",),
    ),
    Mutant(
        "a run without a lock keeps the lock that it had got",
        "tasks.execution.run:run_locked",
        "        release_all(lock)  # where it was taken, and what comes before the body failed\n",
        "",
        (
            f"{INTEGRATION}/test_unique.py::"
            "test_a_run_that_fails_between_its_grant_and_its_body_runs_beside_a_free_lock",
        ),
    ),
)
