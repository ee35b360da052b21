"""One call of a task: what its resources are made of, and what it locks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from celery.exceptions import SoftTimeLimitExceeded

from celery_redlock.lock.model.rate import Rate
from celery_redlock.tasks.settings.app import OptionSource


class TaskCall(NamedTuple):
    """One call of a task, from which its resources are made. task: for a key that is a callable."""

    task: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    queue: str

    def ask(self, option: Callable[..., Any], source: OptionSource) -> Any:
        """Return what an option that is a callable of the user's returns for this call.

        Raises SettingsError for what it raises, but a soft time limit as it is.
        """
        try:
            return option(self.task, tuple(self.args), dict(self.kwargs))
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            hint = f"the callable raised {type(error).__name__}: {error}"
            raise source.wrong(option, hint) from error


class CallKeys(NamedTuple):
    """What a call locks, in the order in which it does; limits above 1 and rates by resource."""

    resources: tuple[str, ...]
    limits: Mapping[str, int] | None
    rates: Mapping[str, Rate] | None
