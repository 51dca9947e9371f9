"""Tasks of the shop, with the decorator of Django 6 or of its backport."""

import django

from .models import Order

if django.VERSION >= (6, 0):
    from django.tasks import task
else:
    from django_tasks import task


@task(priority=20)
def write_receipt(order_id: int) -> str:
    order = Order.objects.get(pk=order_id)
    receipt = f"receipt for {order.item}"
    order.receipt = receipt
    order.save(update_fields=["receipt"])
    return receipt
