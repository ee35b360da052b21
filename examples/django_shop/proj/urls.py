"""The URLs of the project."""

from django.urls import path

from orders.views import place_order, return_order, ship_order

urlpatterns = [
    path("orders/<str:sku>/", place_order),
    path("orders/<int:order_id>/ship/", ship_order),
    path("orders/<int:order_id>/return/", return_order),
]
