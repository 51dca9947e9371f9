"""Django's task framework: `django.tasks` of Django 6, and its backport `django-tasks` for older releases.

Both have the same classes. Some errors and functions differ in name or place, and are here under one.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import django

from waypost.errors import MissingExtra

BUILT_IN = django.VERSION >= (6, 0)
PACKAGE = "django.tasks" if BUILT_IN else "django_tasks"


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtra(
            f"tasks need Django 6 or the package django-tasks, and this is Django {django.get_version()}: "
            "pip install django-tasks"
        ) from error


_base = _module(f"{PACKAGE}.base")
_exceptions = _module(f"{PACKAGE}.exceptions")
signals = _module(f"{PACKAGE}.signals")

BaseTaskBackend: Any = _module(f"{PACKAGE}.backends.base").BaseTaskBackend
Task: Any = _base.Task
TaskContext: Any = _base.TaskContext
TaskError: Any = _base.TaskError
TaskResult: Any = _base.TaskResult
TaskResultStatus: Any = _base.TaskResultStatus
TaskResultDoesNotExist: Any = _exceptions.TaskResultDoesNotExist
InvalidTask: Any = _exceptions.InvalidTask if BUILT_IN else _exceptions.InvalidTaskError
normalize_json: Any = _module("django.utils.json" if BUILT_IN else f"{PACKAGE}.utils").normalize_json
task_backends: Any = _module(PACKAGE).task_backends
