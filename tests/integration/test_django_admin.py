"""The page *Locks* of Django's admin: what it shows, to whom, and what a confirmation ends.

In a browser: `test_django_admin_pages.py`.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from html import unescape
from io import StringIO
from pathlib import Path
from typing import Any

import django
import pytest
from celery import Celery
from django.conf import settings
from django.core.management import call_command
from django.db import connection, connections

from celery_redlock import LockedTask, Redlock
from celery_redlock.lock.model.keys import lock_key
from celery_redlock.lock.reports import LockReport
from celery_redlock.testing import EmbeddedNode, embedded_nodes, hold
from tests.conftest import NODE_TIMEOUT, Nodes, eventually, trust_nodes
from tests.integration import admin_site
from tests.integration.conftest import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("django_admin"),
    pytest.mark.usefixtures("process_as_before"),
]
LOCKS = "/admin/celery_redlock/locks/"
TASK = "4c8f3226-0d5e-4a8e-9b55-2b1f0a6c7d11"
RUN = f"{TASK}:shop.take:0:0 celery@web1"
ODD = [
    "<script>alert(1)</script>", "a/b?c=d&e#f%2F", "of\ntwo lines", "nul\0", "lone \udcff",
    "\u202eright to left", "[x]*?", "'\" onclick=\"x", "{{ 7 }}{% x %}", "é✓", "x" * 1024, " ",
]  # fmt: skip


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give the file of a database that `migrate` has made; Django is set up once in a process."""
    file = tmp_path_factory.mktemp("admin") / "db.sqlite3"
    if not settings.configured:
        given = {name: value for name, value in vars(admin_site).items() if name.isupper()}
        settings.configure(**given)
        django.setup()
    connections["default"].close()
    connections["default"].settings_dict["NAME"] = str(file)
    call_command("migrate", verbosity=0)
    yield file
    connections["default"].close()


@pytest.fixture
def app(nodes: Nodes) -> Iterator[Celery]:
    """Give the current Celery app; no worker of it runs."""
    made = Celery("shop", broker="memory://")
    made.conf.update(redlock_nodes=[one.url for one in nodes], redlock_node_timeout=NODE_TIMEOUT)
    made.set_current()
    yield made
    Redlock.of(made).close()
    made.close()


@pytest.fixture
def user(database: Path) -> Iterator[Callable[..., Any]]:
    """Give a function that makes a client of a member of staff with these rights."""
    from django.contrib.auth.models import Permission, User
    from django.test import Client

    def make(*rights: str, name: str = "ann", is_staff: bool = True, **options: Any) -> Client:
        person = User.objects.create_user(name, password="x", is_staff=is_staff)
        person.user_permissions.set(Permission.objects.filter(codename__in=rights))
        assert person.user_permissions.count() == len(rights)
        client = Client(**options)
        client.force_login(person)
        return client

    yield make
    User.objects.all().delete()


@pytest.fixture
def operator(user: Callable[..., Any]) -> Any:
    return user("view_locks", "break_lock", "end_claim")


def seen(response: Any) -> str:
    """Return what a person reads on a page."""
    assert response.status_code == 200, response
    body = response.content.decode()
    body = body[body.index('id="content-start"') : body.index('id="footer"')]
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())


def links(response: Any) -> list[str]:
    """Return where the links to a confirmation lead."""
    assert response.status_code == 200, response
    return re.findall(rf'href="({LOCKS}(?:break|end-claim)/[0-9a-f]+/)"', response.content.decode())


def entries() -> list[tuple[str, str, str]]:
    """Return what the admin's own log has: user, resource and message."""
    from django.contrib.admin.models import LogEntry

    rows = LogEntry.objects.order_by("id")
    return [(one.user.username, one.object_id, one.get_change_message()) for one in rows]


def output(*words: str, **options: Any) -> str:
    with StringIO() as file:
        call_command(*words, stdout=file, **options)
        return file.getvalue()


