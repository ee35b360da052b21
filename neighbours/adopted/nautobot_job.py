"""Sends a job of Nautobot's own, as its pages do."""

from django.contrib.auth import get_user_model
from nautobot.extras.models import Job, JobResult


def send() -> str:
    """Return the id of the job's message."""
    user = get_user_model().objects.create(username="neighbour", is_superuser=True)
    job = Job.objects.get(job_class_name="RefreshDynamicGroupCaches")
    return str(JobResult.enqueue_job(job, user, job_kwargs={"single_group": None}).id)
