"""Every end of life, in every pool, on every broker, acknowledged early and late, measured.

- `ends`: the table: what must be true after each end
- `tasks`: the workers' app, whose bodies end as they are told
- `watch`: looks at the nodes, the bodies' lines and their processes all the time
- `stage`: one pool on one broker: its workers, the messages they get, what comes of them
- `page`: the tables as `docs/reference/how-runs-end.md` shows them

`tests/integration/test_matrix.py` measures it. `python -m tests.integration.matrix --page` writes
the page.
"""
