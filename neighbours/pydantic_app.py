"""An app of the story whose tasks take a model of Pydantic: `pydantic=True`."""

from __future__ import annotations

from typing import Any

from celery import Celery
from pydantic import BaseModel

from neighbours.story_tasks import LOCKED, UNIQUE, body, settings


class Order(BaseModel):
    """The argument of both tasks."""

    key: str
    pieces: int = 1


class Orders:
    """Sends a task with a model."""

    def __init__(self, task: Any) -> None:
        self.task = task

    def delay(self, key: str, until: str = "") -> Any:
        return self.task.delay(Order(key=key), until)


app = Celery("neighbours.pydantic_app")
app.conf.update(settings())
_options = {**LOCKED, "lock_key": "story:{order}", "bind": True, "pydantic": True}


@app.task(name="story.work", **_options)
def of_work(task: Any, order: Order, until: str = "") -> str:
    return body(task.request.id, order.key, until)


@app.task(name="story.once", **_options, **UNIQUE)
def of_once(task: Any, order: Order, until: str = "") -> str:
    return body(task.request.id, order.key, until)


work, once = Orders(of_work), Orders(of_once)
