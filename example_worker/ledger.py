"""The shop's database: rows that are overwritten, and the ledger that is only appended to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import String, case, create_engine, distinct, event, func, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from example_worker.verdict import Account

__all__ = ["Item", "Ledger"]


class _Tables(DeclarativeBase):
    """The tables of the shop. Their names have a prefix, so that they collide with no others."""


class Item(_Tables):
    """What orders compete for: a product's stock, a campaign's coupons, a customer's points.

    value: the number that orders read, and overwrite with what they computed from it.
    step: what one effective order adds. limit: how many may be issued; None: no limit.
    """

    __tablename__ = "redlock_shop_items"

    phase: Mapped[str] = mapped_column(String(40), primary_key=True)
    kind: Mapped[str] = mapped_column(String(40), primary_key=True)
    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    start: Mapped[int]
    value: Mapped[int]
    step: Mapped[int]
    limit: Mapped[int | None]


class _Entry(_Tables):
    """One execution of one order. Without constraints, so that it can record faults."""

    __tablename__ = "redlock_shop_ledger"

    id: Mapped[int] = mapped_column(primary_key=True)
    phase: Mapped[str] = mapped_column(String(40), index=True)
    kind: Mapped[str] = mapped_column(String(40))
    name: Mapped[str] = mapped_column(String(40))
    order_id: Mapped[int]
    change: Mapped[int]
    serial: Mapped[int | None]


class Ledger:
    """The database at a SQLAlchemy URL; every method is one transaction of its own."""

    def __init__(self, url: str) -> None:
        self._engine = create_engine(url)
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine, "connect", _prepare_sqlite)
        # Items are read in one transaction and used after it, as applications do.
        self._session = sessionmaker(self._engine, expire_on_commit=False)

    def create(self) -> None:
        """Create the two tables, empty."""
        self.drop()
        _Tables.metadata.create_all(self._engine)

    def drop(self) -> None:
        """Drop the two tables; nothing else is touched."""
        _Tables.metadata.drop_all(self._engine)

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def stock(self, items: Iterable[Item]) -> None:
        """Add the items of a phase."""
        with self._session.begin() as session:
            session.add_all(items)

    def read(self, phase: str, kind: str, name: str) -> Item:
        """Return the current item. Raises NoResultFound if the phase is of another run."""
        with self._session.begin() as session:
            return session.scalars(select(Item).where(*_is(phase, kind, name))).one()

    def write(self, order_id: int, item: Item, value: int, serial: int | None = None) -> None:
        """Overwrite the item's value, and append to the ledger what was meant to change.

        item: as the order read it. value: computed from that reading.
        """
        entry = _Entry(
            phase=item.phase,
            kind=item.kind,
            name=item.name,
            order_id=order_id,
            change=value - item.value,
            serial=serial,
        )
        with self._session.begin() as session:
            row = _is(item.phase, item.kind, item.name)
            session.execute(update(Item).where(*row).values(value=value))
            session.add(entry)

    def accounts(self, phase: str) -> list[Account]:
        """Return every item of the phase beside its ledger, all at one moment."""
        entry = (_Entry.phase == Item.phase, _Entry.kind == Item.kind, _Entry.name == Item.name)
        # one statement reads one snapshot on every database
        query = (
            select(
                *(Item.kind, Item.name, Item.start, Item.value, Item.step, Item.limit),
                func.count(_Entry.id),
                func.count(distinct(_Entry.order_id)),
                func.sum(case((_Entry.id.is_(None), 0), else_=_Entry.change)),
                func.count(_Entry.serial),
                func.count(distinct(_Entry.serial)),
            )
            .outerjoin(_Entry, entry[0] & entry[1] & entry[2])
            .where(Item.phase == phase)
            .group_by(Item.phase, Item.kind, Item.name)
            .order_by(Item.kind, Item.name)
        )
        with self._session.begin() as session:
            return [Account(*row) for row in session.execute(query)]


def _is(phase: str, kind: str, name: str) -> Sequence[Any]:
    return Item.phase == phase, Item.kind == kind, Item.name == name


def _prepare_sqlite(connection: Any, _record: object) -> None:
    """Let readers and one writer work side by side, and writers queue for up to 20 s."""
    for pragma in ("busy_timeout=20000", "journal_mode=WAL", "synchronous=NORMAL"):
        connection.execute(f"PRAGMA {pragma}")
