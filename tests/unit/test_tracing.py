"""When a process begins to write to spans: once it may record any, and not before."""

from __future__ import annotations

import subprocess
import sys

import pytest

# redis-py imports OpenTelemetry by itself if it finds the SDK: not in these processes
BEGINNING = """
import sys
sys.modules["opentelemetry"] = None
from celery import Celery, signals as celerys
import celery_redlock
from celery_redlock import LockedTask, Redlock, signals
from celery_redlock.operate import tracing

SIGNALS = [one for name, one in vars(signals).items() if name.startswith(("lock_", "node_"))]
assert len(SIGNALS) == 9

def connected():
    return [one.name for one in SIGNALS if one.receivers]

def import_it():
    del sys.modules["opentelemetry"]
    import opentelemetry.trace
    app.finalize()
    tracing.connect_if_recording()
    assert not connected()  # the API alone records nothing
    import opentelemetry.sdk.trace
    assert not connected()

app = Celery("shop", broker="memory://", backend="cache+memory://")

@app.task(base=LockedTask, lock_key=False, shared=False)
def order(): ...

TRACED = ["lock_acquired", "lock_deferred", "lock_released", "lock_skipped"]
"""
LOCK = """
from celery_redlock.testing import fake_nodes, trust_nodes
def take(resource):
    with fake_nodes() as nodes:
        trust_nodes(nodes)
        with Redlock([node.url for node in nodes]) as redlock, redlock.lock(resource):
            return connected()
"""
NOWHERE = f"""
app.finalize()
order.apply().get()
{LOCK}
take("first")
assert "opentelemetry.trace" not in sys.modules
assert not connected(), connected()
names = [name for _, name in celerys.task_prerun.receivers]
assert tracing.connect_at_first_run not in names
"""
BEFORE_THE_APP = """
import_it()
Celery("other", broker="memory://").finalize()
assert sorted(connected()) == TRACED
"""
ANOTHER_PROVIDER = """
del sys.modules["opentelemetry"]
import opentelemetry.trace
class Provider(opentelemetry.trace.TracerProvider):
    get_tracer = None
opentelemetry.trace.set_tracer_provider(Provider())
app.finalize()
assert "opentelemetry.sdk.trace" not in sys.modules
assert sorted(connected()) == TRACED
"""
BEFORE_THE_FIRST_RUN = """
app.finalize()
import_it()
order.apply().get()
assert sorted(connected()) == TRACED
"""
BEFORE_A_LOCK = f"""
{LOCK}
import_it()
assert sorted(take("first")) == TRACED
"""
IN_A_CHILD = """
app.finalize()
order.apply().get()
celerys.worker_process_init.send(sender=None)
import_it()
order.apply().get()
assert sorted(connected()) == TRACED
"""
AFTER_A_LOCK = f"""
app.finalize()
order.apply().get()
{LOCK}
assert not take("first")
import_it()
assert sorted(take("second")) == TRACED
take("third")
assert [len(one.receivers) for one in SIGNALS if one.receivers] == [1] * 4
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(NOWHERE, id="never"),
        pytest.param(ANOTHER_PROVIDER, id="by a provider that is not the SDK's"),
        pytest.param(BEFORE_THE_APP, id="before an app finalizes"),
        pytest.param(BEFORE_THE_FIRST_RUN, id="before the first run"),
        pytest.param(IN_A_CHILD, id="in a child whose parent had a run of its own"),
        pytest.param(BEFORE_A_LOCK, id="before a lock, without an app"),
        pytest.param(AFTER_A_LOCK, id="after a run and a lock"),
    ],
)
def test_signals_have_receivers_once_spans_may_be_recorded(script: str) -> None:
    command = [sys.executable, "-W", "ignore::ResourceWarning", "-c", BEGINNING + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
