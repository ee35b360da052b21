"""A worker pool as somebody else would write one; for CELERY_CUSTOM_WORKER_POOL."""

from __future__ import annotations

from billiard.pool import Pool
from celery.concurrency.base import BasePool
from celery.concurrency.prefork import process_initializer


class ForkingPool(BasePool):
    """A pool that forks its processes, and has no attribute that says so."""

    def on_start(self) -> None:
        self._pool = Pool(
            self.limit,
            initializer=process_initializer,
            initargs=self.options["initargs"],
            threads=True,
        )
        self.on_apply = self._pool.apply_async

    def on_stop(self) -> None:
        self._pool.close()
        self._pool.join()

    def on_terminate(self) -> None:
        self._pool.terminate()
