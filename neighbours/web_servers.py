"""The web servers: each serves requests that take locks and send uniquely, beside a worker."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import partial
from typing import Any

from neighbours.row import Neighbour, Seen
from neighbours.run import Run

APP = "neighbours.web_app"
GUNICORN = "gunicorn==27.0.1"
UWSGI = "uWSGI==2.0.31"
TTL, LONGEST = 4, 600  # seconds


def web(run: Run, command: Sequence[str], **more: Any) -> Seen:
    """Run a server. command: `{port}` and `{folder}` are filled in. more: for its program."""
    return run.beside_servers(
        "neighbours.web_story", concurrency=4,
        conf={"redlock_ttl": TTL, "redlock_max_ttl": LONGEST}, more={"command": command, **more},
    )  # fmt: skip


def gunicorn(run: Run, options: Sequence[str] = ()) -> Seen:
    words = ("--workers=2", "--bind=127.0.0.1:{port}", "--no-control-socket", "--timeout=300")
    return web(run, ("gunicorn", *words, *options, f"{APP}:application"))


def uwsgi(run: Run, options: Sequence[str] = (), **more: Any) -> Seen:
    words = ("--http-socket=127.0.0.1:{port}", "--master", "--processes=2", "--die-on-term")
    app = (f"--module={APP}:application", "--pythonpath=.")
    return web(run, ("uwsgi", *words, *app, *options), **more)


def mod_wsgi(run: Run) -> Seen:
    """Run Apache by mod_wsgi-express; it leaves the rights of root."""
    (run.folder / "app.wsgi").write_text(f"from {APP} import application\n")
    command = ["mod_wsgi-express", "start-server", "app.wsgi", "--host=127.0.0.1", "--port={port}"]
    command += ["--processes=2", "--threads=5", "--server-root={folder}/apache"]
    command += ["--working-directory={folder}", "--python-path={folder}", "--log-to-terminal"]
    return web(run, (*command, *as_other_user(run)))


def as_other_user(run: Run) -> tuple[str, ...]:
    """Return what it needs if root starts it: Apache serves as another user, who may write here."""
    if os.geteuid() != 0:
        return ()
    for place in (run.folder, run.folder / "notes"):
        place.touch()
        shutil.chown(place, SERVES)
    run.folder.chmod(0o755)
    return (f"--user={SERVES}", f"--group={SERVES}")


SERVES = "www-data"
ASGI = "A request that waits with `async with` blocks no other request of its process."

NEIGHBOURS: tuple[Neighbour, ...] = (
    Neighbour(
        "gunicorn, sync",
        "web_servers",
        "A request that waits for a lock blocks one worker; its --timeout is 30 s by default.",
        gunicorn,
        (GUNICORN,),
    ),
    Neighbour(
        "gunicorn, gthread",
        "web_servers",
        "A request that waits for a lock blocks one thread.",
        partial(gunicorn, options=("--threads=4",)),
        (GUNICORN,),
    ),
    Neighbour(
        "gunicorn, gevent",
        "web_servers",
        "A request that waits for a lock blocks one greenlet.",
        partial(gunicorn, options=("--worker-class=gevent",)),
        (GUNICORN, "gevent==26.9.0"),
    ),
    Neighbour(
        "gunicorn, --preload",
        "web_servers",
        "A lock that is taken at the import stays with the parent.",
        partial(gunicorn, options=("--preload",)),
        (GUNICORN,),
    ),
    Neighbour(
        "uWSGI, prefork",
        "web_servers",
        "A worker, which is forked in C, uses no lock and no connection of its parent.",
        uwsgi,
        (UWSGI,),
    ),
    Neighbour(
        "uWSGI, lazy-apps",
        "web_servers",
        "Each worker imports the app itself.",
        partial(uwsgi, options=("--lazy-apps",)),
        (UWSGI,),
    ),
    Neighbour(
        "uWSGI, mules",
        "web_servers",
        "A mule takes locks as a worker does.",
        partial(uwsgi, options=("--mule=neighbours/web_mule.py",), mules=5),
        (UWSGI,),
    ),
    Neighbour(
        "mod_wsgi, daemon mode",
        "web_servers",
        "Each process imports the app itself.",
        mod_wsgi,
        ("mod_wsgi==6.1.1",),
    ),
    Neighbour(
        "uvicorn",
        "web_servers",
        ASGI,
        partial(web, command=("uvicorn", "--workers=2", "--port={port}", f"{APP}:asgi")),
        ("uvicorn==0.54.0",),
    ),
    Neighbour(
        "hypercorn",
        "web_servers",
        ASGI,
        partial(
            web, command=("hypercorn", "--workers=2", "--bind=127.0.0.1:{port}", f"{APP}:asgi")
        ),
        ("hypercorn==0.18.0",),
    ),
)
