"""An app that locks nothing, in a process that tells what it is made of."""

from __future__ import annotations

import inspect
import os
import re
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import celery
from celery import signals
from celery.utils.dispatch import Signal
from celery.worker.control import Panel, inspect_command

if os.environ.get("GUEST_IMPORTS"):
    from celery_redlock import LockedTask

app = celery.Celery("guest", broker=os.environ["GUEST_BROKER"])
app.conf.update(
    result_backend=os.environ["GUEST_BROKER"],
    worker_hijack_root_logger=False,
    redlock_servers=["another library's"],
)


@app.task
def look() -> dict[str, Any]:
    return process()


if os.environ.get("GUEST_NODES"):  # a guest no more
    from celery_redlock import LockedTask

    del app.conf["redlock_servers"]
    app.conf.redlock_nodes = os.environ["GUEST_NODES"].split()

    @app.task(base=LockedTask)
    def look_under_lock() -> dict[str, Any]:
        return process()


@inspect_command()
def look_at_worker(state: Any) -> dict[str, Any]:
    steps = [*state.consumer.controller.blueprint.order, *state.consumer.blueprint.order]
    return {**process(), "steps": sorted(one.name for one in steps)}


def process() -> dict[str, Any]:
    me = Path("/proc/self")
    opened = [str(one.readlink()) for one in (me / "fd").iterdir() if one.exists()]
    sockets = [one for one in opened if one.startswith("socket:")]
    maps = [line.split()[1] for line in (me / "maps").read_text().splitlines()]
    status = (me / "status").read_text()
    return {
        "threads": sorted(re.sub(r"\d+", "#", one.name) for one in threading.enumerate()),
        "tasks": len(list((me / "task").iterdir())),
        "descriptors": sorted(re.sub(r":.*|/.*/|-\d.*", "", o) for o in opened if o not in sockets),
        "sockets": len(sockets),
        "shared maps": sum(flags.endswith("s") for flags in maps),
        "receivers": {n: receivers(one) for n, one in vars(signals).items() if is_signal(one)},
        "commands": sorted(Panel.data),
        "names": names(),
        "kilobytes": int(re.search(r"VmRSS:\s+(\d+)", status)[1]),  # type: ignore[index]
        "cpu": time.process_time(),
    }


def is_signal(one: Any) -> bool:
    return isinstance(one, Signal)


def receivers(signal: Any) -> list[str]:
    found = [one() if isinstance(one, weakref.ref) else one for _, one in signal.receivers]
    return sorted(origin(one) for one in found if one is not None)


def origin(one: Any) -> str:
    return f"{getattr(one, '__module__', '')}.{getattr(one, '__qualname__', '')}"


def names() -> list[str]:
    found = set()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("celery", "kombu", "billiard", "redis"):
            for attribute, one in list(vars(module).items()):
                if inspect.isroutine(one) or inspect.isclass(one):
                    found.add(f"{name}.{attribute} is {origin(one)}")
                if inspect.isclass(one) and one.__module__ == name:
                    methods = {n: m for n, m in vars(one).items() if inspect.isroutine(m)}
                    found |= {f"{name}.{attribute}.{n} is {origin(m)}" for n, m in methods.items()}
    return sorted(found)
