"""The commands in errors and ERROR log lines that print a passage of the documentation.

Each constant is `celery redlock explain CODE`. The code is the anchor of a heading on one of the
pages that operations/troubleshooting lists. The command reads the pages on this machine.
"""

from __future__ import annotations


def command_for(code: str) -> str:
    """Return the command that prints the passage of a code."""
    return f"`celery redlock explain {code}`"


ANY_ERROR = command_for("redlockerror")
DOCTOR_REPORTS = command_for("doctor-reports-a-setting")
DUPLICATE_TASK = command_for("duplicatetask")
LOCK_LOST = command_for("locklost")
LOCK_TAKEN = command_for("locktaken")
MESSAGES_STAY = command_for("messages-that-stay-unacked")
NODE_EVICTS = command_for("a-node-evicts-keys")
NODE_FAILS = command_for("a-node-gives-no-vote")
NODE_RESTARTED = command_for("restarted-and-new-nodes")
NOT_HELD = command_for("lock-is-not-held")
NO_QUORUM = command_for("no-quorum")
NO_RUN = command_for("selflock-raises")
OTHER_FORMAT = command_for("two-formats")
POSTGRESQL_FAILS = command_for("a-postgresql-gives-no-vote")
SETTINGS_DIFFER = command_for("two-workers-do-not-exclude-each-other")
SETTINGS_ERROR = command_for("settingserror")
UNEXPECTED = command_for("unexpected-errors")


def see(text: str, anchor: str) -> str:
    """Return a text followed by "See" and a command. anchor: one of the commands above."""
    return f"{text if text.endswith('?') else text.rstrip('.') + '.'} See {anchor}"
