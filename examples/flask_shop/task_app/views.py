"""The views of the app."""

from celery.result import AsyncResult
from celery_redlock import DuplicateTask, LockTaken, QuorumUnreachable
from flask import Blueprint

from task_app import tasks, warehouse

bp = Blueprint("orders", __name__)


@bp.post("/orders/<sku>/<int:pieces>")
def order(sku: str, pieces: int) -> tuple[dict[str, object], int]:
    """Send the task of an order."""
    return {"task": tasks.take.delay(sku, pieces).id}, 202


@bp.post("/recounts/<sku>")
def recount(sku: str) -> tuple[dict[str, object], int]:
    """Send the task; a second click is answered by 409."""
    try:
        return {"task": tasks.recount.delay(sku).id}, 202
    except DuplicateTask:
        return {"error": f"{sku} is being counted"}, 409


@bp.get("/tasks/<task_id>")
def state(task_id: str) -> dict[str, object]:
    """Return the state of a task."""
    return {"state": AsyncResult(task_id).state}


@bp.post("/stock/<sku>/<int:pieces>")
def put_back(sku: str, pieces: int) -> tuple[dict[str, object], int]:
    """Put pieces back while no task takes any of the sku."""
    try:
        with tasks.take.lock_for(sku, pieces, wait=1):
            warehouse.put_back(sku, pieces)
    except LockTaken:
        return {"error": f"{sku} is in use, try again"}, 409
    except QuorumUnreachable:
        return {"error": "too few lock nodes answer"}, 503
    return {"pieces": pieces}, 200
