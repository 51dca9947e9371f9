"""Handlers of the shop, run by `manage.py waypost_worker`."""

from django.db import connection, transaction

from waypost import Dead, Message
from waypost.django import handler

from .models import Order


@handler("orders", concurrency=4)
def ship(order: dict[str, int], message: Message[dict[str, int]]) -> Dead | None:
    found = Order.objects.filter(pk=order["id"]).first()
    if found is None:
        return Dead("no such order")
    # Shipped and settled in one transaction: an order is never shipped twice.
    with transaction.atomic(), message.transaction(connection):
        found.shipped = True
        found.save(update_fields=["shipped"])
    return None
