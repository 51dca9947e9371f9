"""waypost's tables, and the model of its pages in the admin.

A release of waypost whose tables differ comes with a further migration that runs `create_store` again, with its own
`SCHEMA_VERSION`.
"""

from __future__ import annotations

from django.db import migrations, models

from waypost.django.store_migration import create_store, remove_store

#: The version of the PostgreSQL tables after this migration.
SCHEMA_VERSION = 16


class Migration(migrations.Migration):
    """The first migration."""

    initial = True
    # The tables of a SQLite store are created over a connection of its own.
    atomic = False

    operations = [  # noqa: RUF012 - as Django has it
        migrations.RunPython(create_store, remove_store),
        migrations.CreateModel(
            name="DeadLetter",
            fields=[("id", models.AutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID"))],
            options={
                "verbose_name": "dead letter",
                "verbose_name_plural": "dead letters",
                "managed": False,
                "base_manager_name": "objects",
                "default_permissions": ("view", "change", "delete"),
            },
        ),
    ]
