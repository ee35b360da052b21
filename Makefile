# Each target but benchmarks does all of its own set-up; plain Python commands stand behind them.
PYTHON ?= python3

SECONDS ?= 600
QUICK ?=
PYTHONS ?=
NAMES ?=

.PHONY: shop test test-all pythons docs night neighbours benchmarks release-check clean

shop:  ## the example: a shop without and with the lock
	$(PYTHON) -m example_worker

test:  ## lint, types, and the tests that show most for their time
	$(PYTHON) -m tests

test-all:  ## every test but the storm, on all stores, and the pages
	$(PYTHON) -m tests --all

pythons:  ## what depends on the interpreter, on each of PYTHONS='...' or those that PATH has
	$(PYTHON) -m tests.pythons $(PYTHONS)

docs:  ## the site, in build/site
	$(PYTHON) -m docs

night:  ## with new seeds: all mutants; the simulator and the storm, SECONDS (600) each
	$(PYTHON) -m tests.mutants
	$(PYTHON) -m tests.simulation --seconds $(SECONDS)
	$(PYTHON) -m tests.integration.storm --seconds $(SECONDS)

neighbours:  ## other software beside the package, NAMES='rabbitmq sqs' or all: their rows and page
	$(PYTHON) -m neighbours $(NAMES)

benchmarks:  ## what a lock costs, with celery_redlock[benchmarks] installed; QUICK=--quick for a look
	$(PYTHON) -m benchmarks.pair $(QUICK)
	$(PYTHON) -m benchmarks.task $(QUICK)
	$(PYTHON) -m benchmarks.refused $(QUICK)
	$(PYTHON) -m benchmarks.memory $(QUICK)
	$(PYTHON) -m benchmarks.renewals $(QUICK)
	$(PYTHON) -m benchmarks.gil $(QUICK)
	$(PYTHON) -m benchmarks.send $(QUICK)
	$(PYTHON) -m benchmarks.handoff $(QUICK)
	$(PYTHON) -m benchmarks.crowd $(QUICK)
	$(PYTHON) -m benchmarks.workers $(QUICK)
	$(PYTHON) -m benchmarks.tens $(QUICK)
	$(PYTHON) -m benchmarks.rate $(QUICK)
	$(PYTHON) -m benchmarks.recovery $(QUICK)
	$(PYTHON) -m benchmarks.postgres $(QUICK)
	$(PYTHON) -m benchmarks.comparison $(QUICK)

release-check:  ## what a release needs and no account has to do; QUICK=--quick leaves out the hours
	$(PYTHON) -m tests.release_check $(QUICK)

clean:  ## what the commands above made
	rm -rf .venv build .mypy_cache .pytest_cache .ruff_cache .hypothesis
