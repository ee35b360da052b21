"""A wall clock that a test sets: of one process, while that runs."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.testing import EmbeddedNode

HOUR = 3600  # s

CLOCK = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *ahead; /* s, in a file that others write */

__attribute__((constructor)) static void begin(void)
{
    ahead = mmap(NULL, 8, PROT_READ, MAP_SHARED, open(getenv("CLOCK_AHEAD"), O_RDONLY), 0);
}

int clock_gettime(clockid_t which, struct timespec *now)
{
    int error = syscall(SYS_clock_gettime, which, now);
    if (ahead && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
        now->tv_sec += *ahead;
    return error;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *also)
{
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (also)
        *also = precise.tv_sec;
    return precise.tv_sec;
}
"""


class WallClock:
    """The wall clock of a node or a worker, which can be set while that runs.

    environment: with it a program goes by this clock.
    """

    def __init__(self, folder: Path, compiler: str) -> None:
        self._ahead = folder / "ahead"
        self._ahead.write_bytes(struct.pack("q", 0))
        library, source = folder / "clock.so", folder / "clock.c"
        source.write_text(CLOCK)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
        self._folder = folder
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_AHEAD": str(self._ahead)}

    def server(self) -> Path:
        server, binary = EmbeddedNode().command[0], self._folder / "server"
        environment = " ".join(f'{name}="{value}"' for name, value in self.environment.items())
        binary.write_text(f'#!/bin/sh\nexec env {environment} "{server}" "$@"\n')
        binary.chmod(0o755)
        return binary

    def set(self, ahead: int) -> None:
        """Set it to the right time and so many s, negative ones too."""
        with self._ahead.open("r+b") as file:
            file.write(struct.pack("q", ahead))


class StoppedClock(SystemClock):
    """A clock of the package that goes on as a test turns it. time: monotonic s."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0
        self.now = lambda: self.time
