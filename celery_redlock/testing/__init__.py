"""Support for testing locked tasks: real embedded nodes and real workers.

Needs the extra `celery_redlock[testing]`. Nothing in the package itself imports it.
"""

from celery_redlock.testing.servers import EmbeddedNode, WorkerProcess, embedded_nodes

__all__ = ["EmbeddedNode", "WorkerProcess", "embedded_nodes"]
