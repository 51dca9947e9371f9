"""The application for INSTALLED_APPS."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.signals import setting_changed


class WaypostConfig(AppConfig):
    """waypost as an application of a Django project."""

    name = "waypost.django"
    label = "waypost"
    verbose_name = "Waypost"
    default_auto_field = "django.db.models.AutoField"

    def ready(self) -> None:
        from waypost.django import checks
        from waypost.django.clients import follow_settings

        checks.register_checks()
        # Sent by override_settings of tests.
        setting_changed.connect(follow_settings, dispatch_uid="waypost.django")
