"""The story's app, as the process that starts the beats imports it: it makes the schedule first."""

import os

from celery_db_scheduler import Base, TaskSchedule
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from neighbours.beat_schedule import EVERY
from neighbours.story_app import app, once, work

__all__ = ["app", "once", "work"]

_engine = create_engine(os.environ["DATABASE_URL"])
Base.metadata.create_all(_engine)
with Session(_engine) as session:
    # the scheduler puts the id of the row before the arguments
    session.add(TaskSchedule(task_name=work.name, interval_seconds=int(EVERY), task_args=[]))
    session.commit()
