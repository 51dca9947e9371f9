"""Models without tables: they give the admin its pages and their permissions."""

from __future__ import annotations

from typing import Any

from django.db import models


class NoRows(models.Manager):
    """Finds nothing: commands such as `dumpdata` read every model, and this one has no table."""

    def get_queryset(self) -> Any:
        """Return no rows."""
        return super().get_queryset().none()


class DeadLetter(models.Model):
    """Dead letters of the store. Its permissions: view lists them, change redrives, delete purges."""

    objects = NoRows()

    class Meta:
        managed = False
        base_manager_name = "objects"
        default_permissions = ("view", "change", "delete")
        verbose_name = "dead letter"
        verbose_name_plural = "dead letters"
