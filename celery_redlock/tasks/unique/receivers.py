"""Options and claims that a message carries from its send."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from celery_redlock.tasks.delivery.header import HEADER
from celery_redlock.tasks.settings.backoff import Backoff

logger = logging.getLogger(__name__)


def options_to_message(of_call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call as any serializer takes them."""
    return {
        name: value.to_message() if isinstance(value, Backoff) else value
        for name, value in of_call.items()
    }


def carry_options(
    sender: Any = None, body: Any = None, headers: Any = None, properties: Any = None, **_: Any
) -> None:
    """Have a message carry the `lock=` of a send by name, and that of signatures within it.

    Source: celery.app.amqp sends this before the message is serialized. An option of `send_task`
    that Celery does not know is a property by then, which AMQP brokers drop in silence. What is
    raised here would be swallowed, so it is the run that refuses a wrong option.
    """
    if properties and "lock" in properties:
        _put_options(sender, properties.pop("lock"), headers)
    args, embedded = (body[0], body[2]) if isinstance(body, tuple) else (body.get("args"), body)
    for name in ("callbacks", "errbacks", "chain", "chord"):
        _options_within(embedded.get(name))
    for value in args or ():
        _options_within(value)


def _put_options(name: str, of_call: Any, headers: dict[str, Any]) -> None:
    """Put the options of a send by name into its headers, beside what its window has there."""
    if not isinstance(of_call, Mapping):
        of_call = {"lock": repr(of_call)}  # which is no option
    if of_call.get("unique_for") is not None:
        logger.warning(
            "sending %s without deduplication: a send by name knows no key; use send_unique",
            name, extra={"event": "sent_without_check", "task": name},
        )  # fmt: skip
    task_id = headers.get("id")
    slip = headers.get(HEADER)
    if not isinstance(slip, Mapping) or slip.get("id") != task_id:  # a parent's
        slip = {"id": task_id}
    headers[HEADER] = {**slip, "options": options_to_message(of_call)}


def _options_within(value: Any) -> None:
    """Make the options of signatures ready for their message: of this one, or of those in a list.

    Of a long list that holds none the first item alone is looked at.
    """
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], (list, tuple, Mapping)):
            for item in value:
                _options_within(item)
        return
    if not isinstance(value, Mapping) or not isinstance(value.get("options"), Mapping):
        return
    options, of_call = value["options"], value["options"].get("lock")
    if isinstance(of_call, Mapping):
        options["lock"] = options_to_message(of_call)
    inner = value.get("kwargs") if value.get("subtask_type") else None
    for part in (*options.values(), *(inner or {}).values(), *(value.get("args") or ())):
        _options_within(part)
