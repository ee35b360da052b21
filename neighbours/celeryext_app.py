"""An app of the story that flask-celeryext makes of a Flask app."""

from flask import Flask, current_app
from flask_celeryext import FlaskCeleryExt
from flask_celeryext.app import AppContextTask

from celery_redlock import LockedTask
from neighbours.story_tasks import LOCKED, add_tasks, settings


class LockedAppContextTask(LockedTask, AppContextTask):
    """A body has the context of the Flask app."""

    abstract = True


def see_context() -> None:
    if current_app.config["GREETING"] != "of the Flask app":
        raise RuntimeError


web = Flask("neighbours.celeryext_app")
web.config.update(GREETING="of the Flask app", **settings())
app = FlaskCeleryExt(web).celery
work, once = add_tasks(app, {**LOCKED, "base": LockedAppContextTask}, check=see_context)
