"""The addresses of the project of `admin_site.py`."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from celery_redlock.django.admin import LocksAdmin
from celery_redlock.django.models import Locks

own_site = admin.AdminSite(name="ops")
own_site.register(Locks, LocksAdmin)
urlpatterns = [path("admin/", admin.site.urls), path("ops/", own_site.urls)]
