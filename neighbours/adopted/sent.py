"""What sends: the application's Celery app, and the tasks of the story as they are in it."""

import os
from importlib import import_module

from neighbours.story_setup import read_setup

app = import_module(read_setup().app).app
if "DJANGO_SETTINGS_MODULE" in os.environ:
    import django

    django.setup()
app.loader.import_default_modules()
app.finalize()
work, once = app.tasks["story.work"], app.tasks["story.once"]
