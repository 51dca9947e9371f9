"""Orders."""

from django.db import models


class Order(models.Model):
    """What a customer bought."""

    item = models.CharField(max_length=100)
    shipped = models.BooleanField(default=False)
    receipt = models.CharField(max_length=100, default="")
    #: The id of the result of the task that writes the receipt.
    receipt_task = models.CharField(max_length=64, default="")

    class Meta:
        app_label = "shop"
