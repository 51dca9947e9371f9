"""The first migration."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Orders."""

    initial = True
    operations = [  # noqa: RUF012 - as Django has it
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.AutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("item", models.CharField(max_length=100)),
                ("shipped", models.BooleanField(default=False)),
                ("receipt", models.CharField(default="", max_length=100)),
                ("receipt_task", models.CharField(default="", max_length=64)),
            ],
        )
    ]
