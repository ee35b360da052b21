"""The settings of a pretix: its own, a plugin, and the locks."""

from pretix.settings import *  # noqa: F403 - as its documentation says
from pretix.settings import INSTALLED_APPS as OWN_APPS

from neighbours.adopted.locks import PLUGIN, redlock_settings

INSTALLED_APPS = [*OWN_APPS, PLUGIN]
globals().update(redlock_settings())
