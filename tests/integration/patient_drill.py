"""`celery`, with more time for the start and the end of a drill: a busy machine starts slowly."""

from __future__ import annotations

import os

from celery.__main__ import main

from celery_redlock.operate.drill import drill

if __name__ == "__main__":
    drill.START_WITHIN = 200.0
    drill.MORE = float(os.environ["DRILL_MORE"])
    main()
