#!/bin/sh
# uWSGI: hooks of os.register_at_fork in a worker process
#
# Expected: a worker of uWSGI's master is a fork that goes on in Python, so the hooks that a module has
#   registered by os.register_at_fork run in it. Libraries rely on it to drop what belongs to the parent:
#   connections, threads, the state of a random generator.
# Seen: no hook runs, not with --enable-threads either. With --py-call-osafterfork they run. The help of
#   that option speaks of signals alone: "enable child processes running cpython to trap OS signals".
#   With --lazy-apps the worker imports the application itself, so there is nothing to drop.
# Source: plugins/python/python_plugin.c, `uwsgi_python_post_fork`: PyOS_AfterFork_Child, which runs the
#   hooks, is called only if `call_osafterfork` is set. uWSGI forks in C, without os.fork.
# Needs: a C compiler, because uWSGI is built from its source.
set -eu
folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill -INT "$server" 2>/dev/null || true; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check uWSGI==2.0.31

cat > "$folder/application.py" <<'PYTHON'
import os

called = []
imported_in = os.getpid()
os.register_at_fork(after_in_child=lambda: called.append(os.getpid()))


def application(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    importer = "worker" if imported_in == os.getpid() else "master"
    return [f"imported in the {importer}, hook called in the worker: {os.getpid() in called}".encode()]
PYTHON

cat > "$folder/ask.py" <<'PYTHON'
import sys
import time
import urllib.request
from pathlib import Path

address = Path(sys.argv[1])
end = time.monotonic() + 60
while time.monotonic() < end:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[2]}/", timeout=30) as reply:
            print(reply.read().decode())
        break
    except OSError:
        time.sleep(0.1)
else:
    sys.exit("uWSGI does not answer: " + address.read_text())
PYTHON

see() {  # see OPTION...: what a worker answers that was started with these options
  port=$("$folder/venv/bin/python" -c 'import socket
with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    print(one.getsockname()[1])')
  "$folder/venv/bin/uwsgi" --http-socket "127.0.0.1:$port" --master --processes 1 \
    --wsgi-file "$folder/application.py" "$@" > "$folder/log" 2>&1 &
  server=$!
  echo "${*:-no option}: $("$folder/venv/bin/python" "$folder/ask.py" "$folder/log" "$port")"
  kill -INT "$server"
  wait "$server" || true
  server=
}

{
  echo "uWSGI $("$folder/venv/bin/uwsgi" --version)"
  see
  see --enable-threads
  see --py-call-osafterfork
  see --lazy-apps
} > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
uWSGI 2.0.31
no option: imported in the master, hook called in the worker: False
--enable-threads: imported in the master, hook called in the worker: False
--py-call-osafterfork: imported in the master, hook called in the worker: True
--lazy-apps: imported in the worker, hook called in the worker: False
SEEN
