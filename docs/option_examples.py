"""What the reference shows of each option and setting beside the package's tables.

`docs/tables.py` writes it into docs/reference; tests/unit/test_option_examples.py runs each example
and fails if one is missing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shown:
    """The type of an option or setting, an example of its use, and the related names.

    example: of an option, a task that sets it, without imports; of a setting, its value.
    """

    type: str
    example: str
    related: tuple[str, ...] = ()


OPTIONS = {
    "key": Shown(
        "`str`, `list[str]`, callable, `False` or `None`",
        '@shared_task(base=LockedTask, lock_key="stock:{sku}")\ndef take(sku, pieces): ...\n\n'
        "# two resources, both or none\n"
        '@shared_task(base=LockedTask, lock_key=["account:{src}", "account:{dst}"])\n'
        "def transfer(src, dst, amount): ...",
        ("args",),
    ),
    "args": Shown(
        "`list[str]` or `None`",
        '@shared_task(base=LockedTask, lock_args=["sku"])\ndef recount(sku, force=False): ...\n\n'
        "# one run at a time, whatever the arguments\n"
        "@shared_task(base=LockedTask, lock_args=[])\ndef close_the_day(date): ...",
        ("key",),
    ),
    "ttl": Shown(
        "`float`, seconds",
        "# the lock of a killed worker is free after 15 s at the latest\n"
        '@shared_task(base=LockedTask, lock_key="import:{shop}", lock_ttl=15)\n'
        "def import_orders(shop): ...",
        ("renew", "max_hold", "redlock_max_ttl", "redlock_node_timeout"),
    ),
    "renew": Shown(
        "`bool`",
        '@shared_task(\n    base=LockedTask,\n    lock_key="report:{shop}",\n'
        "    lock_renew=False,\n    lock_ttl=60,\n    time_limit=50,\n)\ndef report(shop): ...",
        ("ttl", "max_hold", "on_lost"),
    ),
    "max_hold": Shown(
        "`float`, seconds, or `None`",
        "# a stuck run keeps the lock for an hour, not longer\n"
        '@shared_task(base=LockedTask, lock_key="feed:{shop}", lock_max_hold=3600)\n'
        "def export_feed(shop): ...",
        ("ttl", "renew", "on_lost"),
    ),
    "wait": Shown(
        "`float`, seconds",
        "# waits up to 2 s in its slot, and is deferred after that\n"
        '@shared_task(base=LockedTask, lock_key="cart:{user}", lock_wait=2)\n'
        "def update_cart(user): ...",
        ("on_conflict", "max_wait"),
    ),
    "on_conflict": Shown(
        "`str` or callable",
        "# a periodic run is skipped while the previous run goes on\n"
        '@shared_task(base=LockedTask, lock_args=[], lock_on_conflict="skip")\n'
        "def sync_prices(): ...",
        ("wait", "backoff", "on_unreachable", "on_duplicate"),
    ),
    "backoff": Shown(
        "`Backoff` or `dict`",
        "@shared_task(\n    base=LockedTask,\n"
        '    lock_key="mail:{user}",\n    lock_backoff=Backoff(first=1, cap=60),\n)\n'
        "def send_mail(user): ...",
        ("on_conflict", "max_wait"),
    ),
    "max_wait": Shown(
        "`float`, seconds, or `None`",
        "# gives up ten minutes after the first try\n"
        '@shared_task(base=LockedTask, lock_key="order:{order}", lock_max_wait=600)\n'
        "def settle(order): ...",
        ("on_give_up", "wait"),
    ),
    "on_give_up": Shown(
        "`str`",
        '@shared_task(\n    base=LockedTask,\n    lock_key="cache:{page}",\n    lock_max_wait=60,\n'
        '    lock_on_give_up="skip",\n)\ndef warm_cache(page): ...',
        ("max_wait",),
    ),
    "on_lost": Shown(
        "`str`",
        "# the body can run twice at a time, so it need not be interrupted\n"
        '@shared_task(base=LockedTask, lock_key="thumb:{image}", lock_on_lost="warn")\n'
        "def make_thumbnail(image): ...",
        ("renew", "max_hold", "fencing"),
    ),
    "on_unreachable": Shown(
        "`str`",
        "# without a lock rather than not at all\n"
        '@shared_task(\n    base=LockedTask,\n    lock_key="alarm:{site}",\n'
        '    lock_on_unreachable="run",\n)\ndef raise_alarm(site): ...',
        ("on_conflict", "max_wait"),
    ),
    "limit": Shown(
        "`int`",
        "# three calls at a time for each partner\n"
        '@shared_task(base=LockedTask, lock_key="partner:{partner}", lock_limit=3)\n'
        "def call_partner(partner, order): ...",
        ("key", "fencing"),
    ),
    "fencing": Shown(
        "`bool`",
        "@shared_task(\n    bind=True,\n    base=LockedTask,\n"
        '    lock_key="price:{sku}",\n    lock_fencing=True,\n)\n'
        "def set_price(self, sku, price):\n    return self.lock.fencing_token",
        ("on_lost", "limit"),
    ),
    "unique_for": Shown(
        "`float`, seconds, or `None`",
        "# until the run ends, or for ten minutes, a second send is not published\n"
        '@shared_task(base=LockedTask, lock_key="index:{shop}", lock_unique_for=600)\n'
        "def rebuild_index(shop): ...",
        ("unique_until", "on_duplicate", "key"),
    ),
    "unique_until": Shown(
        "`str`",
        "# one message waits at most; sends during the run are published\n"
        '@shared_task(\n    base=LockedTask,\n    lock_key="sitemap:{shop}",\n'
        '    lock_unique_for=600,\n    lock_unique_until="started",\n)\n'
        "def rebuild_sitemap(shop): ...",
        ("unique_for", "on_duplicate"),
    ),
    "on_duplicate": Shown(
        "`str`",
        "# the latest send wins\n"
        '@shared_task(\n    base=LockedTask,\n    lock_key="search:{sku}",\n'
        '    lock_unique_for=60,\n    lock_on_duplicate="replace",\n)\n'
        "def update_search(sku): ...",
        ("unique_for", "unique_until", "on_conflict"),
    ),
}

SETTINGS = {
    "nodes": Shown(
        "`list` of `str` or redis-py clients",
        '["redis://a", "redis://b", "redis://c"]',
        ("redlock_prefix", "redlock_node_timeout", "redlock_restart_guard"),
    ),
    "prefix": Shown("`str`", '"shop-redlock"', ("redlock_nodes",)),
    "node_timeout": Shown("`float`, seconds", "0.5", ("ttl", "redlock_nodes")),
    "clock_drift": Shown("`float`", "0.02", ("ttl",)),
    "max_ttl": Shown("`float`, seconds", "120", ("ttl", "redlock_restart_guard")),
    "restart_guard": Shown("`str`", '"strict"', ("redlock_max_ttl", "redlock_nodes")),
    "done_ttl": Shown("`float`, seconds, or `None`", "900", ("backoff",)),
    "metrics": Shown("`int`, `str` or `None`", "9808"),
    "call_options": Shown(
        "`list` of `str`, or `None`", '["max_wait", "on_conflict"]', ("redlock_queues",)
    ),
    "queues": Shown(
        "`dict[str, dict]`",
        '{\n    "imports": {"ttl": 50, "max_wait": 600},\n    "partner-*": {"limit": 2},\n}',
        ("redlock_tasks",),
    ),
    "tasks": Shown(
        "`dict[str, dict]`",
        '{\n    "vendor.sync_*": {"args": ["account"], "on_conflict": "skip"},\n}',
        ("redlock_queues",),
    ),
}
