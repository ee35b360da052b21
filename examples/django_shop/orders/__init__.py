"""A Django app: orders, and the stock that they are taken from."""
