"""A Flask app with Celery, as the documentation of Flask sets them up."""

from celery import Celery
from celery_redlock import LockedTask
from flask import Flask


def celery_init_app(app: Flask) -> Celery:
    """Make the Celery app of a Flask app."""

    # The documentation of Flask has `class FlaskTask(Task)` here.
    class FlaskTask(LockedTask):
        """A task whose body has the app context of Flask."""

        def __call__(self, *args: object, **kwargs: object) -> object:
            with app.app_context():
                return self.run(*args, **kwargs)

    celery_app = Celery(app.name, task_cls=FlaskTask)
    celery_app.config_from_object(app.config["CELERY"])
    celery_app.set_default()
    app.extensions["celery"] = celery_app
    return celery_app


def create_app() -> Flask:
    """Make the Flask app."""
    app = Flask(__name__)
    app.config.from_mapping(
        GREETING="Thank you",
        CELERY={
            "broker_url": "redis://localhost",
            "result_backend": "redis://localhost",
            "task_ignore_result": True,
            "task_acks_late": True,
            "task_reject_on_worker_lost": True,
            "redlock_nodes": ["redis://a", "redis://b", "redis://c"],
            # A task has a lock only if it sets lock_key or lock_args.
            "redlock_key": False,
        },
    )
    app.config.from_prefixed_env()
    celery_init_app(app)

    from task_app import views

    app.register_blueprint(views.bp)
    return app
