"""An app with a task class of its own, and tasks with a lock beside it."""

from celery import Celery, Task
from celery_redlock import LockedTask

from database import open_transaction, transaction, write_order


class DatabaseTask(Task):
    """The task class of the app: each body has a database transaction."""

    abstract = True

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the body in a transaction."""
        with open_transaction():
            return self.run(*args, **kwargs)


class LockedDatabaseTask(LockedTask, DatabaseTask):
    """The same, with a lock."""

    abstract = True


app = Celery(
    "shop",
    broker="redis://localhost",
    backend="redis://localhost",
    task_cls=DatabaseTask,
    include=["vendor"],
)
app.conf.task_acks_late = True
app.conf.task_reject_on_worker_lost = True
app.conf.redlock_nodes = ["redis://a", "redis://b", "redis://c"]


@app.task(name="shop.take", base=LockedDatabaseTask, lock_key="stock:{sku}")
def take(sku: str, pieces: int) -> str:
    """Take pieces of a sku: one run at a time for each sku."""
    return write_order(sku, pieces)


@app.task(name="shop.thank")
def thank(customer: str) -> str:
    """Thank a customer. This task has no lock."""
    return f"Thank you, {customer}, from {transaction.get()}"


# A task of a package.
app.conf.redlock_tasks = {"vendor.sync": {"key": "vendor:{account}"}}
