"""What a process does as it begins by a fork, and as it ends.

What a forked child must not use of its parent is reset, however the child was forked.

Python's own forks run the hooks of `os.register_at_fork`. A fork by C code runs none: uWSGI
makes its workers so, and libc has `daemon()`. Such a child has its parent's connections, whose
replies both would read, and none of its threads, so nothing would renew a lock. It sees by its
process id that it is another process, at its first use of a lock.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from multiprocessing import parent_process, util

from celery_redlock.lock.platform.threads import Mutex, new_mutex

_resets: list[Callable[[], object]] = []  # in the order in which they run
_process = os.getpid()  # the one for which the resets have run
_mutexes: dict[int, Mutex] = {}  # by process id: what the parent has locked stays locked in a child


def reset_in_children(reset: Callable[[], object]) -> None:
    """Call this in each forked child, before the child uses a lock. It must not wait."""
    _resets.append(reset)


def check_process() -> int:
    """Return the id of this process, once everything is reset that it must not use."""
    process = os.getpid()
    if process != _process:
        _reset_once(process)
    return process


def _reset_once(process: int) -> None:
    with _mutexes.setdefault(process, new_mutex()):
        if process != _process:  # else another thread of the child has come first
            _reset()


def _reset() -> None:
    global _process
    for reset in _resets:
        reset()
    _process = os.getpid()


os.register_at_fork(after_in_child=_reset)


def call_at_end(function: Callable[[], object]) -> None:
    """Call a function as this process ends, and any child of it, also one of multiprocessing.

    Source: multiprocessing.process: before 3.13 a child calls no function of `atexit`, and later
    none that its parent has registered. `_bootstrap` forgets the parent's finalizers, and then
    calls what `register_after_fork` has.
    """
    atexit.register(function)
    util.register_after_fork(function, _call_at_end_of_child)
    if parent_process() is not None:  # the body of a child has imported the package
        _call_at_end_of_child(function)


def _call_at_end_of_child(function: Callable[[], object]) -> None:
    util.Finalize(None, function, exitpriority=0)
