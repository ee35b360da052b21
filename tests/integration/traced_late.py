"""The test app in a worker that imports OpenTelemetry after the app has finalized.

In worker_process_init, as its documents say; in worker_ready for a pool without processes.
Source: opentelemetry-instrumentation-celery, "Usage".
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from celery.signals import worker_process_init, worker_ready

from celery_redlock.operate import tracing
from celery_redlock.signals import lock_acquired

# redis-py imports it by itself if it finds the SDK: until `instrument` there is none to be found
for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
    del sys.modules[name]
sys.modules["opentelemetry"] = None  # type: ignore[assignment]
app = importlib.import_module("tests.integration.app").app


def instrument(sender: Any = None, **_: Any) -> None:
    pool = getattr(sender, "pool", None)
    if pool is None or "prefork" not in type(pool).__module__:
        connected = [getattr(each, "__module__", "") for _, each in lock_acquired.receivers]
        found = [module for module in connected if module == tracing.__name__]
        print(f"receivers before the import: {len(found)}", flush=True)
        del sys.modules["opentelemetry"]
        importlib.import_module("tests.integration.traced")


worker_process_init.connect(instrument)
worker_ready.connect(instrument)
