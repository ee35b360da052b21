"""The Django settings of the neighbours that need Django."""

from urllib.parse import urlsplit

from neighbours.story_setup import read_setup

_setup = read_setup()
_database = urlsplit(_setup.more["database"])
_apps = _setup.more.get("apps", [])
SECRET_KEY = "of a run alone"
USE_TZ = True
INSTALLED_APPS = ["django.contrib.contenttypes", *_apps]
DATABASES = {
    "default": {
        "ENGINE": _setup.more.get("engine", "django.db.backends.postgresql"),
        "NAME": _database.path.lstrip("/"),
        "USER": _database.username,
        "PASSWORD": _database.password or "",
        "HOST": _database.hostname,
        "PORT": _database.port,
    }
}
globals().update(_setup.more.get("settings", {}))
