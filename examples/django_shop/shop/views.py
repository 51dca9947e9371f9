"""Views of the shop."""

from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from waypost.django import publish

from .models import Order
from .tasks import write_receipt


@csrf_exempt
@require_POST
def buy(request: HttpRequest, item: str) -> HttpResponse:
    """Store an order with its message and its task: all of them, or none if something fails."""
    with transaction.atomic():
        order = Order.objects.create(item=item)
        publish("orders", {"id": order.pk}, key=f"order:{order.pk}")
        order.receipt_task = write_receipt.enqueue(order.pk).id
        order.save(update_fields=["receipt_task"])
        if item == "nothing":
            raise ValueError("nothing can be bought: the order, its message and its task are rolled back")
    return JsonResponse({"id": order.pk}, status=201)


def show(request: HttpRequest, number: int) -> HttpResponse:
    """Show an order, and what became of its task."""
    order = Order.objects.get(pk=number)
    result = write_receipt.get_result(order.receipt_task)
    return JsonResponse({"shipped": order.shipped, "receipt": order.receipt, "task": result.status})
