"""What the how-tos take for granted: a reader's own shop, search and Django, kept in files."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from django.conf import settings

FOLDER = Path(os.environ["TEST_FOLDER"])

if not settings.configured:
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
    )


def _read(name: str) -> int:
    path = FOLDER / name
    return int(path.read_text()) if path.exists() else 0


def _write(name: str, value: int) -> None:
    time.sleep(0.05)  # who comes between is seen
    (FOLDER / name).write_text(str(value))


def note(*what: Any) -> None:
    """Add a line to what is told."""
    with (FOLDER / "told").open("a") as told:
        told.write(json.dumps(what) + "\n")


def told(first: str) -> list[Any]:
    """Return the lines that begin so, without that."""
    path = FOLDER / "told"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line[1:] for line in lines if line[0] == first]


class Shop:
    """Reads, takes a while, and writes: only a lock keeps its numbers right."""

    def read_stock(self, sku: str) -> int:
        return _read(f"stock-{sku}")

    def write_stock(self, sku: str, left: int) -> None:
        _write(f"stock-{sku}", left)

    def has_coupon(self, campaign: str, customer: str) -> bool:
        return (FOLDER / f"coupon-{campaign}-{customer}").exists()

    def coupons_left(self, campaign: str) -> int:
        return _read(f"coupons-{campaign}")

    def give_coupon(self, campaign: str, customer: str) -> None:
        _write(f"coupons-{campaign}", self.coupons_left(campaign) - 1)
        _write(f"coupon-{campaign}-{customer}", 1)

    def read_points(self, customer: str) -> int:
        return _read(f"points-{customer}")

    def add_points(self, customer: str, points: int) -> None:
        _write(f"points-{customer}", self.read_points(customer) + points)

    def make_report(self) -> None:
        note("report")
        end = time.monotonic() + 120
        while not (FOLDER / "report-done").exists() and time.monotonic() < end:
            time.sleep(0.02)

    def import_lines(self, customer: str, path: str) -> str:
        note("import", customer, "begin", path)
        time.sleep(0.05)
        note("import", customer, "end", path)
        return path

    def export_month(self, year: int, month: int) -> None:
        note("export", year, month)

    def make_feed(self, shop_id: int) -> int:
        note("feed", shop_id)
        end = time.monotonic() + 120
        while not (FOLDER / f"feed-{shop_id}-done").exists() and time.monotonic() < end:
            time.sleep(0.02)
        return shop_id

    def settle_invoice(self, invoice: int) -> str:
        return f"{invoice} is settled"


class Search:
    """Tells for what reason it was rebuilt."""

    def rebuild(self, category: int, because: str) -> str:
        note("rebuild", category, because)
        return because


shop, search = Shop(), Search()
