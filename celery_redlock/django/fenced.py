"""`fenced_update`: an UPDATE of a queryset that is never a late write.

Not here: what its rows mean (`lock/fenced_rows.py`), and the same for SQLAlchemy (`sqlalchemy.py`).
"""

from __future__ import annotations

from typing import Any

from celery_redlock.errors import SettingsError
from celery_redlock.lock.fenced_rows import (
    FENCE,
    FENCED_UPDATE,
    column_error,
    own_value_error,
    rows_written,
    token_of,
    transaction_error,
)
from celery_redlock.lock.lock import Lock

try:
    from django.core.exceptions import FieldDoesNotExist, FieldError
    from django.db import connections, transaction
    from django.db.models import BigIntegerField, Q, QuerySet
    from django.db.models.manager import BaseManager
except ImportError as error:
    text = "celery_redlock.django needs Django: pip install django"
    raise ImportError(f"{text} ({error})") from error

__all__ = ["fenced_update"]

FIELD = f"give the model `{FENCE} = models.BigIntegerField(db_default=0)`"
LIBRARY_OF_INNODB = "mysql"  # of MariaDB, too


def fenced_update(queryset: Any, lock: Lock, /, **values: Any) -> int:
    """Update the rows of a queryset unless a later holder of the lock has written one of them.

    Returns the number of rows; 0 if the queryset has none. All rows are written or none, also if
    the error is caught inside the transaction. The rows' `fence` becomes the lock's fencing token,
    so a second update with it is allowed. A subquery of the queryset must not depend on the values.

    queryset: of a model with `fence = models.BigIntegerField(db_default=0)`. values: fields of the
    model's own table, as `QuerySet.update` takes them; none raises the fence alone. Raises
    LockLost if a later holder has written. Raises RedlockError outside of `transaction.atomic`,
    and for a lock without a token; SettingsError for a model that lacks the field, and for a slice,
    a union and groups.
    """
    token = token_of(lock)
    _check_rows(queryset)
    _check_fields(queryset.model, values)
    alias = queryset.select_for_update().db  # where it writes, as a router says
    connection = connections[alias]
    if not connection.in_atomic_block:
        raise transaction_error(f"call it inside transaction.atomic(using={alias!r})")
    rows = queryset.using(alias)
    rows.query.select_for_update = False  # its `skip_locked` would hide the row of a later holder
    rows = _rows_of_one_table(rows, connection)
    refused = rows.filter(Q(fence__gt=token) | Q(fence__isnull=True)).order_by()
    if connection.vendor == LIBRARY_OF_INNODB:
        # an UPDATE of InnoDB reads what is committed, a plain SELECT may read an old snapshot
        refused = refused.select_for_update()
    with transaction.atomic(using=alias):
        try:
            written = rows.filter(fence__lte=token).update(**values, fence=token)
        except FieldError as error:
            _check_annotations(queryset, rows, error)
            raise
        fences = list(refused.values_list(FENCE, flat=True)[:1])
        return rows_written(lock.resource, token, written, fences)


def _check_rows(queryset: Any) -> None:
    """Raise unless each row of a queryset is a row of a table, and filters can be added."""
    if not isinstance(queryset, (QuerySet, BaseManager)):
        hint = "must be a QuerySet of the rows to update, as Model.objects.filter(...) returns it"
        raise SettingsError(FENCED_UPDATE, "queryset", repr(queryset), hint)
    query = queryset.all().query
    kinds = {
        "a slice": query.is_sliced,
        "a union, intersection or difference": query.combinator,
        "groups by values(...).annotate(...)": query.group_by not in (None, True),
    }
    for kind, is_it in kinds.items():
        if is_it:
            hint = "cannot be updated: filter the model by the keys of these rows, with pk__in"
            raise SettingsError(FENCED_UPDATE, "queryset", kind, hint)


def _check_fields(model: Any, values: dict[str, Any]) -> None:
    """Raise unless one UPDATE of one table can compare the fence and write all values."""
    options = model._meta
    try:
        fence = options.get_field(FENCE)
    except FieldDoesNotExist:
        raise column_error("queryset", options.label, "", FIELD) from None
    if not isinstance(fence, BigIntegerField):  # of a smaller type Django drops the comparison
        raise column_error("queryset", options.label, type(fence).__name__, FIELD)
    if FENCE in values:
        raise own_value_error(values[FENCE])
    inherited = [
        field
        for field in options.concrete_fields
        if field.model._meta.concrete_model is not options.concrete_model
        if field is fence or {field.name, field.attname} & values.keys()
    ]
    if inherited:
        raise SettingsError(
            FENCED_UPDATE, inherited[0].name, options.label,
            f"is in the table of {inherited[0].model._meta.label}: one UPDATE writes one table, "
            "so update the rows of that model",
        )  # fmt: skip


def _check_annotations(queryset: Any, rows: Any, error: Exception) -> None:
    """Raise if values may have named an annotation of a queryset which `rows` has not."""
    lost = queryset.all().query.annotations.keys() - rows.query.annotations.keys()
    if lost:
        hint = (
            "no value may name an annotation of rows that a join or an aggregate chooses: filter "
            f"the model by the keys of these rows, with pk__in, and annotate that ({error})"
        )
        found = f"annotated with {', '.join(sorted(lost))}"
        raise SettingsError(FENCED_UPDATE, "queryset", found, hint) from None


def _rows_of_one_table(queryset: Any, connection: Any) -> Any:
    """Return the rows of a queryset as a filter of their own table.

    For a join Django moves all conditions into a subquery. PostgreSQL does not evaluate that again
    for a row that changed while the UPDATE waited for it, so it would miss the newer fence.
    """
    query = queryset.query
    if query.count_active_tables() <= 1 and query.group_by is None:
        return queryset
    keys = queryset.order_by().values_list("pk", flat=True)
    if connection.vendor == LIBRARY_OF_INNODB:  # MySQL selects from no table that it updates
        keys = list(keys.select_for_update())
    # not of a manager, which may hide rows; of that class, which may have an `update` of its own
    return type(queryset)(queryset.model, using=connection.alias).filter(pk__in=keys)
