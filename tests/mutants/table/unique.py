"""Mutants of sends that are unique: their windows, their claims, and what replaces them."""

from __future__ import annotations

from tests.mutants.mutant import CONTRACT, INTEGRATION, UNIT, Mutant

MUTANTS = (
    Mutant(
        "a retry after a deferral forgets the claim of its send",
        "tasks.delivery.delivery:LockHeader.of",
        "header.id, unique=header.unique, life=header.life)",
        "header.id, life=header.life)",
        (
            f"{UNIT}/test_deferral.py::test_the_claim_of_a_send_goes_on_through_deferrals_"
            "redeliveries_and_retries",
        ),
    ),
    Mutant(
        "a redelivery that waits forgets the claim of its send",
        "tasks.delivery.delivery:LockHeader.waiting_for_first_delivery",
        "waits=self.waits + 1)",
        "waits=self.waits + 1, unique=None)",
        (
            f"{UNIT}/test_deferral.py::test_the_claim_of_a_send_goes_on_through_deferrals_"
            "redeliveries_and_retries",
        ),
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
        "tasks.execution.outcomes:completion_marker",
        "heeds_later=not delivery.is_redelivered,",
        "heeds_later=True,",
        (
            f"{INTEGRATION}/test_second_deliveries.py::"
            "test_a_second_delivery_of_a_run_that_a_later_send_replaces_ends_nothing",
        ),
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
        "if tokens.count(token) < quorum:",
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
        "tasks.execution.outcomes:check_not_superseded",
        "if not (run.queue or run.life or delivery.is_redelivered) or run.retries:",
        "if not run.queue or run.retries:",
        (
            f"{INTEGRATION}/test_second_deliveries.py::"
            "test_a_second_delivery_that_a_later_send_replaces_does_not_run",
        ),
    ),
    Mutant(
        "a deferral ends its send's window",
        "tasks.execution.outcomes:defer",
        "    delivery.request.__dict__[CONTINUES] = True\n",
        "",
        (f"{INTEGRATION}/test_unique.py",),
        "test_is_the_first_one_until or test_returns_the_result",
    ),
    Mutant(
        "a message that can never be republished leaves the claim of its send",
        "tasks.execution.outcomes:defer",
        "    header = report(delivery",
        "    delivery.request.__dict__[CONTINUES] = True\n    header = report(delivery",
        (
            f"{INTEGRATION}/test_put_back.py::"
            "test_what_is_refused_for_good_is_the_end_of_its_sends_window",
        ),
    ),
)
