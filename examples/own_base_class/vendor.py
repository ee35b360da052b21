"""Stands for a package with a task whose code is not yours."""

from celery import shared_task

from database import write_order


@shared_task(name="vendor.sync")
def sync(account: str) -> str:
    """Synchronize an account."""
    return write_order(account, 0)
