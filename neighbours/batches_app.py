"""An app of the story whose tasks are of celery-batches and have a lock, which is refused."""

from celery import Celery
from celery_batches import Batches

from celery_redlock import LockedTask
from neighbours.story_tasks import LOCKED, add_tasks, settings


class LockedBatches(LockedTask, Batches):
    """A run takes several messages; each would need a lock of its own."""

    abstract = True


app = Celery("neighbours.batches_app")
app.conf.update(settings())
work, once = add_tasks(app, {**LOCKED, "base": LockedBatches})
