"""The tasks of the app."""

from celery import shared_task
from celery_redlock.django import LockedDjangoTask
from django.db import transaction

from orders import warehouse
from orders.models import Order, Stock


@shared_task(base=LockedDjangoTask, lock_key="stock:{sku}")
def take(sku: str, order_id: int) -> str:
    """Take the pieces of an order from the stock of its sku."""
    order = Order.objects.get(id=order_id)
    stock = Stock.objects.get(sku=sku)
    if order.state != "new":
        # The message was redelivered after a run that had committed.
        return order.state
    if stock.pieces < order.pieces:
        order.state = "sold out"
        order.save()
        return order.state
    warehouse.pick(order.id)
    # The transaction ends inside the body, so before the lock's release.
    with transaction.atomic():
        stock.pieces -= order.pieces
        stock.save()
        order.state = "taken"
        order.save()
    return order.state


@shared_task(
    base=LockedDjangoTask,
    lock_key="order:{order_id}",
    lock_unique_for=600,
    lock_on_duplicate="fail",
)
def ship(order_id: int) -> str:
    """Ship an order. A second call is refused until the first has run."""
    order = Order.objects.get(id=order_id)
    if order.state == "taken":
        warehouse.ship(order.id)
        order.state = "shipped"
        order.save()
    return order.state


# no lock_on_duplicate="fail" here: the view refuses, by the database
@shared_task(base=LockedDjangoTask, lock_key="order:{order_id}")
def take_back(order_id: int) -> str:
    """Take an order back."""
    order = Order.objects.get(id=order_id)
    if order.state == "returning":
        warehouse.take_back(order.id)
        order.state = "returned"
        order.save()
    return order.state
