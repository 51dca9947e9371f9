"""waypost in a Django project: publish in `transaction.atomic`, run handlers and tasks by `manage.py waypost_worker`.

    INSTALLED_APPS = [..., "waypost.django"]
    WAYPOST = {"DATABASE": "default"}       # messages are in the database of the project
    TASKS = {"default": {"BACKEND": "waypost.django.tasks.WaypostBackend"}}

`manage.py migrate` creates waypost's tables. All settings are in `waypost.django.configuration`.
"""

from __future__ import annotations

from waypost.django.clients import client, close
from waypost.django.handlers import cron, every, handler
from waypost.django.publishing import acancel, apublish, apublish_many, cancel, publish, publish_many

__all__ = [
    "acancel", "apublish", "apublish_many", "cancel", "client", "close", "cron", "every", "handler", "publish",
    "publish_many",
]  # fmt: skip
