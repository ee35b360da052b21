"""What a Django project takes from the package. Django is imported in this folder alone.

Read `task.py` first. In INSTALLED_APPS this package gives the admin a page *Locks*. Each public
name is imported at its first use, so a project imports what it uses.

- `task.py`: `LockedDjangoTask`: a task that is sent once the transaction is committed.
- `fenced.py`: `fenced_update`: an UPDATE that raises if a later holder of the lock has written.
- `apps.py`: `RedlockConfig`: the entry of INSTALLED_APPS.
- `models.py`: `Locks`: a model without a table, for the permissions of the page.
- `admin.py`: `LocksAdmin`: the views of the page, and who may see and use them.
- `page.py`: `LocksPage`, `Section`: what the page shows.
- `ending.py`: `CONFIRMATIONS`, `find_marked`, `end`: how a confirmation ends one lock or claim.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery_redlock.django.fenced import fenced_update
    from celery_redlock.django.task import LockedDjangoTask

__all__ = ["LockedDjangoTask", "fenced_update"]

_MODULES = {"LockedDjangoTask": "task", "fenced_update": "fenced"}  # by public name


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
