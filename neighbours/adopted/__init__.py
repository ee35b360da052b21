"""Applications that adopt the package by their settings alone, and a plugin with the story's tasks.

- `plugin/`: what a plugin of theirs is: a Django app whose `tasks.py` knows nothing of locks.
- `locks.py`: the settings of the package, which each application's settings take in.
- `pretix_settings.py`, `weblate_settings.py`, `nautobot_config.py`, `indico_conf.py`: the settings
  of each application.
- `nautobot_app.py`, `indico_app.py`: the Celery apps that are made once the settings are read.
- `nautobot_job.py`: sends a job as Nautobot's pages do.
- `sent.py`: the application's Celery app and the tasks, for the process that sends them.
- `story.py`: the story, with tasks of the plugin, and then with a task of the application itself.
"""