def test_any_migrate_makes_the_rights_and_nothing_else(database: Path) -> None:
    from django.contrib.auth.models import Permission

    rights = Permission.objects.filter(content_type__app_label="celery_redlock")
    names = {"view_locks", "break_lock", "end_claim"}
    assert {one.codename for one in rights} == names
    rights.delete()
    call_command("migrate", "sessions", verbosity=0)
    assert {one.codename for one in rights.all()} == names
    assert "No changes detected" in output("makemigrations", "--check", "--dry-run")
    assert not [name for name in connection.introspection.table_names() if "redlock" in name]
    output("check", fail_level="WARNING")


def test_no_migration_is_written_into_the_package(database: Path) -> None:
    with pytest.raises(ValueError, match="can't create migrations for app 'celery_redlock'"):
        output("makemigrations", "celery_redlock")
    assert not (ROOT / "celery_redlock" / "django" / "migrations").exists()


@pytest.mark.parametrize("words", [("dumpdata",), ("dumpdata", "--all"), ("sqlflush",)])
def test_what_reads_all_models_needs_no_table(database: Path, words: tuple[str, ...]) -> None:
    assert "celery_redlock.locks" not in output(*words)


def test_it_shows_who_holds_what_who_waits_and_claims(app: Celery, operator: Any) -> None:
    @app.task(base=LockedTask, lock_key="partner:{tenant}", lock_rate="1/h", shared=False)
    def ask(tenant: int) -> None:
        pass

    @app.task(base=LockedTask, lock_key="mail:{to}", lock_unique_for=60, shared=False, name="mail")
    def remind(to: int) -> None:
        pass

    ask.apply((7,), throw=True)
    sent = remind.delay(3)
    with hold("stock:7", on=app, by=RUN):
        text = seen(operator.get(LOCKS))
        found = operator.get(LOCKS, {"q": "TOCK"}), operator.get(LOCKS, {"q": "stock:*"})
        other = operator.get(LOCKS, {"q": "sto?k"})
    row = (
        rf"stock:7 shop.take {TASK} celery@web1 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d "
        r"\d+\.\d s \d+\.\d s ago \d\d\.\d s [23], 2 needed Break"
    )
    assert re.search(row, text), text
    assert re.search(r"partner:7 1/h 1 of 1 in (59|1) (min|h) \d+ ", text), text
    assert re.search(rf"mail:3 mail {sent.id} sent \d\d\.\d s [23], 2 needed End", text), text
    assert "No process waits." in text
    assert "Which tasks wait is unknown." in text
    assert "no worker answered: tasks that wait in the broker are not listed" in text
    assert "stock:7" not in seen(found[0])
    assert "stock:7" in seen(found[1])
    assert "mail:3" not in seen(found[1])
    assert "stock:7" not in seen(other)


def test_it_shows_which_process_waits(app: Celery, operator: Any) -> None:
    import threading

    with hold("stock:7", on=app, by=RUN):
        begun = threading.Thread(target=lambda: Redlock.of(app).lock("stock:7", wait=60).acquire())
        begun.start()
        row = re.compile(r"stock:7 0 \S+ \d+ \d+\.\d s [23] of 3 waits")
        assert eventually(lambda: row.search(seen(operator.get(LOCKS))))
    begun.join()


def test_of_many_locks_a_part_is_shown(app: Celery, operator: Any, nodes: Nodes) -> None:
    for node in nodes:
        with node.client() as client, client.pipeline() as pipe:
            for number in range(250):
                pipe.set(lock_key("redlock", f"many:{number:03}"), "of another program")
            pipe.execute()
    text = seen(operator.get(LOCKS))
    assert "50 more: search for a resource." in text
    assert "many:249" not in text
    assert "many:249" in seen(operator.get(LOCKS, {"q": "many:249"}))


