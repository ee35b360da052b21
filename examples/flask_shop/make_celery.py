"""The Celery app for its command line: `celery -A make_celery worker`."""

from task_app import create_app

flask_app = create_app()
celery_app = flask_app.extensions["celery"]
