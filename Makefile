# On a machine with Python 3.11, git and make two commands are enough: `make demo` and `make test`.
# `.venv` is created when it is missing or out of date. Nothing here needs root: as root, `make test` also installs the
# Debian packages that some tests use; otherwise it lists them, runs the rest, and prints at the end what was not run.

PYTHON ?= python3
RUN := .venv/bin/python
PYTEST := $(RUN) -m pytest -q
# Three workers for two cores: tests wait for servers and processes about half of their time. Tests that share a server
# or count processes are in one xdist group. All Spark tests run in one of them, which starts the one session.
PARALLEL ?= -n 3 --dist loadgroup
CODE := $(wildcard src tests benchmarks examples scripts)
# Tests start thousands of interpreters: without compiled files each of them would compile the modules that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup check lint types imports unit conformance system test everything demo bench bench-setup faults simulate mutants docs format
.PHONY: clean more oldest oldest-part

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

SETUP := pyproject.toml constraints.txt scripts/setup_venv.py
.venv/ready: $(SETUP)
	@$(PYTHON) scripts/setup_venv.py
.venv/light: $(SETUP)
	@$(PYTHON) scripts/setup_venv.py light

setup: .venv/ready  ## Create or update .venv

lint: .venv/ready
	$(RUN) -m ruff check --quiet $(CODE)
	$(RUN) -m ruff format --check --quiet $(CODE)

types: .venv/ready
	$(RUN) -m mypy --strict $(CODE)

imports: .venv/ready
	@.venv/bin/lint-imports --no-logo --no-cache

unit: .venv/ready
	$(PYTEST) $(PARALLEL) tests/unit

conformance: .venv/ready
	$(PYTEST) $(PARALLEL) tests/conformance tests/worker -k "not valkey and not redis and not postgres and not pgbouncer and not cluster"

check: lint types imports unit conformance  ## Lint, types, imports, unit tests, stores and workers on memory and SQLite: some minutes

system: .venv/ready
	@$(RUN) scripts/system_parts.py

# Left to `more`, so that every run stays well under 35 minutes on two cores.
MORE := tests/spark/test_connect.py tests/spark/test_standalone.py tests/spark/test_large_backfill.py
# On an older PostgreSQL, behind a pooler, on Redis 6.2 and on a Cluster most of the conformance suite is left to it too: the
# functions and scripts are the same.
FURTHER_PARTS := (postgres15 or pgbouncer or redis62 or cluster) and test_conformance.py and not (TestClaims or TestPublishing or TestOutcomes)
MORE_STORES := ((postgres15 or pgbouncer or redis62 or cluster) and (async or group)) or ($(FURTHER_PARTS))
MORE_TESTS := tests/fault/test_schedulers.py::test_a_schedule_saved_after_the_standbys_started_is_fired_when_the_leader_is_killed_at_once[postgres-schedulers] \
	tests/fault/test_schedulers.py::test_a_schedule_saved_after_the_standbys_started_is_fired_when_the_leader_is_killed_at_once[postgres-workers] \
	tests/upgrade/test_interrupted_upgrades.py::test_an_undo_that_is_killed_goes_on_when_it_is_run_again \
	tests/upgrade/test_interrupted_upgrades.py::test_a_finish_that_is_killed_goes_on_when_it_is_run_again \
	tests/conformance/test_planted_faults.py::test_a_planted_fault_is_found[ExtendsWithoutToken] \
	tests/conformance/test_planted_faults.py::test_a_planted_fault_is_found[SettlesByState] \
	tests/fault/test_figures.py::test_no_quick_figure_is_short[lake] \
	tests/fault/test_figures.py::test_no_quick_figure_is_short[leases] \
	tests/fault/test_figures.py::test_no_quick_figure_is_short[repeats] \
	tests/fault/test_figures.py::test_no_quick_figure_is_short[schedulers] \
	tests/spark/test_pipeline.py::test_one_id_in_two_queues_or_published_again_is_several_messages_wherever_the_history_is_cut \
	tests/spark/test_object_store.py::test_a_pipeline_does_everything_in_an_object_store \
	tests/spark/test_advise.py::test_planted_problems_are_named_proven_cured_by_their_advice_and_judged \
	tests/spark/test_jobs.py::test_a_worker_goes_on_after_its_java_has_died_and_imports_spark_late \
	tests/spark/test_jobs.py::test_a_cancel_a_timeout_and_a_stop_cancel_the_jobs \
	tests/spark/test_scheduled.py::test_the_worker_command_runs_what_waits_and_serves_the_lag \
	tests/spark/test_backfill.py::test_an_import_against_a_large_history_that_is_killed_again_and_again_publishes_each_new_key_once \
	tests/spark/test_backfill_runs.py::test_a_redrive_that_is_killed_at_any_point_redrives_each_letter_once_and_counts_it \
	tests/spark/test_backfill_runs.py::test_copies_that_are_killed_at_any_point_are_published_once_and_counted \
	tests/upgrade/test_mixed_releases.py::test_two_releases_work_side_by_side[postgres] \
	tests/upgrade/test_side_by_side.py::test_an_upgrade_is_reverted \
	tests/upgrade/test_spark_reader.py::test_spark_reads_the_same_in_both_releases[valkey-postgres] \
	tests/upgrade/test_interrupted_upgrades.py::test_a_migration_that_is_killed_goes_on_when_it_is_run_again
