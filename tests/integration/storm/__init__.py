"""A storm: workers and nodes are killed, frozen and brought back while tasks share few keys.

- `tasks`: the workers' app: bodies that write what they are sure of, step by step
- `callers`: threads and coroutines that wait for the same keys outside of tasks
- `ledger`: what the bodies wrote, and what must be true of it
- `queue`: what stands in the broker
- `weather`: what is done to workers and nodes
- `show`: one storm from its start to its verdict

`python -m tests.integration.storm --seconds 600` goes on for as long as one likes.
"""
