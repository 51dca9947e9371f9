"""The settings of the shop. SHOP_DATABASE_URL names a PostgreSQL database; without it the shop is a SQLite file."""

import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import django

FOLDER = Path(os.environ.get("SHOP_FOLDER", Path(__file__).parents[1]))
SECRET_KEY = "only for this example"
DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1"]
ROOT_URLCONF = "shop.urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "shop", "waypost.django"]

place = urlsplit(os.environ.get("SHOP_DATABASE_URL", ""))
DATABASES: dict[str, dict[str, Any]]
if place.scheme:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": place.path.lstrip("/"),
            "USER": unquote(place.username or ""),
            "PASSWORD": unquote(place.password or ""),
            "HOST": place.hostname,
            "PORT": place.port,
            "CONN_MAX_AGE": 60,  # a worker keeps its connections from one message to the next
        }
    }
else:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": FOLDER / "shop.sqlite3",
            # A transaction that reads first and writes later may fail; one that begins as a writer waits.
            "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
        }
    }

# Messages are in the shop's own database: no other service is needed.
WAYPOST = {"DATABASE": "default", "QUEUES": {"orders": {"max_deliveries": 5}}}
TASKS = {"default": {"BACKEND": "waypost.django.tasks.WaypostBackend", "QUEUES": ["default"]}}
if django.VERSION < (6, 0):
    INSTALLED_APPS.append("django_tasks")
