# Each target does all of its own set-up; plain Python commands stand behind them.
PYTHON ?= python3

SECONDS ?= 600

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

benchmarks:  ## cost of a lock and of a locked task, as ratios from one run
	$(PYTHON) -m benchmarks.pair
	$(PYTHON) -m benchmarks.task
	$(PYTHON) -m benchmarks.renewals

clean:  ## what the commands above made
	rm -rf .venv build .mypy_cache .pytest_cache .ruff_cache .hypothesis
