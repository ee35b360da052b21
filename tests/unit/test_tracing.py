"""When a process begins to write to spans: once it may record any, and not before."""

from __future__ import annotations

import json
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


SCRIPTS = {
    "never": NOWHERE,
    "by a provider that is not the SDK's": ANOTHER_PROVIDER,
    "before an app finalizes": BEFORE_THE_APP,
    "before the first run": BEFORE_THE_FIRST_RUN,
    "in a child whose parent had a run of its own": IN_A_CHILD,
    "before a lock, without an app": BEFORE_A_LOCK,
    "after a run and a lock": AFTER_A_LOCK,
}
# each script goes on in a child: the imports before it are the same
FORKS = """
import json, os, traceback
said = {}
for name, script in json.load(sys.stdin).items():
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            exec(script, globals())
        except BaseException:
            os.write(writing, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as written:
        said[name] = written.read()
    status = os.waitpid(pid, 0)[1]
    said[name] += f"ended by {status}" if status else ""
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """Give what each script raised, "" where it passed."""
    command = [sys.executable, "-W", "ignore::ResourceWarning", "-c", BEGINNING + FORKS]
    done = subprocess.run(
        command, input=json.dumps(SCRIPTS), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.xdist_group("tracing")
@pytest.mark.parametrize("name", SCRIPTS)
def test_signals_have_receivers_once_spans_may_be_recorded(name: str, said: dict[str, str]) -> None:
    assert said[name] == ""
