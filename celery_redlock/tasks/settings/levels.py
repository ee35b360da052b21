"""The levels of options: the checks of one level, and how the nearer level wins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_redlock.errors import SettingsError
from celery_redlock.lock.engine.acquirer import ROUNDS_IN_TTL
from celery_redlock.lock.validation import check_permits
from celery_redlock.tasks.settings.app import AppSettings
from celery_redlock.tasks.settings.options import BUILT_IN, OPTION
from celery_redlock.tasks.settings.sources import OptionSource, SourceOf, did_you_mean
from celery_redlock.tasks.settings.templates import templates_of

# Other locks' words for these options: by its spelling alone, `timeout` is closest to `limit`.
SYNONYMS = {
    **dict.fromkeys(("timeout", "expire", "expires", "expiry", "lease"), "ttl"),
    **dict.fromkeys(("blocking_timeout", "acquire_timeout"), "wait"),
}
KEY_OPTIONS = ("key", "args")  # two ways to name the resource: a level that sets one decides both


def check_options(
    options: Mapping[str, Any], app: AppSettings, source_of: SourceOf, *, travels: bool
) -> dict[str, Any]:
    """Return the options of one level, each checked; raises SettingsError.

    source_of: from an option's name to its source. travels: a message carries this level, or
    several tasks of a queue share it, so that no value can be a callable.
    """
    result = {}
    for name, value in options.items():
        if name not in OPTION:
            raise source_of(str(name)).wrong(value, f"is not an option{option_meant(name)}")
        if travels and callable(value):
            raise source_of(name).wrong(value, "callables stand at task and app level only")
        result[name] = OPTION[name].check(source_of(name), value, app)
    if result.get("key") is not None and result.get("args") is not None:
        hint = (
            f"{source_of('key').name} is set at the same level, and one of them says what is "
            "locked: leave one out, or set the one that is inherited to None"
        )
        raise source_of("args").wrong(options["args"], hint)
    return result


def decides_key(options: Mapping[str, Any]) -> bool:
    """Return whether a level sets `key` or `args`, and so decides both."""
    return any(name in options for name in KEY_OPTIONS)


def merged(*levels: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of several levels as one; the nearest level comes last."""
    result: dict[str, Any] = {}
    for options in levels:
        if decides_key(options):
            result.update(dict.fromkeys(KEY_OPTIONS))
        result.update(options)
    return result


def check_outside(options: Mapping[str, Any]) -> None:
    """Raise SettingsError for a `lock_*` option among Celery's own of a call, which ignores it."""
    for written, value in options.items():
        name = written.removeprefix("lock_")
        if name != written and name in OPTION:
            hint = f'stands in one with the others of a call: lock={{"{name}": ...}}'
            raise SettingsError("call", written, repr(value), hint)


def check_together(level: str, options: Mapping[str, Any]) -> None:
    """Raise SettingsError for options that are valid one by one, but not together.

    options: of several levels, merged and checked; a missing one has its built-in value.
    """
    whole = {**BUILT_IN, **options}
    limit, fencing = whole["limit"], whole["fencing"]
    check_permits(level, limit=limit, fencing=fencing, resources=templates_of(whole["key"]))


def check_built_in(app: AppSettings, options: Mapping[str, Any]) -> None:
    """Raise SettingsError if the built-in ttl is in force and leaves no time to renew it.

    options: those in force. A ttl that a level sets was checked at that level.
    """
    least = ROUNDS_IN_TTL * app.node_timeout
    if options.get("key") is False or options["ttl"] >= least:
        return
    longer = " and redlock_max_ttl" if least > app.max_ttl else ""
    hint = (
        f"must be at least {ROUNDS_IN_TTL} x redlock_node_timeout = {least:g} s: set redlock_ttl"
        f"{longer}, or lower redlock_node_timeout={app.node_timeout:g}"
    )
    raise OptionSource.at("built-in", "ttl").wrong(options["ttl"], hint)


def option_meant(written: object, prefix: str = "") -> str:
    """Return "; did you mean ...?" for an unknown option.

    written: as at another level, or by another lock's word for it. prefix: of names at this level.
    """
    bare = str(written).removeprefix("redlock_").removeprefix("lock_")
    meant = SYNONYMS.get(bare, bare)
    known = [f"{prefix}{option}" for option in OPTION]
    return did_you_mean(f"{prefix}{meant}" if meant in OPTION else written, known)
