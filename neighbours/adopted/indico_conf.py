"""The configuration of an Indico: the file that INDICO_CONFIG names, which is not imported."""

from neighbours.adopted.locks import redlock_settings as _redlock_settings
from neighbours.story_setup import read_setup as _read_setup
from neighbours.story_setup import run_folder as _run_folder

_setup = _read_setup()
_folder = _run_folder()
for _name in ("cache", "tmp", "log", "archive"):
    (_folder / _name).mkdir(exist_ok=True)
(_folder / "archive" / "uploaded").touch()  # the file that the own task deletes

SQLALCHEMY_DATABASE_URI = _setup.more["database"]
SECRET_KEY = "of a run alone, and long enough for what checks its length"
BASE_URL = "http://127.0.0.1"
CELERY_BROKER = _setup.broker
REDIS_CACHE_URL = f"{_setup.broker}/1"
DEFAULT_TIMEZONE = "UTC"
DEFAULT_LOCALE = "en_GB"
CACHE_DIR, TEMP_DIR, LOG_DIR = f"{_folder}/cache", f"{_folder}/tmp", f"{_folder}/log"
STORAGE_BACKENDS = {"default": f"fs:{_folder / 'archive'}"}
ATTACHMENT_STORAGE = "default"
SUPPORT_EMAIL = NO_REPLY_EMAIL = "neighbour@example.com"
CELERY_CONFIG = {
    "imports": ["neighbours.adopted.plugin.tasks"],
    "task_ignore_result": False,  # the story asks for states
    **_redlock_settings("redlock_"),
}
