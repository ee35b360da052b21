"""Metrics for Prometheus: what is counted, what is measured at a scrape, and how it is served.

Read `exporter.py` first: what a worker does before its pool forks, once it is ready and at its end.
`counters.py` has the counters and histograms, which the public signals feed, and the gauges, which
each scrape reads anew. Without the setting `redlock_metrics`, none of this is connected.

Not here: spans (`operate/tracing.py`), and the queries behind the gauges (`operate/control.py`,
`lock/node_status.py`).
"""
