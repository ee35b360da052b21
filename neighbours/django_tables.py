"""The Django app of the story, as the process that sends imports it: it makes the tables first."""

from django.core.management import call_command

from neighbours.django_app import app, once, work

__all__ = ["app", "once", "work"]

call_command("migrate", verbosity=0)