@pytest.mark.parametrize("resource", ODD)
def test_a_name_of_others_is_shown_as_text_and_its_lock_can_be_broken(
    app: Celery, operator: Any, resource: str
) -> None:
    from django.contrib.admin.models import LogEntry

    with hold(resource, on=app, by=f"<b>{resource[:9]}</b>"):
        page = operator.get(LOCKS)
        body = page.content.decode()
        assert "<script>alert" not in body
        assert "<b>" not in body
        assert 'onclick="x' not in body
        assert "\u202e" not in body
        assert "\0" not in body
        (link,) = links(page)
        asked = operator.get(link)
        assert "<b>" not in asked.content.decode()
        assert "loses" in seen(asked)
        done = operator.post(link, follow=True)
        assert "<b>" not in done.content.decode()
        assert "is broken on" in seen(done)
        assert Redlock.of(app).holder(resource) is None
    entry = LogEntry.objects.latest("id")
    assert entry.object_id.isprintable()
    assert operator.get("/admin/").status_code == 200  # with the recent actions
    assert operator.get(LOCKS, {"q": resource.encode(errors="replace")}).status_code == 200


def test_who_may_not_is_refused_by_the_server(
    app: Celery, user: Callable[..., Any], operator: Any
) -> None:
    from django.test import Client

    @app.task(base=LockedTask, lock_key="mail:{to}", lock_unique_for=60, shared=False)
    def remind(to: int) -> None:
        pass

    remind.delay(3)
    with hold("stock:7", on=app, by=RUN):
        to_break, to_end = links(operator.get(LOCKS))
        viewer = user("view_locks", name="bob")
        assert "stock:7" in seen(viewer.get(LOCKS))
        assert links(viewer.get(LOCKS)) == []
        breaker = user("break_lock", name="eve")
        assert links(breaker.get(LOCKS)) == [to_break]
        ender = user("end_claim", name="dan")
        assert links(ender.get(LOCKS)) == [to_end]
        nobody = user(name="joe")
        assert nobody.get(LOCKS).status_code == 403
        assert "Locks" not in nobody.get("/admin/").content.decode()
        assert "Locks" in viewer.get("/admin/").content.decode()
        outside = user("break_lock", "end_claim", name="kim", is_staff=False)
        for link, who in (
            (to_break, (viewer, ender, nobody, outside, Client())),
            (to_end, (viewer, breaker, nobody, outside, Client())),
        ):
            for client in who:
                for send in (client.get, client.post):
                    answer = send(link)
                    is_login = answer.status_code == 302 and "/login/" in answer.url
                    assert answer.status_code == 403 or is_login, answer
        assert Redlock.of(app).holder("stock:7") is not None
        assert len(Redlock.of(app).claims().claims) == 1
    assert entries() == []


def test_only_a_post_with_a_csrf_token_ends_anything(app: Celery, user: Callable[..., Any]) -> None:
    rights = "view_locks", "break_lock", "end_claim"
    client = user(*rights, enforce_csrf_checks=True)
    with hold("stock:7", on=app, by=RUN):
        (link,) = links(client.get(LOCKS))
        asked = client.get(link)
        assert client.head(link).status_code == 200
        assert client.post(link).status_code == 403
        assert client.post(link, {"csrfmiddlewaretoken": "x" * 64}).status_code == 403
        assert client.delete(link).status_code in (403, 405)
        assert client.post(LOCKS).status_code in (403, 405)
        assert Redlock.of(app).holder("stock:7") is not None
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', asked.content.decode())
        assert token is not None
        done = client.post(link, {"csrfmiddlewaretoken": token[1]}, follow=True)
        assert "stock:7 is broken on" in seen(done)
        assert Redlock.of(app).holder("stock:7") is None


@pytest.mark.parametrize("path", ["add/", "x/change/", "x/delete/", "x/history/", "break/", "x/"])
def test_there_are_no_pages_of_rows(operator: Any, app: Celery, path: str) -> None:
    assert operator.get(LOCKS + path).status_code == 404
    from django.contrib.contenttypes.models import ContentType

    of = ContentType.objects.get(app_label="celery_redlock")
    assert operator.get(f"/admin/r/{of.pk}/x/").status_code == 404


