"""The public names and signatures are a list in the repository: a change of it is a decision."""

from __future__ import annotations

import enum
import inspect
from pathlib import Path
from typing import Any

import celery_redlock
import celery_redlock.django
import celery_redlock.lock.reports
import celery_redlock.signals
import celery_redlock.sqlalchemy
import celery_redlock.testing

MODULES = (
    celery_redlock,
    celery_redlock.django,
    celery_redlock.lock.reports,
    celery_redlock.signals,
    celery_redlock.sqlalchemy,
    celery_redlock.testing,
)
LIST = Path(__file__).with_name("public_api.txt")


def members(thing: Any) -> list[str]:
    lines = []
    for name, value in sorted(vars(thing).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(value, property):
            lines.append(f"{thing.__name__}.{name}: property")
        elif inspect.isfunction(value):
            arguments = [str(p.replace(annotation=p.empty)) for p in
                         inspect.signature(value).parameters.values()]  # fmt: skip
            lines.append(f"{thing.__name__}.{name}({', '.join(arguments)})")
    return lines


def described(module: Any) -> list[str]:
    lines = []
    for name in sorted(module.__all__):
        value = getattr(module, name)
        lines.append(f"{module.__name__}.{name}")
        if inspect.isclass(value) and not issubclass(value, enum.Enum):
            bases = ", ".join(base.__name__ for base in value.__bases__)
            lines[-1] += f"({bases})"
            lines += [f"  {line}" for line in members(value)]
        elif inspect.isfunction(value):
            lines[-1] += "()"
    return lines


def test_the_public_names_are_those_on_the_list() -> None:
    now = [line for module in MODULES for line in described(module)]
    assert now == LIST.read_text().splitlines(), "run `python -m tests.test_public_api` to accept"


def test_each_public_name_says_what_it_means() -> None:
    things = [(name, getattr(module, name)) for module in MODULES for name in module.__all__]
    things = [(name, one) for name, one in things if inspect.isclass(one) or inspect.isroutine(one)]
    for name, one in [*things]:
        parts = vars(one).items() if inspect.isclass(one) else ()
        things += [
            (f"{name}.{part}", value)
            for part, value in parts
            if not part.startswith("_")
            if isinstance(value, property) or inspect.isfunction(value)
        ]
    assert not [name for name, one in things if not one.__doc__]


if __name__ == "__main__":
    lines = [line for module in MODULES for line in described(module)]
    LIST.write_text("\n".join(lines) + "\n")
