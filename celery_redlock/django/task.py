"""`LockedDjangoTask`: it can be sent once the transaction is committed.

Not here: what a send does (`tasks/task.py`).
"""

from __future__ import annotations

from typing import Any

from celery_redlock.tasks.sending import check_send
from celery_redlock.tasks.task import LockedTask

try:
    from celery.contrib.django.task import DjangoTask
except ImportError as error:
    text = "celery_redlock.django needs Django: pip install django"
    raise ImportError(f"{text} ({error})") from error

__all__ = ["LockedDjangoTask"]


class LockedDjangoTask(LockedTask, DjangoTask):
    """A locked task with Celery's `delay_on_commit` and `apply_async_on_commit` for Django.

    `@shared_task(base=LockedDjangoTask, lock_key="stock:{sku}")`. Both methods send when the
    database transaction is committed, and not at all if it is rolled back. Deduplication and its
    claim happen at that time, too. Outside a transaction they send at once. They return None.
    """

    abstract = True

    def apply_async_on_commit(
        self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any
    ) -> None:
        """Call `apply_async` once the transaction is committed.

        A wrong option raises SettingsError here, before the commit.
        """
        if not more:  # such a send is not deduplicated
            check_send(self, options)
        super().apply_async_on_commit(args, kwargs, *more, **options)
