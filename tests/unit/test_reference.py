"""The reference of options and settings: its names, defaults and examples are those of the code."""

from __future__ import annotations

import functools
import re
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
from celery import Celery

from celery_redlock import Backoff, LockedTask, SettingsError
from celery_redlock.tasks.settings.app import APP_SETTING
from celery_redlock.tasks.settings.levels import read_app
from celery_redlock.tasks.settings.options import OPTION
from tests.pages import ROOT

NODES = ["redis://a", "redis://b", "redis://c"]
SETTINGS = {f"redlock_{name}": setting for name, setting in APP_SETTING.items()}
IN_WORDS = {  # defaults that are no value
    "key": "all arguments",
    "redlock_nodes": "the broker, else the result backend, if it is one Redis",
    "redlock_done_ttl": "the broker's visibility timeout and 60 s, at most 600 s",
    "redlock_call_options": "all",
}


@dataclass(frozen=True)
class Reference:
    """One page: by name the defaults of its table, and its sections."""

    defaults: dict[str, str]
    sections: dict[str, str]

    @classmethod
    def of(cls, name: str) -> Reference:
        text = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
        rows = re.findall(r"^\| \[`(\w+)`\]\(#\1\) \| (.+?) \| .+ \|$", text, re.MULTILINE)
        heads = re.split(r"^##+ (.+)\n", text, flags=re.MULTILINE)
        sections = dict(zip(heads[1::2], heads[2::2], strict=True))
        return cls(dict(rows), {one: sections[one] for one in sections if one in dict(rows)})

    def example(self, name: str) -> str:
        return self.sections[name].partition("```python\n")[2].partition("```")[0]


OPTIONS_PAGE, SETTINGS_PAGE = Reference.of("options.md"), Reference.of("settings.md")


@pytest.mark.parametrize(
    ("page", "table"), [(OPTIONS_PAGE, OPTION), (SETTINGS_PAGE, SETTINGS)], ids=["options", "app"]
)
def test_a_page_has_each_name_with_its_default_in_the_order_of_the_table(
    page: Reference, table: dict[str, Any]
) -> None:
    assert list(page.defaults) == list(page.sections) == list(table)
    for name, shown in page.defaults.items():
        in_section = re.search(r"\n- \*\*Default:\*\* (.+)\n", page.sections[name])
        assert in_section
        assert in_section[1] == shown
        if name in IN_WORDS:
            assert (shown, table[name].default) == (IN_WORDS[name], None)
        else:
            default = eval(shown.removesuffix(" s").strip("`"), {"Backoff": Backoff})
            assert default == table[name].default, name


@pytest.mark.parametrize("name", OPTION)
def test_an_option_says_whether_it_takes_a_callable(name: str) -> None:
    lines = " ".join(OPTIONS_PAGE.sections[name].split())
    takes_callables = "A callable at task and app level only" in lines
    assert takes_callables == (name in ("key", "on_conflict", "limit"))
    with nullcontext() if takes_callables else pytest.raises(SettingsError, match=f"k_{name}=<"):
        read_app({"redlock_nodes": NODES, f"redlock_{name}": lambda *_: "x"})


def tasks_of(example: str) -> list[Any]:
    """Return the tasks of an example, declared in an app of their own."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = NODES
    names = {"shared_task": functools.partial(app.task, shared=False)}
    exec(example, {"Backoff": Backoff, "LockedTask": LockedTask, **names})
    app.finalize()
    return [task for task in app.tasks.values() if isinstance(task, LockedTask)]


@pytest.mark.parametrize("name", OPTION)
def test_the_example_of_an_option_sets_it_for_each_of_its_tasks(name: str) -> None:
    tasks = tasks_of(OPTIONS_PAGE.example(name))
    assert tasks
    for task in tasks:
        option = task.lock_options(queue="celery")[name]
        assert option.source.name == f"lock_{name}", f"{task.name} does not set {name}"
        assert option.value != OPTION[name].default


@pytest.mark.parametrize("name", SETTINGS)
def test_the_example_of_a_setting_is_valid_and_not_its_default(name: str) -> None:
    app = Celery("shop", set_as_current=False)
    exec(SETTINGS_PAGE.example(name), {"app": app})
    value = app.conf[name]
    assert value != SETTINGS[name].default
    read_app({"redlock_nodes": NODES, name: value})
