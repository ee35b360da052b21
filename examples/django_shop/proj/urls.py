"""The URLs of the project."""

from django.urls import path

from orders.views import (
    cancel_order,
    place_order,
    return_order,
    ship_order,
)

urlpatterns = [
    path("orders/<int:order_id>/cancel/", cancel_order),
    path("orders/<str:sku>/", place_order),
    path("orders/<int:order_id>/ship/", ship_order),
    path("orders/<int:order_id>/return/", return_order),
]
