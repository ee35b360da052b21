"""`LocksAdmin`: the page *Locks* of Django's admin, and who may see and use it.

Django imports this file in each process that has its admin, so what the page needs is imported at
the first request. Not here: what the page shows (`page.py`), and what a confirmation does
(`ending.py`).
"""

from __future__ import annotations

from typing import Any

from celery import current_app
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.decorators import method_decorator
from django.views.decorators.http import require_http_methods

from celery_redlock.django.models import Locks
from celery_redlock_entry import without_proxy

ACTIONS = {"break": "break_lock", "end-claim": "end_claim"}  # by address, the permission
LIST = "celery_redlock_locks_changelist"  # its name, by which the admin's index links it


@admin.register(Locks)
class LocksAdmin(admin.ModelAdmin):
    """Shows locks, waiters, rates and claims; ends one lock or claim after a confirmation.

    Who may break or end may also view. Nobody adds, changes or deletes: there are no rows.
    """

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        names = ("view_locks", *ACTIONS.values())
        return any(request.user.has_perm(f"celery_redlock.{name}") for name in names)

    def get_urls(self) -> list[Any]:
        """Return the addresses of the page alone: those of rows would ask for a table."""
        wrapped = self.admin_site.admin_view
        urls = [path("", wrapped(self.changelist_view), name=LIST)]
        for action, permission in ACTIONS.items():
            name = f"celery_redlock_locks_{permission}"
            view = wrapped(self.confirm_view)
            urls.append(path(f"{action}/<str:mark>/", view, {"action": action}, name=name))
        return urls

    @method_decorator(require_http_methods(["GET", "HEAD"]))
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show what the lock nodes and the workers of the project's current Celery app say."""
        from celery_redlock.django.page import LocksPage

        if not self.has_view_permission(request):
            raise PermissionDenied
        search = request.GET.get("q", "").strip()
        may = {name: request.user.has_perm(f"celery_redlock.{name}") for name in ACTIONS.values()}
        page = LocksPage.read(without_proxy(current_app), search)
        more = {"page": page, "search": search, "may": may, **(extra_context or {})}
        return self._page(request, "locks.html", "Locks", **more)

    @method_decorator(require_http_methods(["GET", "HEAD", "POST"]))
    def confirm_view(self, request: HttpRequest, action: str, mark: str) -> HttpResponse:
        """Ask whether to end the lock or claim of a mark; with POST, end it."""
        from celery_redlock.django import ending

        if not request.user.has_perm(f"celery_redlock.{ACTIONS[action]}"):
            raise PermissionDenied
        question = ending.CONFIRMATIONS[action]
        app = without_proxy(current_app)
        found, notes = ending.find_marked(app, action, mark)
        if found is None:
            self.message_user(request, " ".join(notes), messages.WARNING)
        elif request.method == "POST":
            by = str(request.user.get_username())  # which may be a number, or a UUID
            ended = ending.end(app, found, by)
            self._record(request, found.resource, ended)
        else:
            more = {"found": ending.describe(found), "notes": notes, "question": question}
            return self._page(request, "confirmation.html", question.title, **more)
        return HttpResponseRedirect(reverse(f"admin:{LIST}", current_app=self.admin_site.name))

    def _record(self, request: HttpRequest, resource: str, ended: Any) -> None:
        """Tell the user what became of a lock or claim, and write it to the admin's own log."""
        from celery_redlock.label import escaped

        line = escaped(ended.line)
        if ended.was_there:
            self.log_change(request, Locks(resource=escaped(resource)), line)
        is_done = ended.was_there and ended.is_complete
        level = messages.SUCCESS if is_done else messages.WARNING
        self.message_user(request, f"Result: {line}", level)  # its first letter becomes a capital

    def _page(self, request: HttpRequest, name: str, title: str, **more: Any) -> HttpResponse:
        request.current_app = self.admin_site.name
        context = {**self.admin_site.each_context(request), "opts": self.opts, "title": title}
        template = f"admin/celery_redlock/{name}"
        return TemplateResponse(request, template, {**context, **more})
