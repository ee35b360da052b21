"""The tasks of the app."""

from celery import shared_task
from flask import current_app

from task_app import warehouse


@shared_task(lock_key="stock:{sku}", ignore_result=False)
def take(sku: str, pieces: int) -> str:
    """Take pieces of a sku: one run at a time for each sku."""
    warehouse.pick(sku, pieces)
    return f"{current_app.config['GREETING']}: {pieces} of {sku}"


# lock_unique_for: a second call is refused until the first has run.
@shared_task(
    lock_key="stock:{sku}",
    lock_unique_for=600,
    lock_on_duplicate="fail",
)
def recount(sku: str) -> None:
    """Count the pieces of a sku."""
    warehouse.count(sku)


@shared_task(ignore_result=False)
def thank(customer: str) -> str:
    """Thank a customer. This task has no lock."""
    return f"{current_app.config['GREETING']}, {customer}"
