"""The views of the app."""

from celery.result import AsyncResult
from flask import Blueprint

from task_app import tasks

bp = Blueprint("orders", __name__)


@bp.post("/orders/<sku>/<int:pieces>")
def order(sku: str, pieces: int) -> tuple[dict[str, object], int]:
    """Send the task of an order."""
    return {"task": tasks.take.delay(sku, pieces).id}, 202


@bp.get("/tasks/<task_id>")
def state(task_id: str) -> dict[str, object]:
    """Return the state of a task."""
    return {"state": AsyncResult(task_id).state}
