"""The output of a command that lists: tables, then the nodes that could not be queried.

If too few nodes answered for the list to be complete, the output says so, and the exit status is 2.
Not here: the tables (`views.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import click

from celery_redlock import anchors
from celery_redlock.lock.reports import Answers
from celery_redlock.operate.cli.group import (
    Table,
    app_from,
    as_json,
    command_error,
    print_result,
)

EXIT_UNKNOWN = 2  # exit status if too few nodes answer for a complete list


@dataclass(frozen=True)
class Listing:
    """The output of a command that lists.

    data: printed as JSON. parts: printed for people. answers: which nodes answered. failing: causes
    of the nodes that failed at a second query. is_known: False if workers did not answer.
    """

    data: Any
    parts: Sequence[str | Table]
    answers: Answers
    failing: Mapping[str, str] = field(default_factory=dict)
    is_known: bool = True


def list_command(make: Callable[..., Listing]) -> Callable[..., None]:
    """Return a click callback that prints the listing of a function. make: called with the app."""

    @as_json
    @wraps(make)
    @click.pass_context
    def command(ctx: click.Context, /, as_json: bool, **arguments: Any) -> None:
        listing = make(app_from(ctx), **arguments)
        answers = listing.answers
        lines = [*failing_lines({**answers.failing, **listing.failing}), *unknown_lines(answers)]
        print_result(as_json, listing.data, *listing.parts, *lines)
        if not (answers.is_known and listing.is_known):
            ctx.exit(EXIT_UNKNOWN)

    return command


def failing_lines(failing: Mapping[str, str]) -> list[str]:
    """Return a line for each node that could not be queried."""
    return [f"{node} cannot be queried: {cause}" for node, cause in failing.items()]


def unknown_lines(answers: Answers) -> list[str]:
    """Return a line if too few nodes answered for the list above to be complete."""
    if answers.is_known:
        return []
    answered = answers.asked - len(answers.failing)
    text = f"{answered} of {answers.asked} nodes answered, {answers.needed} needed"
    text = f"{text}: locks and waiting tasks may be missing here"
    return [anchors.see(text, anchors.NO_QUORUM)]


def nothing_to_end(answers: Answers, not_found: str, not_known: str) -> click.ClickException:
    """Return the error of a command that found nothing to end.

    not_known: the text if too few nodes answered. not_found: the text otherwise.
    """
    failures = "; ".join(failing_lines(answers.failing))
    text = not_found if answers.is_known else not_known
    return command_error(f"{text.rstrip('.')}{failures and f' ({failures})'}")
