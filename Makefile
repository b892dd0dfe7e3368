# Every target sets up what it needs; the first run downloads about 1 GB.
#
#   make demo            a chat on two real vLLM engines whose KV travels both ways
#   make test            the tests, the ones on real engines last; make test-slow has the long ones
#   make check           lint, types and house rules
#   make bench           all benchmarks; make bench-host and so on for one
#   make conformance-efa the efa backend under the suite, emulated; needs root
#   make help            this
#
# Variables:
#   PYTHON     the interpreter that virtual environments are made with (3.11)
#   PIP_ARGS   extra arguments for every "pip install", such as an index of torch's CPU builds
#   BACKEND    the demo's backend: host (default) or cuda
#   ARGS       extra arguments for pytest, the demo or the benchmarks

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP_ARGS ?=
BACKEND ?= host
ARGS ?=
export KVTRANSPORT_CACHE ?= $(CURDIR)/.cache

SETUP := $(PYTHON) tools/setup_venv.py
# The environment's own programs first: redis-server is one of them.
PYTEST := PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python -m pytest

BENCHES := $(patsubst benchmarks/bench_%.py,bench-%,$(wildcard benchmarks/bench_*.py))

.DELETE_ON_ERROR:
.PHONY: help setup demo test test-fast test-slow test-engines test-oldest check format bench $(BENCHES) conformance-efa lock clean

help:
	@sed -n '/^# Every/,/^$$/s/^# \{0,1\}//p' Makefile

setup: .venv/.ready

demo: .venv/.ready
	.venv/bin/python examples/demo --backend $(BACKEND) --pip-args='$(PIP_ARGS)' $(ARGS)

test: test-fast test-engines

test-fast: .venv/.ready
	$(PYTEST) -m "not engines and not slow" $(ARGS)

# What takes longer than a change should wait for: all saboteurs of the conformance suite.
test-slow: .venv/.ready
	$(PYTEST) -m slow $(ARGS)

test-engines: .venv/.ready .venv-vllm-router/.ready
	$(PYTEST) -m engines $(ARGS)

# The oldest vLLM that we support, on the adapter's tests only.
test-oldest: .venv-oldest/.ready .venv-vllm-router/.ready
	.venv-oldest/bin/python -m pytest tests/adapter tests/engines $(ARGS)

check: .venv-check/.ready
	.venv-check/bin/ruff format --check .
	.venv-check/bin/ruff check .
	.venv-check/bin/mypy
	MYPYPATH=src:examples/demo .venv-check/bin/mypy examples/demo/*.py tools/*.py
	.venv-check/bin/python tools/sizes.py

format: .venv-check/.ready
	.venv-check/bin/ruff format .
	.venv-check/bin/ruff check --fix .

# All benchmarks one after the other, or one of them: make bench-host, make bench-turns, ...
bench: $(BENCHES)

$(BENCHES): bench-%: .venv/.ready
	.venv/bin/python benchmarks/bench_$*.py $(ARGS)

# The efa backend where there is no EFA (tests/efa_emulation/README.md); needs root and gcc.
EMULATE := tests/efa_emulation/emulate.py
conformance-efa:
	@test "$$(id -u)" = 0 || { echo "make conformance-efa makes network namespaces: run it as root"; exit 1; }
	$(PYTHON) $(EMULATE) prepare
	@for level in 1 2; do \
	  $(PYTHON) $(EMULATE) run --level $$level -- python -m pytest tests/backends/efa || exit 1; \
	  $(PYTHON) $(EMULATE) run --level $$level -- sh -c 'kvt conformance run --backend efa \
	    --profile KVT-BASE,KVT-READ,KVT-FAULT --rounds 1000 --config "$$EFA_EMULATION_CONFIG" \
	    --peer-prefix "$$EFA_EMULATION_PEER_PREFIX" --report out/conformance-efa/level-'$$level || exit 1; \
	done

# Rewrites requirements/*.txt from locks.toml with what the package index has today.
lock: .venv/.ready
	.venv/bin/python tools/lock.py -- $(PIP_ARGS)

clean:
	rm -rf .venv .venv-* .cache build dist out
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.ready: requirements/engines.txt pyproject.toml tools/setup_venv.py
	$(SETUP) .venv --lock requirements/engines.txt --editable --check torch -- $(PIP_ARGS)
	@touch $@

.venv-check/.ready: requirements/check.txt tools/setup_venv.py
	$(SETUP) .venv-check --lock requirements/check.txt -- $(PIP_ARGS)
	@touch $@

.venv-oldest/.ready: requirements/oldest.txt .venv/.ready
	$(SETUP) .venv-oldest --lock requirements/oldest.txt --over .venv --check vllm -- $(PIP_ARGS)
	@touch $@

.venv-vllm-router/.ready: requirements/vllm-router.txt tools/setup_venv.py
	$(SETUP) .venv-vllm-router --lock requirements/vllm-router.txt -- $(PIP_ARGS)
	@touch $@
