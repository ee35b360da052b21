#!/bin/sh
# kombu's filesystem and SQLAlchemy transports: a message that is received and not acknowledged
#
# Expected: the message is delivered again if its consumer is killed, as with RabbitMQ (the connection
#   ends) and Redis (the visibility timeout). A worker with late acknowledgement relies on it. The tables
#   of the SQLAlchemy transport even have a column `visible`.
# Seen: it comes back only if the consumer itself closes its connection. After a SIGKILL it is gone: no
#   time, no restart and no other consumer brings it back.
# Source: kombu/transport/filesystem.py, `Channel._get`: the file is moved away and removed as the message
#   is read. kombu/transport/sqlalchemy/__init__.py, `Channel._get`: the row gets `visible = False`, and
#   no statement sets it to True again. What a consumer puts back at its end is kept in its own memory:
#   kombu/transport/virtual/base.py, `QoS.restore_unacked_once`.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check \
  celery==5.6.3 kombu==5.7.0 SQLAlchemy==2.1.9

cat > "$folder/consumer.py" <<'PYTHON'
import os
import signal
import subprocess
import sys

from kombu import Connection, __version__

FOLDER = sys.argv[1]


def queue(transport):
    folder = os.path.join(FOLDER, transport)
    if transport == "sqlalchemy":
        return Connection(f"sqla+sqlite:///{folder}.sqlite").SimpleQueue("work")
    options = {"data_folder_in": folder, "data_folder_out": folder, "control_folder": folder + "-control"}
    os.makedirs(folder, exist_ok=True)
    return Connection("filesystem://", transport_options=options).SimpleQueue("work")


def receive(transport, end):
    work = queue(transport)
    work.get(timeout=30)
    if end == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    work.channel.connection.client.close()


def find(transport):
    work = queue(transport)
    try:
        work.get(timeout=5).ack()
    except work.Empty:
        return "is gone"
    return "comes back"


if len(sys.argv) > 2:
    receive(*sys.argv[2:])
    sys.exit()
print("kombu", __version__)
for transport in ("filesystem", "sqlalchemy"):
    for end in ("close", "SIGKILL"):
        work = queue(transport)
        work.put("message")
        work.close()
        subprocess.run([sys.executable, __file__, FOLDER, transport, end])
        print(f"{transport}: received, then {end}: the message {find(transport)}")
PYTHON

"$folder/venv/bin/python" "$folder/consumer.py" "$folder" | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
kombu 5.7.0
filesystem: received, then close: the message comes back
filesystem: received, then SIGKILL: the message is gone
sqlalchemy: received, then close: the message comes back
sqlalchemy: received, then SIGKILL: the message is gone
SEEN
