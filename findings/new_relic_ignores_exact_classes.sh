#!/bin/sh
# New Relic's agent: error_collector.ignore_classes with the name of a base class
#
# Expected: the name of a class covers its subclasses, as in an `except` clause, and in Celery's Task.throws
#   and autoretry_for. So celery.exceptions:Ignore covers the exceptions that an application derives from
#   it, and celery.exceptions:TaskPredicate, the base of Ignore, Reject and Retry, covers all three.
# Seen: only an exception of exactly that class is ignored. With celery.exceptions:Ignore, a task that raises
#   an own subclass of it counts as an error, although Celery gives it the state IGNORED. The names of the
#   base classes TaskPredicate and Exception have no effect at all on Ignore.
# Source: newrelic/core/config.py, `error_matches_rules`, looks up the name of the exception's class in the
#   list. newrelic/common/object_names.py, `parse_exc_info`, makes that name of value.__class__ alone.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check newrelic==14.1.0 celery==5.7.0

cat > "$folder/shop.py" <<'PYTHON'
import newrelic.agent

newrelic.agent.initialize("newrelic.ini")  # before the import of Celery. Developer mode sends nothing
from celery import Celery  # noqa: E402
from celery.exceptions import Ignore  # noqa: E402
from newrelic.core.stats_engine import StatsEngine  # noqa: E402

errors = []  # of all transactions
record = StatsEngine.record_transaction


def noting(engine, transaction):
    errors.extend(error.type for error in transaction.errors)
    return record(engine, transaction)


StatsEngine.record_transaction = noting
app = Celery("shop")


class Duplicate(Ignore):
    pass


@app.task
def raise_ignore():
    raise Ignore


@app.task
def raise_duplicate():
    raise Duplicate


newrelic.agent.register_application(timeout=60)
states = {task.apply().state for task in (raise_ignore, raise_duplicate)}
print(f"states {', '.join(states)}, errors: {', '.join(errors) or 'none'}")
PYTHON

see() {  # see CLASS...: what counts as an error with these names
  {
    printf '[newrelic]\napp_name = shop\ndeveloper_mode = true\nerror_collector.ignore_classes = %s\n' "$*"
    for where in aws azure azurefunction azureappservice docker gcp kubernetes pcf; do
      echo "utilization.detect_$where = false"  # no request to a cloud
    done
  } > "$folder/newrelic.ini"
  echo "$*: $("$folder/venv/bin/python" -c 'import shop')"
}

cd "$folder"
{
  "$folder/venv/bin/python" -c 'import celery, newrelic
print("celery", celery.__version__, "newrelic", newrelic.version)'
  see celery.exceptions:Ignore
  see celery.exceptions:Ignore shop:Duplicate
  see celery.exceptions:TaskPredicate
  see builtins:Exception
} > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
celery 5.7.0 newrelic 14.1.0
celery.exceptions:Ignore: states IGNORED, errors: shop:Duplicate
celery.exceptions:Ignore shop:Duplicate: states IGNORED, errors: none
celery.exceptions:TaskPredicate: states IGNORED, errors: celery.exceptions:Ignore, shop:Duplicate
builtins:Exception: states IGNORED, errors: celery.exceptions:Ignore, shop:Duplicate
SEEN
