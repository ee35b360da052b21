"""Mutants of the page *Locks* of Django's admin: who may see, break and end what."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TESTS = "integration/test_django_admin.py"
REFUSED = f"{TESTS}::is_refused_by_the_server"
PAGE = "django.admin:LocksAdmin"

# of each: name; where and what catches it; old and new
# fmt: off
MUTANTS = (
    Mutant("who may only see the page breaks a lock",
           f"{PAGE}.confirm_view", REFUSED,
           'if not request.user.has_perm(f"celery_redlock.{ACTIONS[action]}"):',
           "if not self.has_view_permission(request):"),
    Mutant("who may break a lock ends a claim",
           f"{PAGE}.confirm_view", REFUSED,
           'f"celery_redlock.{ACTIONS[action]}"', '"celery_redlock.break_lock"'),
    Mutant("who may end a claim breaks a lock",
           f"{PAGE}.confirm_view", REFUSED,
           'f"celery_redlock.{ACTIONS[action]}"', '"celery_redlock.end_claim"'),
    Mutant("each member of staff breaks locks and ends claims",
           f"{PAGE}.confirm_view", REFUSED,
           "            raise PermissionDenied", "            pass"),
    Mutant("each member of staff sees the page",
           f"{PAGE}.changelist_view", REFUSED,
           "            raise PermissionDenied", "            pass"),
    Mutant("who may break a lock cannot find it",
           f"{PAGE}.has_view_permission", REFUSED,
           '("view_locks", *ACTIONS.values())', '("view_locks",)'),
    Mutant("the page has no login",
           f"{PAGE}.get_urls", REFUSED,
           "wrapped(self.confirm_view)", "self.confirm_view"),
    Mutant("a link breaks a lock without a confirmation",
           f"{PAGE}.confirm_view", f"{TESTS}::with_a_csrf_token",
           'elif request.method == "POST":', 'elif request.method != "HEAD":'),
    Mutant("the lock of a later holder is broken",
           "django.ending:mark_of", f"{TESTS}::another_holder_by_then",
           "[text_of(target.key), text_of(target.value)]", "[text_of(target.key)]"),
    Mutant("the claim of a later call is ended",
           "django.ending:mark_of", f"{TESTS}::a_claim_is_ended_once",
           "[target.name, target.token]", "[target.name]"),
    Mutant("who broke a lock is not in the admin's log",
           f"{PAGE}._record", f"{TESTS}::in_both_logs",
           "if ended.was_there:", "if False:"),
    Mutant("who broke a lock is not in the log if the user's name is a number",
           f"{PAGE}.confirm_view", f"{TESTS}::may_be_a_number",
           "str(request.user.get_username())", "request.user.get_username()"),
)
# fmt: on
