"""The first tables."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Creates the tables of orders and of the stock."""

    initial = True
    operations = [
        migrations.CreateModel(
            name="Order",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("sku", models.CharField(max_length=40)),
                ("pieces", models.PositiveIntegerField()),
                ("state", models.CharField(default="new", max_length=10)),
            ],
        ),
        migrations.CreateModel(
            name="Stock",
            fields=[
                (
                    "sku",
                    models.CharField(
                        max_length=40, primary_key=True, serialize=False
                    ),
                ),
                ("pieces", models.PositiveIntegerField()),
            ],
        ),
    ]
