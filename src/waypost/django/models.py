"""Models without tables: they give the admin its pages and their permissions."""

from __future__ import annotations

from django.db import models


class DeadLetter(models.Model):
    """Dead letters of the store. Its permissions: view lists them, change redrives, delete purges."""

    class Meta:
        managed = False
        default_permissions = ("view", "change", "delete")
        verbose_name = "dead letter"
        verbose_name_plural = "dead letters"
