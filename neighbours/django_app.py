"""An app of the story in a Django project. `more["base"]`: the path of its task class."""

import django
from celery import Celery
from kombu.utils.imports import symbol_by_name

from neighbours.story_setup import read_setup
from neighbours.story_tasks import LOCKED, add_tasks, settings

django.setup()
app = Celery("neighbours.django_app")
app.conf.update(settings())
_base = symbol_by_name(read_setup().more.get("base", "celery_redlock:LockedTask"))
work, once = add_tasks(app, {**LOCKED, "base": _base})
