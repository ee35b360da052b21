"""The settings of a Weblate: its example's, with the run's servers, a plugin, and the locks."""

from weblate.settings_example import *  # noqa: F403 - as its documentation says
from weblate.settings_example import CACHES, DATABASES, LOGGING
from weblate.settings_example import INSTALLED_APPS as OWN_APPS

from neighbours.adopted.locks import PLUGIN, database, redlock_settings
from neighbours.story_setup import read_setup, run_folder

_setup = read_setup()
DATA_DIR = str(run_folder() / "data")
CACHE_DIR = f"{DATA_DIR}/cache"
MEDIA_ROOT, STATIC_ROOT = f"{DATA_DIR}/media", f"{CACHE_DIR}/static"
SITE_DOMAIN = "weblate.example"
SECRET_KEY = "of a run alone, and long enough for what checks its length"
DEBUG = False
LOGGING["disable_existing_loggers"] = False
DATABASES["default"].update(database())
CACHES["default"]["LOCATION"] = f"{_setup.broker}/1"
CACHES["avatar"]["LOCATION"] = f"{CACHE_DIR}/avatar"
CELERY_BROKER_URL, CELERY_RESULT_BACKEND = _setup.broker, _setup.backend
INSTALLED_APPS = (*OWN_APPS, PLUGIN)
globals().update(redlock_settings())