everything: .venv/ready system
	$(PYTEST) $(PARALLEL) tests $(addprefix --ignore ,$(MORE)) $(addprefix --deselect ,$(MORE_TESTS)) -k "not ($(MORE_STORES))"

more: .venv/ready system  ## What `test` leaves out: Spark Connect, a standalone Spark, kills of imports and migrations, two long searches for planted faults, async clients and groups on further servers, four long fault figures, 1,000,000 messages in a browser, Django 6, the wheel on each Python
	$(PYTEST) $(MORE) $(MORE_TESTS)
	WAYPOST_TESTS_LARGE=1 $(PYTEST) tests/web/test_browser_large.py
	$(PYTEST) $(PARALLEL) tests -k "$(MORE_STORES)"
	$(RUN) -m scripts.django6
	$(RUN) -m scripts.package_versions

test: lint types imports everything oldest-part  ## All tests: every store, the fault tests, examples, docs. REQUIRE_ALL=1: a test that cannot run fails

# Installed beside .venv and found before it: only the packages whose versions differ.
.oldest/ready: constraints-oldest.txt .venv/ready
	rm -rf .oldest
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target .oldest --requirement constraints-oldest.txt
	touch $@

OLDEST := PYTHONPATH=.oldest WAYPOST_TESTS_OLDEST=1 $(PYTEST)
OLDEST_TESTS := tests/oldest tests/conformance/test_conformance.py tests/valkey/test_connections.py tests/valkey/test_cluster.py \
	tests/valkey/test_sentinel.py tests/postgres/test_connections.py tests/postgres/test_engines.py tests/outbox
oldest: .oldest/ready  ## The stores and the outbox with the oldest drivers that pyproject.toml allows
	$(OLDEST) $(PARALLEL) $(OLDEST_TESTS) -k "not memory and not sqlite"

# The part that every run includes: about a minute.
oldest-part: .oldest/ready
	$(OLDEST) tests/oldest tests/conformance/test_conformance.py tests/outbox/test_publish_in_transaction.py tests/outbox/test_handler_sessions.py \
		-k "test_handler_sessions or ((TestClaims or TestPublishing or TestOutcomes) and (valkey- or postgres-)) or test_versions or (test_publish_in_transaction and (session or connection))"

docs: .venv/ready  ## Write the reference of the HTTP API; links resolve, the examples in the pages run
	$(RUN) -m scripts.http_reference
	$(PYTEST) tests/unit/test_docs.py

# Works on the light environment while the heavy packages install. Modules are found without pip's help meanwhile.
demo: .venv/light  ## Everything on real servers that it starts, in about two minutes. KEEP=1: they stay up
	@PYTHONPATH=src $(RUN) -m examples.demo

bench-setup: .venv/ready  ## Environments of other queues, to compare with: some minutes, once
	$(RUN) -m benchmarks.peers.setup

bench: .venv/ready  ## Benchmarks: the core, the worker, latency and timers, and other queues that are set up
	$(RUN) -m benchmarks.core --quick
	$(RUN) -m benchmarks.publish --quick
	$(RUN) -m benchmarks.groups --quick
	$(RUN) -m benchmarks.worker --quick
	$(RUN) -m benchmarks.latency --quick
	$(RUN) -m benchmarks.timers --quick
	$(RUN) -m benchmarks.outbox_like --quick
	$(RUN) -m benchmarks.outbox --quick
	$(RUN) -m benchmarks.bloat --quick
	$(RUN) -m benchmarks.soak --quick
	$(RUN) -m benchmarks.spark --quick
	$(RUN) -m benchmarks.metrics_and_traces --quick
	$(RUN) -m benchmarks.web --quick
	$(RUN) -m benchmarks.faststream --quick

faults: .venv/ready  ## Fault figures: what survives which fault. QUICK=1: a smaller run
	$(RUN) -m tests.fault.figures $(if $(QUICK),--quick)
	$(RUN) -m tests.upgrade.large_migration $(if $(QUICK),--messages 100000 --rate 200 --seconds 10)

# SEED alone: one scenario, with its story if something is wrong. Otherwise drawn scenarios for so many simulated HOURS.
simulate: .venv/ready  ## Simulator: clients and workers on a virtual clock, with drawn faults. SEED=7 HOURS=50 PLANTED=1 STORE=sqlite
	@$(RUN) -m tests.simulator $(if $(SEED),--seed $(SEED)) $(if $(HOURS),--hours $(HOURS)) $(if $(PLANTED),--planted) $(if $(STORE),--store $(STORE))

mutants: .venv/ready  ## Mutation tests: which one-token changes does no test detect? SAMPLE=50 of each folder SEED=1 FILES='*' RESULTS=file
	$(RUN) scripts/mutants.py --guards --sample $(or $(SAMPLE),50) --seed $(or $(SEED),1) --files '$(or $(FILES),*)' $(if $(RESULTS),--results $(RESULTS))

format: .venv/ready
	$(RUN) -m ruff check --quiet --fix $(CODE)
	$(RUN) -m ruff format --quiet $(CODE)

clean:  ## Remove everything that make created
	rm -rf .venv .oldest .django6 .bench .demo .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