def test_an_admin_site_of_a_project_keeps_its_users_on_it(app: Celery, operator: Any) -> None:
    there = LOCKS.replace("/admin/", "/ops/")
    with hold("stock:7", on=app, by=RUN):
        body = operator.get(there).content.decode()
        (link,) = re.findall(rf'href="({there}break/[0-9a-f]+/)"', body)
        for page in (body, operator.get(link).content.decode()):
            assert 'href="/admin/' not in page
        assert operator.post(link).url == there
        assert Redlock.of(app).holder("stock:7") is None


@pytest.mark.parametrize("mark", ["0" * 64, "x", "%00", "..", "<b>"])
def test_an_unknown_mark_ends_nothing(operator: Any, app: Celery, mark: str) -> None:
    with hold("stock:7", on=app, by=RUN):
        for action in ("break", "end-claim"):
            for send in (operator.get, operator.post):
                text = seen(send(f"{LOCKS}{action}/{mark}/", follow=True))
                assert "Nothing is " in text
        assert Redlock.of(app).holder("stock:7") is not None
    assert entries() == []


def test_a_mark_of_a_claim_breaks_no_lock(operator: Any, app: Celery) -> None:
    with hold("stock:7", on=app, by=RUN):
        (link,) = links(operator.get(LOCKS))
        operator.post(link.replace("/break/", "/end-claim/"))
        assert Redlock.of(app).holder("stock:7") is not None


def test_a_lock_that_has_another_holder_by_then_stays(app: Celery, operator: Any) -> None:
    with hold("stock:7", on=app, by=RUN):
        (link,) = links(operator.get(LOCKS))
        assert f"shop.take[{TASK}] on celery@web1 loses stock:7" in seen(operator.get(link))
    assert "that lock has ended" in seen(operator.post(link, follow=True))
    with hold("stock:7", on=app, by=RUN):  # the same label, of another acquire
        assert "another holder has it" in seen(operator.post(link, follow=True))
        assert "another holder has it" in seen(operator.get(link, follow=True))
        found = Redlock.of(app).holder("stock:7")
        assert found is not None
        assert len(found.votes) >= 2
    assert entries() == []


def test_a_lock_that_changes_hands_after_it_was_found_stays(app: Celery, database: Path) -> None:
    """The request has read the nodes; each node compares the value again."""
    from celery_redlock.django import ending
    from celery_redlock.django.ending import mark_of

    with hold("stock:7", on=app, by=RUN):
        lock = Redlock.of(app).holder("stock:7")
        assert lock is not None
        found, notes = ending.find_marked(app, "break", mark_of(lock))
        assert isinstance(found, LockReport)
        assert found.value == lock.value
        assert notes == []
    with hold("stock:7", on=app, by=RUN):
        ended = ending.end(app, lock, "ann")
        assert ended.line == "stock:7 ended before: nothing was broken"
        assert not ended.was_there
        now = Redlock.of(app).holder("stock:7")
        assert now is not None
        assert now.value != lock.value


def test_a_later_claim_that_comes_after_the_first_was_found_stays(
    app: Celery, database: Path
) -> None:
    from celery_redlock.django import ending

    @app.task(base=LockedTask, lock_key="mail:{to}", lock_unique_for=60, shared=False)
    def remind(to: int) -> None:
        pass

    remind.delay(3)
    (first,) = Redlock.of(app).claims().claims
    assert Redlock.of(app).end_claim("mail:3")
    later = remind.delay(3)
    ended = ending.end(app, first, "ann")
    assert not ended.was_there
    assert remind.delay(3).id == later.id


