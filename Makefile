# Each target but benchmarks does all of its own set-up; plain Python commands stand behind them.
PYTHON ?= python3

SECONDS ?= 600
QUICK ?=

.PHONY: shop test docs soak benchmarks clean

shop:  ## the example: a shop without and with the lock
	$(PYTHON) -m example_worker

test:  ## lint, types and all tests
	$(PYTHON) -m tests

docs:  ## the site, in build/site
	$(PYTHON) -m docs

soak:  ## the simulator and the storm, SECONDS (600) each
	$(PYTHON) -m tests.simulation --seconds $(SECONDS)
	$(PYTHON) -m tests.integration.storm --seconds $(SECONDS)

benchmarks:  ## what a lock costs, with celery_redlock[benchmarks] installed; QUICK=--quick for a look
	$(PYTHON) -m benchmarks.pair $(QUICK)
	$(PYTHON) -m benchmarks.task $(QUICK)
	$(PYTHON) -m benchmarks.renewals $(QUICK)
	$(PYTHON) -m benchmarks.send $(QUICK)
	$(PYTHON) -m benchmarks.handoff $(QUICK)
	$(PYTHON) -m benchmarks.crowd $(QUICK)

clean:  ## what the commands above made
	rm -rf .venv build .mypy_cache .pytest_cache .ruff_cache .hypothesis
