"""The lock alone: usable without Celery, and importing none of it."""
