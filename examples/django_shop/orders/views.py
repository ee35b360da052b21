"""The views of the app."""

from celery_redlock import DuplicateTask, LockTaken, QuorumUnreachable
from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_POST

from orders.models import Order
from orders.tasks import ship, take, take_back


@require_POST
def place_order(request: HttpRequest, sku: str) -> JsonResponse:
    """Store an order, and send its task once the order is committed."""
    pieces = int(request.POST.get("pieces", 1))
    with transaction.atomic():
        order = Order.objects.create(sku=sku, pieces=pieces)
        take.delay_on_commit(sku, order.id)
    return JsonResponse({"order": order.id}, status=202)


# This view writes nothing, so it needs no transaction and no commit.
@transaction.non_atomic_requests
@require_POST
def ship_order(request: HttpRequest, order_id: int) -> JsonResponse:
    """Send the task of an order; a second click is answered by 409."""
    try:
        task = ship.apply_async((order_id,))
    except DuplicateTask:
        answer = {"error": "The order is being shipped."}
        return JsonResponse(answer, status=409)
    return JsonResponse({"task": task.id}, status=202)


@require_POST
def return_order(request: HttpRequest, order_id: int) -> JsonResponse:
    """Store the state, and send the task once it is committed; or 409."""
    with transaction.atomic():
        shipped = Order.objects.filter(id=order_id, state="shipped")
        # of two clicks, the update of the second one finds no row
        if not shipped.update(state="returning"):
            answer = {"error": "The order cannot be returned."}
            return JsonResponse(answer, status=409)
        take_back.delay_on_commit(order_id)
    return JsonResponse({"order": order_id}, status=202)


# Atomic inside of the lock: it commits before the release.
@transaction.non_atomic_requests
@require_POST
def cancel_order(request: HttpRequest, order_id: int) -> JsonResponse:
    """Cancel an order while no task ships it."""
    try:
        with ship.lock_for(order_id, wait=1), transaction.atomic():
            taken = Order.objects.filter(id=order_id, state="taken")
            done = taken.update(state="cancelled")
    except LockTaken:
        answer = {"error": "The order is being shipped."}
        return JsonResponse(answer, status=409)
    except QuorumUnreachable:
        answer = {"error": "Too few lock nodes answer."}
        return JsonResponse(answer, status=503)
    return JsonResponse({"cancelled": done})
