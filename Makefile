# `make serve` and `make test` are the two commands; everything else is a part of them.
PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8000
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PURE   := fabric kv_index llm_workers/scheduling encoder_pool/planning router/planning modalities/text
export PYTHONDONTWRITEBYTECODE=1
export OMP_NUM_THREADS ?= 1

.PHONY: install serve test quick lint types unit property contract parity e2e fault gpu docs docs-serve explore house mutants bench demo-model clean

install: $(STAMP)

# torch first and alone: a range would let pip pick a build with gigabytes of CUDA libraries.
# nixl without its dependencies: the meta package pulls both CUDA builds, nixl-cu12 is enough. It exists for Linux only.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,docs,loadtest]'
	test "$$(uname -s)" != Linux || $(BIN)/python -m pip install -q --no-deps nixl==1.5.1
	touch $(STAMP)

serve: install
	$(BIN)/weft serve --port $(PORT)

# gpu goes first: where there is none, all of it is skipped, and the run should not close on that.
test: install lint types docs gpu unit property contract parity e2e fault

# What to run before each commit: a minute and a half.
quick: install lint types unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: install
	$(BIN)/mypy $(PURE)

unit property contract parity e2e fault gpu: install
	$(BIN)/python -m pytest tests/$@ -q

# The documentation site, in build/site. A link to nothing, or a page that loads anything from another host, is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The same site with its search, built again whenever a page changes.
docs-serve: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

# Properties on new random examples: a failure prints how to repeat it.
explore: install
	$(BIN)/python -m pytest tests/property tests/parity -q --hypothesis-profile=explore

# How easily the source reads: file counts, files that one request enters, names used twice, fragments in docstrings.
house: install
	$(BIN)/python tests/house/house.py

# Hours of processor time, so no part of `test`. Interrupted, it goes on where it stopped.
mutants: install
	$(BIN)/python tests/mutation/campaign.py

bench: install
	$(BIN)/weft bench all

# The shipped checkpoint from nothing, on two cores.
demo-model: install
	$(BIN)/python -m deploy.demo.train deploy/demo/checkpoint
	$(BIN)/python -m deploy.demo.evaluate --report deploy/demo/REPORT.md

clean:
	rm -rf $(VENV) build mutants *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
