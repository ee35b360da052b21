"""The views of the app."""

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_POST

from orders.models import Order
from orders.tasks import take


@require_POST
def place_order(request: HttpRequest, sku: str) -> JsonResponse:
    """Store an order, and send its task once the order is committed."""
    pieces = int(request.POST.get("pieces", 1))
    with transaction.atomic():
        order = Order.objects.create(sku=sku, pieces=pieces)
        take.delay_on_commit(sku, order.id)
    return JsonResponse({"order": order.id}, status=202)
