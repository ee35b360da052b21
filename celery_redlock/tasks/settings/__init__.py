"""The options of a task's lock: their names and checks, their five levels, and the keys they make.

Read `options.py` first: its table is the only list of options.

- `options.py`: `TaskLockOptions`, `EffectiveOptions`, `Backoff`: the table of options with checks
  and defaults; `Backoff.delay` draws a delay between deferrals (exponential backoff with jitter).
- `app.py`: `AppSettings`, `APP_SETTING`, `OptionSource`: the table of settings for the whole app.
  `OptionSource.wrong` makes the error for a wrong value, with the place where it is set.
- `levels.py`: `read_app`, `merge_levels`, `check_options`: reads, checks and merges levels: the
  nearer one wins. `find_nodes` and `visibility_timeout` read what the app says of its broker.
- `task_config.py`: `TaskLockConfig`, `compile_config`: the merged result for one task.
  `TaskLockConfig.options_for` gives the options in a queue, and `TaskLockConfig.resources` the
  resources that a call locks.
- `templates.py`: `fill`, `digest`, `canonical`: the text of a key: templates filled from arguments,
  and the digest of the arguments.
- `call.py`: `TaskCall`, `CallKeys`: one call, from which the resources are made, and what it locks.

Nothing here does I/O. Not here: what a run does with its options (`tasks/execution`), which class
or entry declares a task (`tasks/declaration.py`), and checks that the lock shares
(`lock/validation.py`).
"""
