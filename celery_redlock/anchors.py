"""How errors and ERROR log lines say where the documentation helps.

Each constant names the anchor of a heading, as the code that `celery redlock explain` takes: it
prints the passage, and needs no web. The list on the page operations/troubleshooting has the pages.
"""

from __future__ import annotations


def _explain(code: str) -> str:
    return f"`celery redlock explain {code}`"


ANY_ERROR = _explain("redlockerror")
DOCTOR_REPORTS = _explain("doctor-reports-a-setting")
DUPLICATE_TASK = _explain("duplicatetask")
LOCK_LOST = _explain("locklost")
LOCK_TAKEN = _explain("locktaken")
NODE_EVICTS = _explain("a-node-evicts-keys")
NODE_FAILS = _explain("a-node-gives-no-vote")
NODE_RESTARTED = _explain("restarted-and-new-nodes")
NOT_HELD = _explain("lock-is-not-held")
NO_QUORUM = _explain("no-quorum")
NO_RUN = _explain("selflock-raises")
SETTINGS_DIFFER = _explain("two-workers-do-not-exclude-each-other")
SETTINGS_ERROR = _explain("settingserror")
UNEXPECTED = _explain("unexpected-errors")


def see(text: str, anchor: str) -> str:
    """Return a text that ends with the passage that helps."""
    return f"{text if text.endswith('?') else text.rstrip('.') + '.'} See {anchor}"
