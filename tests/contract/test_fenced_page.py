"""The lines of the page about late writes do what it says, on each database."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy.orm import Session

from celery_redlock import LockLost
from celery_redlock.testing import use_nodes
from tests import fork_server
from tests.conftest import Nodes, trust_nodes
from tests.contract.conftest import for_django
from tests.integration.conftest import ROOT
from tests.pages import blocks

pytestmark = pytest.mark.xdist_group("fenced updates")  # they share the servers
PAGE = ROOT / "docs" / "how-to" / "idempotent-writes.md"
SHOP, LATE, MIGRATION, TASKS = (block.code for block in blocks(PAGE, "python"))
SQLITE = "sqlite:///shop.db"
MODEL = """
from django.db import models

class Price(models.Model):
    sku = models.CharField(max_length=40, primary_key=True)
    cents = models.IntegerField()
"""
FIELD = "    fence = models.BigIntegerField(db_default=0)\n"
FIRST = """
from django.db import migrations, models

class Migration(migrations.Migration):
    operations = [
        migrations.CreateModel(
            "Price",
            [
                ("sku", models.CharField(max_length=40, primary_key=True, serialize=False)),
                ("cents", models.IntegerField()),
            ],
        )
    ]
"""


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgresql", marks=pytest.mark.postgresql),
        pytest.param("mariadb", marks=pytest.mark.slow),
    ]
)
def url(request: pytest.FixtureRequest, database_url: Callable[[str], str]) -> str:
    return database_url(request.param)


@pytest.fixture
def shop(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Give the page's `shop.py`, with its table in a database."""
    module: Any = ModuleType("shop")
    monkeypatch.setitem(sys.modules, "shop", module)  # there SQLAlchemy looks for its types
    assert SQLITE in SHOP
    exec(SHOP.replace(SQLITE, url), module.__dict__)
    tables, engine = module.Base.metadata, module.engine
    tables.drop_all(engine)
    tables.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(module.Price(sku="sku-7", cents=0))
    yield module
    tables.drop_all(engine)
    engine.dispose()


def test_the_lines_of_sqlalchemy_refuse_a_late_write(shop: Any, standing_nodes: Nodes) -> None:
    trust_nodes(standing_nodes)
    with (
        use_nodes(shop.app, standing_nodes) as redlock,
        shop.set_price.lock_for("sku-7", 1999) as lock,
    ):
        redlock.break_lock("price:sku-7")
        with ThreadPoolExecutor() as threads:  # in this one the run would be nested
            run = threads.submit(shop.set_price.apply, ("sku-7", 999), throw=True)
            assert run.result().get() == 1
        with pytest.raises(LockLost, match="a later holder has written"):
            shop.write_price(lock, "sku-7", 1999)
    with Session(shop.engine) as session:
        assert session.get_one(shop.Price, "sku-7").cents == 999


def test_the_lines_of_django_refuse_a_late_write(
    url: str, standing_nodes: Nodes, tmp_path: Path
) -> None:
    trust_nodes(standing_nodes)
    files = {
        "prices/__init__.py": "", "prices/migrations/__init__.py": "",
        "prices/migrations/0001_initial.py": FIRST, "prices/models.py": MODEL + FIELD,
        MIGRATION.splitlines()[0].removeprefix("# "): MIGRATION,
        TASKS.splitlines()[0].removeprefix("# "): TASKS,
    }  # fmt: skip
    for name, code in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    given = [json.dumps(for_django(url)), *(node.url for node in standing_nodes)]
    command = [sys.executable, "-m", "tests.contract.fenced_page", *given]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = fork_server.run(command, cwd=tmp_path, env=env)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [1, "refused", 999]
