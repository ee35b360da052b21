"""The story's app with tasks that have no lock: a control."""

from celery import Celery

from neighbours.story_tasks import LATE, add_tasks, settings

app = Celery("neighbours.unlocked_app")
app.conf.update(settings())
work, once = add_tasks(app, LATE, unique={})
