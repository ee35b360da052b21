"""What tells the stories of `stories.py`: `python -m` with the function of gevent that patches.

Reads a request a line, and prints the exit code of each story. No hub runs here before a fork.
"""

from __future__ import annotations

import gevent.monkey

if __name__ == "__main__":
    import sys

    if sys.argv[1]:
        exec(f"gevent.monkey.{sys.argv[1]}")

import json
import os
import traceback
from typing import Any

import celery_redlock
import celery_redlock.lock.node_status  # noqa: F401 - for all stories


def main() -> None:
    fork = gevent.monkey.get_original("os", "fork")
    wait = gevent.monkey.get_original("os", "waitpid")
    for line in open(0, "rb", buffering=0):  # noqa: SIM115
        request = json.loads(line)
        pid = fork()
        if pid == 0:
            tell(request)
        _, status = wait(pid, 0)
        os.write(1, b"%d\n" % os.waitstatus_to_exitcode(status))


def tell(request: dict[str, Any]) -> None:
    """Tell a story in this process, which ends."""
    os.environ.update(request["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in ((1, request["said"]), (2, request["errors"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    try:
        exec(compile(request["story"], "<story>", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    main()
