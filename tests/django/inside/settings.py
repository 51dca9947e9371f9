"""A project for tests: DATABASE_URL is a PostgreSQL database, or empty for a SQLite file in FOLDER."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import django

from waypost import Exponential, NoRetry

FOLDER = Path(os.environ["FOLDER"])
SECRET_KEY = "tests"
USE_TZ = True
ROOT_URLCONF = "tests.django.inside.urls"
INSTALLED_APPS = [
    "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions",
    "django.contrib.messages", "tests.django.inside.notes", "waypost.django",
]  # fmt: skip
if django.VERSION < (6, 0):
    INSTALLED_APPS.append("django_tasks")
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware", "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware", "django.contrib.messages.middleware.MessageMiddleware",
]  # fmt: skip
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True,
        "OPTIONS": {"context_processors": [
            "django.template.context_processors.request", "django.contrib.auth.context_processors.auth",
            "django.contrib.messages.context_processors.messages",
        ]},
    }
]  # fmt: skip
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

place = urlsplit(os.environ.get("DATABASE_URL", ""))
DATABASES: dict[str, dict[str, Any]] = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3", "NAME": FOLDER / "notes.sqlite3",
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
    },
    "other": {"ENGINE": "django.db.backends.sqlite3", "NAME": FOLDER / "other.sqlite3"},
    "memory": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
}  # fmt: skip
if place.scheme:
    DATABASES["default"] = {
        "ENGINE": "django.db.backends.postgresql", "NAME": place.path.lstrip("/"),
        "USER": unquote(place.username or ""), "PASSWORD": unquote(place.password or ""),
        "HOST": place.hostname, "PORT": place.port,
    }  # fmt: skip

WAYPOST = {"QUEUES": {"orders": {"max_deliveries": 7}}}
BACKEND = "waypost.django.tasks.WaypostBackend"
QUICK = Exponential(first=0.001, cap=0.001, attempts=3)
TASKS = {
    "default": {"BACKEND": BACKEND, "QUEUES": ["default", "mails"], "OPTIONS": {"retry": QUICK}},
    "once": {"BACKEND": BACKEND, "QUEUES": ["once"], "OPTIONS": {"retry": NoRetry(), "concurrency": 1}},
    "brief": {"BACKEND": BACKEND, "QUEUES": ["brief"], "OPTIONS": {"result_ttl": 0.001}},
    "any": {"BACKEND": BACKEND, "QUEUES": [], "OPTIONS": {"queue_prefix": "any."}},
    "now": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend"} if django.VERSION >= (6, 0) else
           {"BACKEND": "django_tasks.backends.immediate.ImmediateBackend"},
}  # fmt: skip
