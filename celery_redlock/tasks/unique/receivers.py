"""Puts the lock options of a call into its message, for all ways to send one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from celery_redlock.tasks.delivery.header import HEADER
from celery_redlock.tasks.settings.backoff import Backoff
from celery_redlock.tasks.unique.send import header_of_send

logger = logging.getLogger(__name__)


def options_to_message(of_call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call as values that any serializer takes."""
    return {
        name: value.to_message() if isinstance(value, Backoff) else value
        for name, value in of_call.items()
    }


def carry_options(
    sender: Any = None, body: Any = None, headers: Any = None, properties: Any = None, **_: Any
) -> None:
    """Put the `lock=` of a send by name into its headers, and prepare that of embedded signatures.

    Source: celery.app.amqp sends this before the message is serialized. An option of `send_task`
    that Celery does not know is a property by then, which AMQP brokers drop in silence. Celery
    swallows what is raised here, so a wrong option is refused by the run.
    """
    if properties and "lock" in properties:
        _put_options(sender, properties.pop("lock"), headers)
    args, embedded = (body[0], body[2]) if isinstance(body, tuple) else (body.get("args"), body)
    for name in ("callbacks", "errbacks", "chain", "chord"):
        signatures = embedded.get(name)
        if signatures:
            _prepare_signatures(signatures)
    for value in args or ():
        if isinstance(value, (list, tuple, Mapping)):
            _prepare_signatures(value)


def _put_options(name: str, of_call: Any, headers: dict[str, Any]) -> None:
    """Put the options of a send by name into its headers, beside the token of a unique send."""
    if not isinstance(of_call, Mapping):
        of_call = {"lock": repr(of_call)}  # no option has this name, so the run refuses it
    if of_call.get("unique_for") is not None:
        logger.warning(
            "sending %s without deduplication: a send by name knows no key; use send_unique",
            name, extra={"event": "sent_without_check", "task": name},
        )  # fmt: skip
    header = header_of_send(headers, headers.get("id"))
    headers[HEADER] = {**header, "options": options_to_message(of_call)}


def _prepare_signatures(value: Any) -> None:
    """Make the lock options of a signature, or of those in a list, ready for their message.

    If the first item of a list is no container, the others are not looked at: it may be long.
    """
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], (list, tuple, Mapping)):
            for item in value:
                _prepare_signatures(item)
        return
    if not isinstance(value, Mapping) or not isinstance(value.get("options"), Mapping):
        return
    options, of_call = value["options"], value["options"].get("lock")
    if isinstance(of_call, Mapping):
        options["lock"] = options_to_message(of_call)
    inner = value.get("kwargs") if value.get("subtask_type") else None
    for part in (*options.values(), *(inner or {}).values(), *(value.get("args") or ())):
        _prepare_signatures(part)
