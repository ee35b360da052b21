#!/bin/sh
# django-celery-results: date_done of a task that has not ended
#
# Expected: AsyncResult.date_done is None until the task has ended, as with the backends of Celery itself. The
#   column TaskResult.date_done is the time of completion too, by its label in Django's admin.
# Seen: a task that waits for its retry has a date_done, although its result is not ready. It is the time at
#   which the row was saved last, in whatever state. No row has an empty one, so a query for tasks that have
#   not ended, or for how long they took, has to ask for the status as well.
# Source: django_celery_results/models.py, `TaskResult.date_done` is a DateTimeField with auto_now, and not
#   null. backends/database.py, `_store_result`, hands over no date. celery/backends/base.py,
#   `Backend._get_result_meta`, sets date_done only in one of READY_STATES.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check \
  django-celery-results==2.6.0 Django==5.2.19 celery==5.7.0 kombu==5.7.0 SQLAlchemy==2.1.9
mkdir "$folder/results"

cat > "$folder/see.py" <<'PYTHON'
import sys
import time

import django
from celery import Celery
from celery.contrib.testing.worker import start_worker
from django.conf import settings
from django.core.management import call_command

NAME, BACKEND = sys.argv[1:]
app = Celery("shop", broker="memory://", backend=BACKEND)


@app.task(bind=True)
def work(self):
    raise self.retry(countdown=3600)


def prepare():
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "django.sqlite"}},
        INSTALLED_APPS=["django_celery_results"], USE_TZ=True,
    )  # fmt: skip
    django.setup()
    call_command("migrate", verbosity=0)


prepare()
with start_worker(app, pool="solo", perform_ping_check=False, loglevel="ERROR"):
    result = work.delay()
    end = time.monotonic() + 120
    while result.state != "RETRY":
        if time.monotonic() > end:
            raise SystemExit(f"the state is {result.state}")
        time.sleep(0.1)
    dated = "none" if result.date_done is None else "a date"
    print(f"{NAME}: state {result.state}, ready {result.ready()}, date_done {dated}")
if BACKEND == "django-db":
    from django_celery_results.models import TaskResult

    rows = TaskResult.objects.filter(date_done=None).count(), TaskResult.objects.count()
    print("TaskResult: {} of {} rows without date_done".format(*rows))
PYTHON

cd "$folder"
{
  "$folder/venv/bin/python" -c 'from importlib.metadata import version
for name in ("celery", "Django", "django-celery-results"):
    print(name, version(name))'
  "$folder/venv/bin/python" see.py "Celery's file backend" "file://$folder/results"
  "$folder/venv/bin/python" see.py "Celery's SQLAlchemy backend" "db+sqlite:///$folder/sqlalchemy.sqlite"
  "$folder/venv/bin/python" see.py django-celery-results django-db
} > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
celery 5.7.0
Django 5.2.19
django-celery-results 2.6.0
Celery's file backend: state RETRY, ready False, date_done none
Celery's SQLAlchemy backend: state RETRY, ready False, date_done none
django-celery-results: state RETRY, ready False, date_done a date
TaskResult: 0 of 1 rows without date_done
SEEN
