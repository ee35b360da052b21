"""The tasks, which a worker runs and the API sends."""

from celery import Celery
from celery_redlock import LockedTask

import warehouse

celery_app = Celery(
    "shop", broker="redis://localhost", backend="redis://localhost"
)
celery_app.conf.task_acks_late = True
celery_app.conf.task_reject_on_worker_lost = True
celery_app.conf.redlock_nodes = ["redis://a", "redis://b", "redis://c"]


# lock_unique_for: while one message waits or runs, a second is not sent.
@celery_app.task(
    name="shop.recount",
    base=LockedTask,
    lock_key="stock:{sku}",
    lock_unique_for=600,
)
def recount(sku: str) -> int:
    """Count the pieces of a sku in the warehouse."""
    return warehouse.count(sku)
