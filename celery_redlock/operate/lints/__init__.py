"""What `doctor` and a worker's start report about the settings of an app.

Not here: values that are wrong in themselves, which `tasks/settings` refuses when the app
finalizes; how the nodes are, which `operate/cli` shows. Read `rules.py` first: `lint` is a pure
function of the facts in `model.py`. `app_rules.py` looks at the app, `task_rules.py` at one task,
`shared_rules.py` at tasks together. `facts.py` collects the facts, `startup.py` logs the result.
"""
