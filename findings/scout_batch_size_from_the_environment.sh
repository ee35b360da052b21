#!/bin/sh
# Scout's agent: SCOUT_ERRORS_BATCH_SIZE in the environment
#
# Expected: each setting may stand in the environment, as SCOUT_ and its name, and is converted to its
#   type there. So SCOUT_ERRORS_BATCH_SIZE=1 sends each error by itself.
# Seen: no error is sent at all. The value stays a text, the thread that sends errors ends by a TypeError
#   at each start, and only its log at DEBUG tells of it. The same value as a number, set in code, works.
# Source: scout_apm/core/config.py, CONVERSIONS has no entry for errors_batch_size.
#   scout_apm/core/error_service.py, `ErrorServiceThread.run`, calls range() with the text.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check scout-apm==4.0.0 celery==5.7.0

cat > "$folder/shop.py" <<'PYTHON'
import gzip
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

got = threading.Event()
errors = []


class Collector(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        errors.extend(each["exception_class"] for each in json.loads(gzip.decompress(body))["problems"])
        self.send_response(200)
        self.end_headers()
        got.set()

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ.update(
    SCOUT_MONITOR="true", SCOUT_KEY="k" * 20, SCOUT_NAME="shop", SCOUT_CORE_AGENT_LAUNCH="false",
    SCOUT_CORE_AGENT_DOWNLOAD="false", SCOUT_CORE_AGENT_SOCKET_PATH="tcp://127.0.0.1:9",
    SCOUT_ERRORS_HOST=f"http://127.0.0.1:{server.server_port}",
)

import scout_apm.celery  # noqa: E402
from celery import Celery  # noqa: E402
from scout_apm.core.config import scout_config  # noqa: E402
from scout_apm.core.error_service import ErrorServiceThread  # noqa: E402

app = Celery("shop")
scout_apm.celery.install(app)
if sys.argv[1:]:
    scout_config.set(errors_batch_size=int(sys.argv[1]))


@app.task
def fail():
    raise ValueError


fail.apply()
# without an error, until the thread has ended that would send it
got.wait(30) if isinstance(scout_config.value("errors_batch_size"), int) else ErrorServiceThread._instance.join(30)
print(f"batch size {scout_config.value('errors_batch_size')!r}, sent: {', '.join(errors) or 'nothing'}")
PYTHON

cd "$folder"
{
  "$folder/venv/bin/python" -c 'from importlib.metadata import version
print("celery", version("celery"), "scout-apm", version("scout-apm"))'
  "$folder/venv/bin/python" shop.py 2>/dev/null
  "$folder/venv/bin/python" shop.py 1 2>/dev/null
  SCOUT_ERRORS_BATCH_SIZE=1 "$folder/venv/bin/python" shop.py 2>/dev/null
} > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
celery 5.7.0 scout-apm 4.0.0
batch size 5, sent: ValueError
batch size 1, sent: ValueError
batch size '1', sent: nothing
SEEN
