"""A run from its delivery to its end, in the process that runs the body.

Read `run.py` first: `LockedRun.execute` is the whole way. `contention.py` decides what becomes of a
message that did not get its lock, and `outcomes.py` does it. `redelivery.py` asks whether another
delivery of the same message runs or is done. `completion.py` is what happens after Celery has
stored the outcome. What a running body learns of its lock is in `tasks/body/`.
"""