def test_a_permit_is_broken_alone(app: Celery, operator: Any) -> None:
    with hold("p", on=app, limit=2, by="one"), hold("p", on=app, limit=2, by="two"):
        # the last node may have granted each of them the permit of the other, for a moment
        eventually(lambda: len(Redlock.of(app).locks("p").locks) == 2)
        first, second = links(operator.get(LOCKS))
        assert re.search(r"(one|two) loses p \(permit 0\)", seen(operator.get(first)))
        operator.post(first)
        assert links(operator.get(LOCKS)) == [second]


def test_a_claim_is_ended_once(app: Celery, operator: Any, caplog: Any) -> None:
    @app.task(base=LockedTask, lock_key="mail:{to}", lock_unique_for=60, shared=False, name="mail")
    def remind(to: int) -> None:
        pass

    sent = remind.delay(3)
    assert remind.delay(3).id == sent.id
    (link,) = links(operator.get(LOCKS))
    assert f"mail[{sent.id}] loses its claim on mail:3" in seen(operator.get(link))
    text = seen(operator.post(link, follow=True))
    assert f"the claim of mail[{sent.id}] on mail:3 is ended on 127.0.0.1:" in text
    later = remind.delay(3)
    assert later.id != sent.id
    assert "a later call has another one" in seen(operator.post(link, follow=True))
    assert remind.delay(3).id == later.id
    ((name, resource, message),) = entries()
    assert (name, resource) == ("ann", "mail:3")
    assert "is ended on" in message
    (record,) = [one for one in caplog.records if getattr(one, "event", "") == "claim_ended"]
    assert (record.by, record.resource, record.task_id) == ("ann", "mail:3", sent.id)


def test_who_broke_what_is_in_both_logs_and_told_to_monitors(
    app: Celery, operator: Any, caplog: Any, standing_broker: EmbeddedNode
) -> None:
    app.conf.broker_url = standing_broker.url
    told: list[dict[str, Any]] = []
    with app.connection_for_read() as broker, hold("stock:7", on=app, by=RUN):
        receiver = app.events.Receiver(broker, handlers={"task-lock-broken": told.append})
        with receiver.consumer_context() as (used, *_):
            with suppress(TimeoutError):  # it subscribes at its first look
                used.drain_events(timeout=0.1)
            with standing_broker.client() as client:
                eventually(client.pubsub_numpat)
            (link,) = links(operator.get(LOCKS))
            operator.post(link)
            while not told:
                used.drain_events(timeout=30)
    (record,) = [one for one in caplog.records if getattr(one, "event", "") == "lock_broken"]
    assert record.levelno == logging.WARNING
    assert (record.by, record.resource, record.task_id) == ("ann", "stock:7", TASK)
    line = record.getMessage()
    assert line.startswith("in Django's admin ann breaks a lock: stock:7 is broken on 127.0.0.1:")
    assert line.endswith(f"its holder was shop.take[{TASK}] on celery@web1")
    assert entries() == [("ann", "stock:7", line.partition(": ")[2])]
    assert told[0]["by"] == "ann in Django's admin"
    assert told[0]["uuid"] == TASK


def test_the_name_of_a_user_may_be_a_number(
    app: Celery, operator: Any, caplog: Any, monkeypatch: Any
) -> None:
    """As of a project's own user model whose USERNAME_FIELD is a number."""
    from django.contrib.auth.models import User

    monkeypatch.setattr(User, "USERNAME_FIELD", "id")
    with hold("stock:7", on=app, by=RUN):
        (link,) = links(operator.get(LOCKS))
        assert "stock:7 is broken on" in seen(operator.post(link, follow=True))
    (record,) = [one for one in caplog.records if getattr(one, "event", "") == "lock_broken"]
    assert record.by == str(User.objects.get().pk)
    assert len(entries()) == 1


@pytest.fixture
def own_nodes(app: Celery) -> Iterator[Nodes]:
    """Give three nodes that the test may end."""
    with embedded_nodes(3) as made:
        trust_nodes(made)
        app.conf.redlock_nodes = [one.url for one in made]
        yield made
        for node in made:
            node.resume()


