# `make serve` and `make test` are the two commands; everything else is a part of them.
PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8000
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# cpu or gpu: which build of vLLM `make install-vllm` installs.
VLLM   ?= cpu
VLLM_VENV  := $(VENV)-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed-$(VLLM)
export PYTHONDONTWRITEBYTECODE=1
export OMP_NUM_THREADS ?= 1

# One process of tests for each core, but no more than eight, because each imports torch.
PARALLEL := -n logical --maxprocesses=8

.PHONY: install install-vllm vllm serve test quick lint types small unit property contract parity e2e fault gpu chart chart-files naive api-fuzz docs docs-serve tables dashboards dashboard-pictures prometheus prometheus-if-there-is chromium chromium-if-there-is explore coverage house mutants bench clients demo-model demo-speech clean

install: $(STAMP)

# torch first and alone: a range would let pip pick a build with gigabytes of CUDA libraries.
# nixl without its dependencies: the meta package pulls both CUDA builds, nixl-cu12 is enough. It exists for Linux only.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,docs,loadtest]'
	test "$$(uname -s)" != Linux || $(BIN)/python -m pip install -q --no-deps nixl==1.5.1
	touch $(STAMP)

# The environment of workers with vLLM, which pins other versions of transformers, fastapi and llguidance than Weft. torch
# comes first, with what its build needs; the list of the rest is complete, so nothing is resolved.
install-vllm: $(VLLM_STAMP)

$(VLLM_STAMP): requirements/vllm-$(VLLM).txt requirements/torchvision_on_cpu.py pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -q torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip install -q --no-deps -r requirements/vllm-$(VLLM).txt
	$(VLLM_VENV)/bin/python -m pip install -q --no-deps -e .
	test $(VLLM) = gpu || $(VLLM_VENV)/bin/python -c "import pathlib, sysconfig; \
	  folder = pathlib.Path(sysconfig.get_path('purelib')); name = 'torchvision_on_cpu'; \
	  (folder / f'{name}.py').write_text(pathlib.Path(f'requirements/{name}.py').read_text()); \
	  (folder / f'{name}.pth').write_text(f'import {name}')"
	touch $(VLLM_STAMP)

serve: install
	$(BIN)/weft serve --port $(PORT)

# gpu goes first: where there is none, all of it is skipped, and the run should not close on that.
test: install lint types docs gpu chart small naive parity e2e fault vllm

# What to run before each commit: about a minute on two cores.
quick: install lint types unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: install
	$(BIN)/mypy

# A module of parity, e2e, fault or vllm stays in one process, because its tests share models or a cluster. Clusters need
# the cores themselves, so at most two processes start them. The modules of e2e come in the order of its conftest: it
# puts those that take longest first. The tests of gpu run alone.
unit property contract: SPREAD = $(PARALLEL) --dist worksteal
parity: SPREAD = $(PARALLEL) --dist loadfile
e2e fault vllm: SPREAD = -n logical --maxprocesses=2 --dist loadfile
e2e: SPREAD += --no-loadscope-reorder

# The dashboards for Grafana, as JSON beside what describes them.
dashboards: install
	$(BIN)/python -m deploy.grafana.write_boards

# The dashboards as pictures in build/dashboards, drawn with Grafana's own components while a cluster is under load. It
# needs npm and Chromium and takes about five minutes, so it is no part of `test`. DRAW may hold options, such as
# DRAW=--made-up.
dashboard-pictures: install | prometheus-if-there-is
	$(BIN)/python tests/dashboards/draw_dashboards.py $(DRAW)

# Prometheus and promtool, for the tests of rules and dashboards, which are skipped without them. Nothing is installed:
# the package of Debian is unpacked below build/.
PROMTOOL := build/prometheus/usr/bin/promtool
prometheus: $(PROMTOOL)
$(PROMTOOL):
	mkdir -p build/prometheus
	cd build/prometheus && (apt-get download -q prometheus || (apt-get update -q && apt-get download -q prometheus)) \
	  && dpkg -x prometheus_*.deb .

# Chromium, for the tests of pages, which are skipped without it. A machine that has one keeps using that.
CHROMIUM := build/chromium/usr/lib/chromium/chromium
chromium: $(CHROMIUM)
$(CHROMIUM):
	sh tests/rigs/get_chromium.sh build/chromium

e2e: | chromium-if-there-is
chromium-if-there-is:
	@test -n "$$WEFT_CHROMIUM" || command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	  test -x $(CHROMIUM) || ! command -v apt-get >/dev/null || \
	  $(MAKE) --no-print-directory -s chromium || echo "Chromium can't be had; the tests of pages are skipped"

