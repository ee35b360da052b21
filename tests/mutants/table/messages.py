"""Mutants of messages: republished, waiting, redelivered, sent once."""

from __future__ import annotations

from tests.mutants.mutant import CONTRACT, INTEGRATION, UNIT, Mutant

MUTANTS = (
    Mutant(
        "a worker listens for ever for what nobody waits for",
        "tasks.waiting.dispatch:Dispatcher.sweep",
        "            self.queues.forget_empty(self._clock.now() - self._times.unsubscribe_after)\n",
        "            pass\n",
        (
            f"{CONTRACT}/test_waiting_room.py::"
            "test_a_worker_does_not_listen_for_ever_if_nobody_waits",
        ),
    ),
    Mutant(
        "a retry after a deferral forgets the claim of its send",
        "tasks.delivery.header:LockHeader.of",
        "header.id, unique=header.unique, life=header.life)",
        "header.id, life=header.life)",
        (
            f"{UNIT}/test_deferral.py::test_the_claim_of_a_send_goes_on_through_deferrals_"
            "redeliveries_and_retries",
        ),
    ),
    Mutant(
        "a redelivery that waits forgets the claim of its send",
        "tasks.delivery.header:LockHeader.waiting_for_first_delivery",
        "waits=self.waits + 1)",
        "waits=self.waits + 1, unique=None)",
        (
            f"{UNIT}/test_deferral.py::test_the_claim_of_a_send_goes_on_through_deferrals_"
            "redeliveries_and_retries",
        ),
    ),
    Mutant(
        "a deferral makes a task its own parent",
        "tasks.delivery.republish:_fields_of_message",
        '"parent_id": request.parent_id,',
        '"parent_id": request.parent_id or request.id,',
        (f"{INTEGRATION}/test_message.py::test_a_task_without_a_parent_does_not_become_its_own",),
    ),
    Mutant(
        "a deferral shows a masked argument",
        "tasks.delivery.republish:_fields_of_message",
        '"argsrepr": request.get("argsrepr")',
        '"argsrepr": None',
        (
            f"{INTEGRATION}/test_message.py::test_a_deferral_keeps_everything_that_a_message_carries",
        ),
    ),
    Mutant(
        "two copies of a message are one run",
        "tasks.delivery.delivery:RunId.of",
        "request.replaced_task_nesting or 0, queue, life",
        "request.replaced_task_nesting or 0, '', life",
        (f"{INTEGRATION}/test_copies.py::test_each_copy_runs_once_however_often_it_is_put_back",),
    ),
    Mutant(
        "a copy that RabbitMQ brought to another queue runs there",
        "tasks.delivery.delivery:Delivery.is_for_another_queue",
        "return (self._noted_queue or origin.queue) != origin.queue",
        "return False",
        (f"{INTEGRATION}/test_copies.py::test_each_copy_runs_once_however_often_it_is_put_back",),
    ),
    Mutant(
        "a deferral loses what a hook took from the arguments",
        "tasks.task:keep_arguments",
        "= tuple(args), dict(kwargs)",
        "= args, kwargs",
        (f"{INTEGRATION}/test_message.py::test_a_deferral_keeps_the_arguments_as_they_came",),
    ),
    Mutant(
        "autoretry takes a message that is handed back for an error",
        "tasks.delivery.republish:Requeue",
        "class Requeue(Reject, Ignore):",
        "class Requeue(Reject):",
        (f"{UNIT}/test_deferral.py",),
    ),
    Mutant(
        "a deferral goes to every queue of its exchange",
        "tasks.delivery.route:send_options",
        "if home is None:",
        "if address.exchange:",
        (f"{INTEGRATION}/test_copies.py::test_each_copy_runs_once_however_often_it_is_put_back",),
    ),
    Mutant(
        "a child sent with its parent's headers never ends its window",
        "tasks.unique.send:header_of_send",
        'or header.get("id") != task_id',
        "",
        (
            f"{CONTRACT}/test_unique.py::"
            "test_a_send_with_its_parents_headers_has_a_window_of_its_own",
        ),
    ),
    Mutant(
        "a body begins before a quorum knows that its window is over",
        "tasks.unique.claim:ClaimToken.release_at_start",
        "not self.release(session).wait()",
        "self.release(session) is None",
        (
            f"{CONTRACT}/test_unique.py::TestFaults::"
            "test_a_body_begins_once_a_quorum_has_heard_that_its_window_is_over",
        ),
    ),
    Mutant(
        "a release that comes late ends the window of the next try",
        "tasks.unique.claim:Claim._attempt",
        "self._before = session.platform.new_token(),",
        "self._before = self._token or session.platform.new_token(),",
        (
            f"{CONTRACT}/test_unique.py::TestSendersThatDie::"
            "test_no_try_asks_for_a_window_by_a_token_that_was_released",
        ),
    ),
    Mutant(
        "a node that refuses to end a window is not told again",
        "tasks.unique.rounds:ClaimRelease.on_reply",
        "found is None or (",
        "found is not None and (",
        (
            f"{CONTRACT}/test_unique.py::TestFaults::"
            "test_a_node_that_refuses_to_end_a_window_is_told_again",
        ),
    ),
    Mutant(
        "a window lasts longer by as long as its publish took",
        "tasks.unique.claim:Claim.confirm",
        "left = self._opened_at + self._unique_for - now",
        "left = self._unique_for",
        (
            f"{CONTRACT}/test_unique.py::TestOneSend::"
            "test_what_nodes_keep_of_it_tells_how_late_it_may_come",
        ),
    ),
    Mutant(
        "a message with an eta runs beside the send that took its place",
        "tasks.unique.send:send_claimed",
        'options.get("eta") or options.get("countdown")',
        'options.get("countdown")',
        (f"{CONTRACT}/test_unique.py::test_nodes_keep_of_a_send_that_it_may_come_that_much_later",),
    ),
    Mutant(
        "a message that a dead sender replaced runs beside the one that replaces it",
        "tasks.execution.run:LockedRun._acquire_or_end",
        "            self.token.mark_superseded(redlock_of(task.app).session, task.name)\n",
        "            pass\n",
        (
            f"{INTEGRATION}/test_second_deliveries.py::"
            "test_what_a_sender_replaces_that_dies_once_its_message_is_out_does_not_run",
        ),
    ),
    Mutant(
        "a redelivery stores REVOKED over its first delivery, which a later send replaces",
        "tasks.execution.redelivery:completion_marker",
        "heeds_later=not delivery.is_redelivered,",
        "heeds_later=True,",
        (
            f"{INTEGRATION}/test_second_deliveries.py::"
            "test_a_second_delivery_of_a_run_that_a_later_send_replaces_ends_nothing",
        ),
    ),
    Mutant(
        "a broker that is away is asked again without a pause",
        "tasks.execution.outcomes:WaitInSlot.__init__",
        "error, FIRST_PAUSE",
        "error, 0.0",
        (f"{UNIT}/test_deferral.py::test_a_broker_that_is_away_for_long_is_asked_now_and_then",),
    ),
    Mutant(
        "pauses between tries to republish a message grow without a bound",
        "tasks.execution.outcomes:WaitInSlot.__init__",
        "min(LONGEST_PAUSE, 2 * before._pause)",
        "2 * before._pause",
        (f"{UNIT}/test_deferral.py::test_a_broker_that_is_away_for_long_is_asked_now_and_then",),
    ),
    Mutant(
        "a message with a budget waits for a release alone",
        "tasks.execution.deferral:decide",
        " and max_wait is None",
        "",
        (
            f"{INTEGRATION}/test_waiting.py::"
            "test_one_with_a_budget_ends_in_time_also_behind_one_without",
        ),
    ),
    Mutant(
        "a deferred message never expires",
        "tasks.delivery.republish:_fields_of_message",
        '"expires": request.expires,',
        '"expires": None,',
        (f"{INTEGRATION}/test_message.py::test_a_deferral_leaves_expires_where_it_was",),
    ),
    Mutant(
        "a deferral burns a retry",
        "tasks.delivery.republish:_fields_of_message",
        '"retries": request.retries,',
        '"retries": request.retries + 1,',
        (f"{INTEGRATION}/test_message.py::test_ten_deferrals_burn_no_retries",),
    ),
    Mutant(
        "a deferred message comes back at once, and goes round and round",
        "tasks.delivery.republish:publish",
        "countdown=countdown, **fields",
        "countdown=countdown / 100, **fields",
        (f"{INTEGRATION}/test_put_back.py::test_what_is_put_back_comes_after_its_countdown",),
    ),
    Mutant(
        "a late message that cannot be republished is lost",
        "tasks.delivery.republish:_republish_or_requeue",
        "raise Requeue(error, requeue=True) from error",
        "raise Ignore from error",
        (
            f"{INTEGRATION}/test_put_back.py::"
            "test_late_acknowledged_it_stays_with_the_broker_that_is_away",
        ),
    ),
    Mutant(
        "an early message that cannot be republished at once is lost",
        "tasks.delivery.republish:_republish_early",
        "raise NotRepublishedError(header, error) from error",
        "raise",
        (f"{INTEGRATION}/test_put_back.py",),
        "tried_until_the_broker_is_back",
    ),
    Mutant(
        "max_wait is counted from the last deferral, so that it never ends a wait",
        "tasks.execution.deferral:decide",
        "before.since or refusal.at",
        "refusal.at",
        (f"{UNIT}/test_contention.py",),
    ),
    Mutant(
        "a message that was deferred often is tried again as soon as at first",
        "tasks.execution.deferral:decide",
        "before.count + 1",
        "1",
        (f"{UNIT}/test_contention.py",),
    ),
    Mutant(
        "a deferred message goes by the task's options instead of its call's",
        "tasks.delivery.header:LockHeader.to_message",
        '"options": dict(self.options)',
        '"options": {}',
        (f"{UNIT}/test_deferral.py",),
    ),
    Mutant(
        "a retry goes on with the wait of the run before it",
        "tasks.delivery.header:LockHeader.of",
        "header.retries != request.retries or ",
        "",
        (f"{UNIT}/test_deferral.py",),
    ),
    Mutant(
        "a message that RabbitMQ dead-lettered counts as run once it comes back, and is discarded",
        "tasks.delivery.header:LockHeader.of",
        " or deaths)",
        ")",
        (f"{UNIT}/test_deferral.py",),
    ),
    Mutant(
        "on_conflict decides though no quorum of nodes answers",
        "tasks.execution.deferral:decide",
        "options.on_unreachable if taken is None else",
        "str(options.on_conflict) if taken is None else",
        (f"{UNIT}/test_contention.py",),
    ),
    Mutant(
        "a body runs without its lock though its message is to wait",
        "tasks.execution.deferral:decide",
        'if strategy == "run":',
        'if strategy in ("run", "defer"):',
        (f"{UNIT}/test_contention.py",),
    ),
    Mutant(
        'a message waits though on_conflict="skip" says that it is not to run',
        "tasks.execution.deferral:decide",
        'if strategy == "skip":',
        "if False:",
        (f"{UNIT}/test_contention.py::test_conflict_can_skip_or_fail",),
    ),
    Mutant(
        'a message waits though on_conflict="fail" says that it is to fail',
        "tasks.execution.deferral:decide",
        'if strategy == "fail":',
        "if False:",
        (f"{UNIT}/test_contention.py::test_conflict_can_skip_or_fail",),
    ),
    Mutant(
        "a message waits for longer than max_wait",
        "tasks.execution.deferral:decide",
        "countdown = min(countdown, max_wait - waited)",
        "pass",
        (f"{UNIT}/test_contention.py",),
    ),
    Mutant(
        "max_wait never ends a wait",
        "tasks.execution.deferral:decide",
        "waited >= max_wait",
        "False",
        (f"{UNIT}/test_contention.py",),
    ),
    Mutant(
        "a message waits past the end of a dead holder's lease",
        "tasks.execution.deferral:countdown_of",
        "return min(countdown, refusal.expires_in + uniform(0.0, min(AFTER_LEASE, backoff.first)))",
        "return countdown",
        (f"{UNIT}/test_contention.py",),
    ),
    Mutant(
        "messages that were refused together try again together",
        "tasks.settings.backoff:Backoff.delay",
        "return uniform(0.0, grown)",
        "return grown",
        (f"{UNIT}/test_backoff.py",),
    ),
    Mutant(
        "a backoff grows past its cap",
        "tasks.settings.backoff:Backoff.delay",
        "grown = min(self.cap, self.first * float(self.factor) ** float(attempt))",
        "grown = self.first * float(self.factor) ** float(attempt)",
        (f"{UNIT}/test_backoff.py",),
    ),
    Mutant(
        "who was deferred last runs first",
        "tasks.waiting.queues:WaitingMessage.__lt__",
        "w.since",
        "-w.since",
        (f"{UNIT}/test_wait_queues.py",),
    ),
    Mutant(
        "an urgent message waits for all that were deferred before it",
        "tasks.waiting.queues:WaitingMessage.__lt__",
        "(w.priority, ",
        "(",
        (f"{UNIT}/test_wait_queues.py",),
    ),
    Mutant(
        "on RabbitMQ the least urgent message runs first",
        "tasks.waiting.queues:priority_order",
        "PRIORITY_SIGNS.get(driver, 0) * priority",
        "priority",
        (f"{UNIT}/test_wait_queues.py",),
    ),
    Mutant(
        "a message with nonsense for its priority ends the worker",
        "tasks.waiting.queues:priority_order",
        " if isinstance(priority, int) else 0",
        "",
        (f"{UNIT}/test_wait_queues.py",),
    ),
    Mutant(
        "a message waits without its priority",
        "tasks.waiting.room:WaitingRoom._waiter_of",
        "priority=priority_order(priority, driver_of(self._consumer.app)),",
        "",
        ("tests/contract/test_waiting_room.py",),
        "gives_to_priorities",
    ),
    Mutant(
        "a less urgent message races with the urgent one that has just been dispatched",
        "tasks.waiting.queues:MessageQueue.add",
        "waiter.since == self._head_left_since",
        "waiter.since <= self._head_left_since",
        (f"{UNIT}/test_wait_queues.py",),
    ),
    Mutant(
        "all messages that wait for a lock try again, not the first alone",
        "tasks.waiting.queues:MessageQueue.turn_of",
        "if self.waiters[0] is not waiter:",
        "if False:",
        (f"{UNIT}/test_wait_queues.py",),
    ),
    Mutant(
        "a release wakes no message that waits in a worker",
        "tasks.waiting.successor:Successor._on_step",
        "self._dispatch(head, step)",
        "pass",
        (f"{CONTRACT}/test_waiting_room.py",),
        "each_limit_by_itself",
    ),
    Mutant(
        "nobody can look who waits while a body runs in the main process",
        "tasks.waiting.dispatch:Dispatcher._evict",
        """        if last is not None:  # outside: a solo pool runs its body here
            last.request.request_dict["properties"][HAS_ROOM] = False
            self.dispatch(last)""",
        """            if last is not None:
                self.dispatch(last)""",
        (f"{CONTRACT}/test_waiting_room.py",),
        "while_a_body_runs",
    ),
    Mutant(
        "a release wakes a message that has expired, and nobody behind it",
        "tasks.waiting.dispatch:Dispatcher.heads_to_run",
        "if not self.dispatch_cancelled(heads):",
        "if True:",
        (f"{CONTRACT}/test_waiting_room.py",),
        "passes_those",
    ),
    Mutant(
        "one message that cannot be handed on ends the worker's event loop",
        "tasks.waiting.dispatch:Dispatcher.dispatch",
        "except Exception:",
        "except ZeroDivisionError:",
        (f"{CONTRACT}/test_waiting_room.py",),
        "cannot_be_handed_on",
    ),
    Mutant(
        "a message of a lost connection to the broker is reported as one that cannot run",
        "tasks.waiting.dispatch:Dispatcher._apply",
        " or waiter is not self.queues.of(request):\n",
        ":\n",
        (f"{UNIT}/test_dispatch.py",),
        "closed_room",
    ),
    Mutant(
        "a second send in a window is published",
        "tasks.unique.claim:Claim.send",
        "if earlier is not None:",
        "if False:",
        (f"{CONTRACT}/test_unique.py",),
        "a_second_send_in_the_window",
    ),
    Mutant(
        "a send whose publish failed holds up later ones",
        "tasks.unique.claim:Claim.send",
        "            self.give_up()\n            raise\n",
        "            raise\n",
        (f"{CONTRACT}/test_unique.py",),
        "a_publish_that_fails_ends_the_window",
    ),
    Mutant(
        "a send is dropped for one that was never published",
        "tasks.unique.rounds:EarlierSend.of",
        "return cls(token, state == SENT and bool(run_id), gone_by, run_id, value, expires_in)",
        "return cls(token, True, gone_by, run_id, value, expires_in)",
        (f"{CONTRACT}/test_unique.py",),
        "it_is_not_taken_for_an_earlier_send",
    ),
    Mutant(
        "a send is dropped though the nodes name different earlier ones",
        "tasks.unique.rounds:ClaimRound.agreed",
        "if tokens.count(token) < size:",
        "if False:",
        (f"{CONTRACT}/test_unique.py",),
        "name_different_sends",
    ),
    Mutant(
        "a send that was replaced runs as well",
        "tasks.unique.claim:Claim.confirm",
        "if self.carried is not None:",
        "if False:",
        (f"{CONTRACT}/test_unique.py",),
        "the_earlier_one_marked",
    ),
    Mutant(
        "a window that is to end with its run stays",
        "tasks.unique.claim:ClaimToken.release_at_end",
        'if self.until != "expired":',
        "if False:",
        (f"{CONTRACT}/test_unique.py",),
        "the_end_of_the_run_ends_the_window",
    ),
    Mutant(
        "a window that is to last ends with its run",
        "tasks.unique.claim:ClaimToken.release_at_end",
        'if self.until != "expired":',
        "if True:",
        (f"{CONTRACT}/test_unique.py",),
        "a_window_that_is_to_last",
    ),
    Mutant(
        "a window that is to end at the start of its body stays until the end",
        "tasks.unique.claim:ClaimToken.release_at_start",
        'if self.until == "started" and not self.release(session).wait():',
        "if False:",
        (f"{INTEGRATION}/test_unique.py",),
        "is_a_new_one_from_the_start_of_the_body",
    ),
    Mutant(
        "a redelivery runs although a later send has replaced it",
        "tasks.execution.redelivery:check_not_superseded",
        "if not (run.queue or run.life or delivery.is_redelivered) or run.retries:",
        "if not run.queue or run.retries:",
        (
            f"{INTEGRATION}/test_second_deliveries.py::"
            "test_a_second_delivery_that_a_later_send_replaces_does_not_run",
        ),
    ),
    Mutant(
        "messages that wait untried keep all others out of a worker of quorum queues",
        "tasks.execution.untried:_is_eligible",
        "if has_quorum_queues(consumer.app):",
        "if False:",
        (f"{INTEGRATION}/test_untried.py",),
        "keep_no_other_out",
    ),
    Mutant(
        "a message that waits untried is acknowledged, and dies with its worker",
        "tasks.worker_request:Request.carry",
        "    delivery = self.delivery",
        "    self.acknowledge()\n        delivery = self.delivery",
        (f"{INTEGRATION}/test_untried.py",),
        "is_killed_loses_no_message",
    ),
    Mutant(
        "an error that Celery handles as a run begins keeps the run from being marked as done",
        "tasks.execution.completion:end_run",
        "if error is None or error is request.__dict__.get(OUTER_ERROR):",
        "if error is None:",
        (
            f"{INTEGRATION}/test_twins.py::"
            "test_a_solo_worker_that_loses_its_connection_runs_no_locked_message_twice",
        ),
    ),
)
