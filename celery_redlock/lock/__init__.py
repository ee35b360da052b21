"""The lock alone: usable without a Celery app. No module here imports Celery."""
