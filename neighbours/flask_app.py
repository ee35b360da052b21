"""An app of the story in a Flask app, made as Flask's documentation makes it.

`flask_app` is the module that `celery -A` gets. Each body needs the context of the Flask app.
"""

from celery import Celery
from flask import Flask, current_app

from celery_redlock import LockedTask
from neighbours.story_tasks import LOCKED, add_tasks, settings


def celery_init_app(web: Flask) -> Celery:
    class FlaskTask(LockedTask):
        def __call__(self, *args: object, **kwargs: object) -> object:
            with web.app_context():
                return self.run(*args, **kwargs)

    made = Celery(web.name, task_cls=FlaskTask)
    made.config_from_object(web.config["CELERY"])
    made.set_default()
    web.extensions["celery"] = made
    return made


def see_context() -> None:
    if current_app.config["GREETING"] != "of the Flask app":
        raise RuntimeError


web = Flask("neighbours.flask_app")
web.config.from_mapping(GREETING="of the Flask app", CELERY=settings())
app = celery_init_app(web)
_options = {name: value for name, value in LOCKED.items() if name != "base"}
work, once = add_tasks(app, _options, check=see_context)