def test_a_node_that_is_silent_or_down_is_named_and_the_page_answers(
    app: Celery, operator: Any, own_nodes: Nodes
) -> None:
    with hold("stock:7", on=own_nodes[:2], by=RUN):
        pass
    with hold("stock:7", on=app, by=RUN):
        own_nodes[2].pause()
        page = operator.get(LOCKS)
        text = seen(page)
        assert f"127.0.0.1:{own_nodes[2].port} cannot be queried: " in text
        assert "2 needed: locks" not in text
        (link,) = links(page)
        done = seen(operator.post(link, follow=True))
        assert f"127.0.0.1:{own_nodes[2].port} was not changed" in done
        assert "stock:7 is broken on" in done
        own_nodes[1].kill()
        text = seen(operator.get(LOCKS))
        assert "1 of 3 nodes answered, 2 needed: locks and waiting tasks may be missing" in text
        assert "Which locks are held is unknown." in text
        own_nodes[0].pause()
        assert "0 of 3 nodes answered" in seen(operator.get(LOCKS))
        lost = seen(operator.post(link, follow=True))
        assert "Nothing is broken: whether that lock is held is unknown." in lost
        assert "0 of 3 nodes answered, 2 needed" in lost
        for node in own_nodes:
            node.resume()


def test_a_silent_broker_keeps_no_page_from_the_locks(
    app: Celery, operator: Any, standing_broker: EmbeddedNode
) -> None:
    app.conf.broker_url = standing_broker.url
    with hold("stock:7", on=app, by=RUN):
        standing_broker.pause()
        try:
            page = operator.get(LOCKS)
            assert "the workers cannot be asked who waits: no answer within 5 s" in seen(page)
            (link,) = links(page)
            assert "stock:7 is broken on" in seen(operator.post(link, follow=True))
        finally:
            standing_broker.resume()


@pytest.mark.parametrize(
    ("nodes_setting", "said"),
    [(None, "redlock_nodes"), (["http://a"], "http://a"), ([], "redlock_nodes")],
)
def test_wrong_settings_are_told_on_the_page(operator: Any, nodes_setting: Any, said: str) -> None:
    made = Celery("shop", broker="amqp://127.0.0.1:1")
    made.conf.redlock_nodes = nodes_setting
    made.set_current()
    assert said in seen(operator.get(LOCKS))
    assert said in seen(operator.get(f"{LOCKS}break/{'0' * 64}/", follow=True))
    made.close()


# what a process of a project imports of this folder
IMPORTS = """
import json, sys
import django
from django.conf import settings
from tests.integration import admin_site
given = {name: value for name, value in vars(admin_site).items() if name.isupper()}
given["INSTALLED_APPS"] = [one for one in given["INSTALLED_APPS"] if one not in sys.argv[2:]]
settings.configure(**given)
django.setup()
exec(sys.argv[1])
found = [name for name in sys.modules if name.startswith("celery_redlock")]
print(json.dumps(sorted(found)))
"""
CASES = {
    "without the app": ("import celery_redlock", ["celery_redlock.django"], set()),
    "a task": (
        "from celery_redlock.django import LockedDjangoTask", ["celery_redlock.django"],
        {"task"},
    ),
    "no admin": ("", ["django.contrib.admin"], {"apps", "models"}),
    "an admin that nobody opens": ("", [], {"apps", "models", "admin"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_process_imports_only_what_it_uses(case: str) -> None:
    code, without, wanted = CASES[case]
    command = [sys.executable, "-c", IMPORTS, code, *without]
    # a new process: a forked one has what its server imported
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = set(json.loads(ended.stdout))
    names = {name.removeprefix("celery_redlock.django.") for name in found}
    assert {name for name in names if "." not in name} - {"celery_redlock"} >= wanted
    ours = {name for name in found if name.startswith("celery_redlock.django.")}
    assert ours == {f"celery_redlock.django.{name}" for name in wanted}
    assert not [name for name in found if name.startswith("celery_redlock.operate.cli")]
