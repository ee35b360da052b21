"""Mutants of settings and their lints, of the command line, and of metrics."""

from __future__ import annotations

from tests.mutants.mutant import CONTRACT, INTEGRATION, UNIT, Mutant

MUTANTS = (
    Mutant(
        "a worker leaves its folder of metrics behind",
        "operate.metrics.exporter:Exporter.__init__",
        "            self._stack.callback(shutil.rmtree, directory, ignore_errors=True)\n",
        "",
        (
            f"{INTEGRATION}/test_killed_child.py::"
            "test_children_that_come_and_go_leave_nothing_behind",
        ),
    ),
    Mutant(
        "another lock of the running task stands on its span as the run's own",
        "operate.tracing:_is_own",
        "bool(run.lock.resource == resource)",
        "True",
        (
            f"{INTEGRATION}/test_spans.py::"
            "test_a_lock_that_is_not_the_runs_own_is_an_event_on_its_span",
        ),
    ),
    Mutant(
        "a worker that imports OpenTelemetry late writes to no span",
        "operate.tracing:connect_at_first_run",
        "    connect_if_recording()\n",
        "",
        (
            f"{UNIT}/test_tracing.py::test_signals_have_receivers_once_spans_may_be_recorded",
            f"{INTEGRATION}/test_spans.py::"
            "test_a_worker_may_import_opentelemetry_after_its_app_has_finalized",
        ),
    ),
    Mutant(
        "a second locked task connects all of it again",
        "wiring:connect",
        "if _connected:",
        "if False:",
        (f"{UNIT}/test_wiring.py",),
    ),
    Mutant(
        "an option of a lock without its base is taken for nothing",
        "tasks.startup:AdoptingRegistry.check",
        "            self._check_unlocked(name, task)\n",
        "",
        (
            f"{UNIT}/test_finalize.py::"
            "test_a_task_with_a_locks_options_and_without_its_base_is_refused",
        ),
    ),
    Mutant(
        "a task that is wrong leaves its app with only some of its tasks",
        "tasks.task:LockedTask.on_bound",
        "if per_app.is_checked(app) and cls.name:",
        "if app.finalized and cls.name:",
        (f"{UNIT}/test_finalize.py::test_an_app_is_whole_when_it_has_finalized",),
    ),
    Mutant(
        "break --permit breaks all permits",
        "operate.cli.actions:break_",
        "if permit in (None, lock.permit) and lock.value",
        "if lock.value",
        (
            f"{INTEGRATION}/test_command.py::"
            "test_breaking_a_permit_leaves_the_others_to_their_holders",
        ),
    ),
    Mutant(
        "break ends with 0 though no quorum was told",
        "operate.cli.actions:break_",
        "if any(one.failing and len(one.gone_from) < one.lock.needed for one in broken):",
        "if False:",
        (
            f"{INTEGRATION}/test_command.py::"
            "test_an_order_that_no_quorum_of_nodes_took_ends_with_a_status_of_its_own",
        ),
    ),
    Mutant(
        "trust ends with 0 though a node could not be told",
        "operate.cli.actions:trust",
        "    if failing:\n        ctx.exit(1)",
        "    if False:\n        ctx.exit(1)",
        (
            f"{INTEGRATION}/test_command.py::"
            "test_an_order_that_no_quorum_of_nodes_took_ends_with_a_status_of_its_own",
        ),
    ),
    Mutant(
        "one task that cannot be meant ends the lints of all others",
        "operate.lints:_all",
        "error.value, hint)\n",
        "error.value, hint)\n            return\n",
        (f"{UNIT}/test_lints.py::test_a_task_that_cannot_be_meant_leaves_other_tasks_their_lints",),
    ),
    Mutant(
        "a release by a parent is not shown as 0",
        "operate.metrics.counters:Metrics.initialize",
        'for by in ("holder", "parent"):',
        'for by in ("holder",):',
        (f"{INTEGRATION}/test_metrics.py::test_what_is_rare_is_0_before_it_comes",),
    ),
    Mutant(
        "the app's and the queues' unique_for do nothing",
        "tasks.settings.task_config:TaskLockConfig.may_be_unique",
        "levels = (self.app.options, *self.app.queues.values(), self.options)",
        "levels = (self.options,)",
        (
            f"{CONTRACT}/test_unique.py::"
            "test_a_window_that_the_app_or_the_queue_asks_for_is_a_window",
        ),
    ),
    Mutant(
        "a key of the app that a task cannot fill is found at each run",
        "tasks.settings.task_config:_check_config",
        'keys.check({"key": None, **app.options}, partial(OptionSource.at, "app"))',
        "pass",
        (
            f"{UNIT}/test_settings.py::"
            "test_a_template_of_the_app_that_a_task_cannot_fill_is_an_error_at_the_start",
        ),
    ),
    Mutant(
        "a farther level's key stays in force beside a nearer level's args",
        "tasks.settings.levels:merged",
        "            result.update(dict.fromkeys(KEY_OPTIONS))\n",
        "            pass\n",
        (f"{UNIT}/test_args.py::TestOfTwoLevelsTheNearerDecidesBoth",),
    ),
    Mutant(
        "a task that may run once at a time runs once for each of its arguments",
        "tasks.settings.keys:TaskKeys._own_resource",
        "        if options.args is None:\n",
        "        if not options.args:\n",
        (
            f"{UNIT}/test_args.py::TestOneResource::"
            "test_is_one_for_all_arguments_where_none_is_named",
            f"{INTEGRATION}/test_rules.py::test_no_named_argument_is_one_run_at_a_time",
        ),
    ),
    Mutant(
        "the same argument names in another order are another lock",
        "tasks.settings.keys:TaskKeys._own_resource",
        "{name: value for name, value in arguments.items() if name in options.args}",
        "{name: arguments[name] for name in options.args if name in arguments}",
        (
            f"{UNIT}/test_args.py::TestOneResource::"
            "test_does_not_depend_on_the_order_of_the_names_or_on_a_repetition",
        ),
    ),
    Mutant(
        "a worker with the eventlet pool starts locked tasks",
        "tasks.startup:RefuseToStart.__init__",
        "if is_of_eventlet(worker.pool_cls):",
        "if False:",
        (f"{INTEGRATION}/test_eventlet.py::test_a_worker_with_locked_tasks_refuses_to_start",),
    ),
    Mutant(
        "locks are taken in a process that eventlet has patched",
        "lock.client:Redlock.__init__",
        "if is_patched_by_eventlet():",
        "if False:",
        (
            f"{INTEGRATION}/test_eventlet.py::"
            "test_a_redlock_is_refused_in_a_process_that_eventlet_has_patched",
        ),
    ),
    Mutant(
        "an option of a call does not go before its task's",
        "tasks.settings.task_config:TaskLockConfig._merge",
        "whole = merged(inherited, call)",
        "whole = merged(call, inherited)",
        (f"{UNIT}/test_settings.py",),
        "nearer_level",
    ),
    Mutant(
        "a misspelled setting does nothing and is not told",
        "tasks.settings.levels:check_known_names",
        'if name.startswith("redlock_") and name not in known:',
        "if False:",
        (f"{UNIT}/test_settings.py",),
        "an_unknown_setting",
    ),
    Mutant(
        "a ttl longer than a restarted node's silence is taken",
        "lock.validation:check_ttl",
        "if seconds > max_ttl:",
        "if False:",
        (f"{UNIT}/test_settings.py",),
        "a_wrong_value",
    ),
    Mutant(
        "a ttl that leaves no time to renew it is taken",
        "lock.validation:check_ttl",
        "if seconds < ROUNDS_IN_TTL * node_timeout:",
        "if False:",
        (f"{UNIT}/test_settings.py",),
        "a_wrong_value",
    ),
    Mutant(
        "a server that is named twice votes twice",
        "lock.validation:check_nodes",
        "if address.server in seen:",
        "if False:",
        (f"{UNIT}/test_settings.py",),
        "named_twice",
    ),
    Mutant(
        "holders side by side get fencing tokens, which have no order",
        "lock.validation:check_permits",
        "if permits > 1 and fencing:",
        "if False:",
        (f"{UNIT}/test_settings.py",),
    ),
    Mutant(
        "all calls without a value for their key share one lock",
        "tasks.settings.templates:Field.fill",
        "if value is None:",
        "if False:",
        (f"{UNIT}/test_settings.py",),
        "none_in_a_template",
    ),
)
