"""The configuration of a Nautobot: the file that NAUTOBOT_CONFIG names.

Its tables are made as its models have them today: its migrations take a quarter of an hour.
"""

from typing import Any

from nautobot.core.settings import *  # noqa: F403 - as its documentation says

from neighbours.adopted.locks import PLUGIN, redlock_settings


class _NoMigrations(dict[str, Any]):
    """Says of each app of Django that it has no migrations."""

    def __contains__(self, label: object) -> bool:
        return True

    def __getitem__(self, label: str) -> None:
        return None


MIGRATION_MODULES = _NoMigrations()
EXTRA_INSTALLED_APPS = [PLUGIN]
globals().update(redlock_settings())
