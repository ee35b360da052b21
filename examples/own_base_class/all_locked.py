"""The same app, with a lock for each of its tasks."""

from own_base import app

# all other tasks, whatever their class, on all their arguments
app.conf.redlock_tasks = {
    "vendor.sync": {"key": "vendor:{account}"},
    "*": {},
}
