"""The headings of the documentation that errors and ERROR log lines name.

Each constant is the path of a page below docs/, without its suffix, and the anchor of a heading on
that page. The project has no address of its own on the web, so the path has to do for the site and
for the repository.
"""

from __future__ import annotations

_TROUBLESHOOTING = "operations/troubleshooting"

ANY_ERROR = "reference/errors#redlockerror"
DOCTOR_REPORTS = f"{_TROUBLESHOOTING}#doctor-reports-a-setting"
DUPLICATE_TASK = f"{_TROUBLESHOOTING}#duplicatetask"
LOCK_LOST = f"{_TROUBLESHOOTING}#locklost"
LOCK_TAKEN = f"{_TROUBLESHOOTING}#locktaken"
NODE_EVICTS = f"{_TROUBLESHOOTING}#a-node-evicts-keys"
NODE_FAILS = f"{_TROUBLESHOOTING}#a-node-gives-no-vote"
NODE_RESTARTED = "operations/change-nodes#restarted-and-new-nodes"
NOT_HELD = f"{_TROUBLESHOOTING}#lock-is-not-held"
NO_QUORUM = f"{_TROUBLESHOOTING}#no-quorum"
NO_RUN = f"{_TROUBLESHOOTING}#selflock-raises"
SETTINGS_DIFFER = f"{_TROUBLESHOOTING}#two-workers-do-not-exclude-each-other"
SETTINGS_ERROR = f"{_TROUBLESHOOTING}#settingserror"
UNEXPECTED = "reference/log-messages#unexpected-errors"


def see(text: str, anchor: str) -> str:
    """Return a text that ends with the heading that helps."""
    return f"{text if text.endswith('?') else text.rstrip('.') + '.'} See {anchor}"
