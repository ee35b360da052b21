"""The options of a task's lock: their names and checks, their five levels, and the keys they make.

Not here: what a run does with its options (`tasks/execution`), and which class or entry declares a
task (`tasks/declaration.py`). Nothing here does I/O. Read `options.py` first: its table is the only
list of options. `app.py` has the table of settings for the whole app, and names the source of a
value: `OptionSource.wrong` makes the error for a wrong one; `lock/validation.py` checks what the
lock checks, too. `levels.py` reads and merges levels, and derives values from what the app says of
its broker: nodes, visibility timeout, the longest countdown. `task_config.py` keeps the result for
one task, and makes the resources of a call (`call.py`) from `templates.py`.
"""