unit small e2e: | prometheus-if-there-is
prometheus-if-there-is:
	@command -v promtool >/dev/null || test -x $(PROMTOOL) || ! command -v apt-get >/dev/null || \
	  $(MAKE) --no-print-directory -s prometheus || echo "promtool can't be had; the tests of rules are skipped"

# The chart with Helm 3 and 4: it renders, Kubernetes would take it, and the cluster of its manifests could work.
chart: install
	$(BIN)/python -m pytest tests/chart -q -n logical --maxprocesses=2

# Writes the files of the chart that are made from others, such as the schema of its values.
chart-files: install
	$(BIN)/python tests/chart/chart_files.py

unit property contract parity e2e fault: install
	$(BIN)/python -m pytest tests/$@ -q $(SPREAD)

# Everything that needs a GPU, in Weft's environment and, after `make install-vllm VLLM=gpu`, in that of vLLM. The report
# in build/gpu-report.md is for an issue (docs/gpu.md). Without a GPU all tests are skipped.
gpu: install
	$(BIN)/python -m pytest tests/gpu -q; status=$$?; \
	if test -e $(VLLM_VENV)/.installed-gpu; then \
	  $(VLLM_VENV)/bin/python -m pytest tests/gpu/test_gpu_vllm.py -q || status=1; fi; exit $$status

# vLLM as a worker's engine, on this CPU: the contract of workers, answers equal to transformers', and a real cluster.
vllm: install install-vllm
	$(VLLM_VENV)/bin/python -m pytest tests/vllm -q $(SPREAD)
	$(BIN)/python -m pytest tests/vllm_cluster -q $(SPREAD)

# All unit, property and contract tests in one run, so that each process imports torch once.
small: install
	$(BIN)/python -m pytest tests/unit tests/property tests/contract -q $(PARALLEL) --dist worksteal

# Each test of an attack must fail on a naive implementation, which stands in the place of Weft's guard meanwhile.
naive: install
	$(BIN)/python -m pytest tests/naive -q $(PARALLEL)

# All phases of schemathesis on the OpenAPI document, with many more generated requests than in `make test`.
api-fuzz: install
	WEFT_FUZZ_EXAMPLES=200 $(BIN)/python -m pytest tests/contract/test_api_fuzz.py -q -n 2

# The documentation site, in build/site. A link to nothing, or a page that loads anything from another host, is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The table of metrics in docs/metrics.md, from the code.
tables: install
	$(BIN)/python docs/hooks/write_tables.py

# The same site with its search, built again whenever a page changes.
docs-serve: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

# Properties on new random examples: a failure prints how to repeat it.
explore: install
	$(BIN)/python -m pytest tests/property tests/parity -q $(PARALLEL) --dist loadfile --hypothesis-profile=explore

# Which lines and branches of the product unit, property and contract tests run, except in processes that tests start.
# The report with the source is build/coverage/html/index.html.
coverage: install
	$(BIN)/python -m pytest tests/unit tests/property tests/contract -q $(PARALLEL) --dist worksteal --cov --cov-report=term --cov-report=html

# How easily the source reads: file counts, files that one request enters, names used twice, fragments in docstrings.
house: install
	$(BIN)/python tests/house/house.py

# Hours of processor time, so no part of `test`. Interrupted, it goes on where it stopped.
mutants: install
	$(BIN)/python tests/mutation/campaign.py

# Other projects' clients and load generators against the demo model, with the versions of tests/clients/requirements.
# It installs them into build/clients once, about 7 GB, so it is no part of `test`.
clients: install
	$(BIN)/python tests/clients/run_clients.py

bench: install
	$(BIN)/weft bench all

# The shipped thinker from nothing, on two cores. The checkpoint then has no voice; `demo-speech` adds one.
demo-model: install
	$(BIN)/python -m deploy.demo.train deploy/demo/checkpoint
	$(BIN)/python -m deploy.demo.evaluate --report deploy/demo/REPORT.md

# The demo's voice from nothing, within an hour on two cores: the thinker of the shipped checkpoint stays as it is. It
# needs espeak-ng.
demo-speech: install
	$(BIN)/python -m deploy.demo.speech.prepare build/speech-data
	$(BIN)/python -m deploy.demo.speech.train_voice build/speech-data deploy/demo/checkpoint
	$(BIN)/python -m deploy.demo.speech.evaluate_voice build/speech-data --report deploy/demo/REPORT.md

clean:
	rm -rf $(VENV) $(VLLM_VENV) build mutants *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
