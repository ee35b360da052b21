"""The tables of the app."""

from django.db import models


class Stock(models.Model):
    """The pieces of one sku that are left."""

    sku = models.CharField(max_length=40, primary_key=True)
    pieces = models.PositiveIntegerField()


class Order(models.Model):
    """An order for some pieces."""

    sku = models.CharField(max_length=40)
    pieces = models.PositiveIntegerField()
    state = models.CharField(max_length=10, default="new")
