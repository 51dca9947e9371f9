"""The application of the project."""

from django.apps import AppConfig


class NotesConfig(AppConfig):
    name = "tests.django.inside.notes"
    label = "notes"
    default_auto_field = "django.db.models.AutoField"
