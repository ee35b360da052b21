"""The tasks of the app."""

from celery import shared_task
from celery.contrib.django.task import DjangoTask
from celery_redlock import LockedTask
from django.db import transaction

from orders import warehouse
from orders.models import Order, Stock


class LockedDjangoTask(LockedTask, DjangoTask):
    """A task with a lock, and with Celery's `delay_on_commit`."""

    abstract = True


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
