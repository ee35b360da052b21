"""The story's own app. A neighbour with an app of its own has such a module, too."""

from celery import Celery

from neighbours.story_tasks import add_tasks, settings

app = Celery("neighbours.story_app")
app.conf.update(settings())
work, once = add_tasks(app)
