"""Programs in which a tool of others stands beside locked tasks, as the pages describe it.

Each prints what the tool saw as a line of JSON, for `tests/integration/test_third_party.py`. A tool
patches Celery for a whole process, so each has one of its own. No tool sends anything anywhere.

- `stage.py`: an app over lock nodes, and its worker in this process.
- `of_sentry.py`, `of_new_relic.py`: what an agent records of tries that are deferred or skipped.
- `of_tenants.py`: locks of a task that switches the schema.
- `of_gunicorn.py`: an app that a web server imports before it forks its workers.
"""
