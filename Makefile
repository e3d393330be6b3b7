# make demo    fresh machine: environment, train on the shipped sample, evaluate four splits -> runs/demo
# make test    fresh machine: environment, all tests
# make gpu     numerical results and exact resuming on a GPU: runs/gpu/gpu.md
# make fuzz    read thousands of damaged files
# make docs    build the documentation as a site: docs/_build/html/index.html
# make bench NAME=decoding    run a benchmark: docs/results/decoding.csv and .png, and its block of docs/results/*.md
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RUN    ?= runs/demo
INPUTS ?= 1000
QUICK  := tests/test_architecture.py tests/attention/test_layer.py tests/attention/test_encodings.py \
          tests/graph/test_messages.py tests/sequence/test_encoder.py tests/data/test_records.py
SPLITS := val_id val_ood_ads val_ood_cat val_ood_both

.DEFAULT_GOAL := help
.PHONY: help env check demo bench gpu fuzz test quick docs lint types format dist clean

help:
	@echo "make demo    train on the shipped sample and evaluate the four splits in $(RUN)"
	@echo "make bench   list the benchmarks; NAME=decoding runs one, ARGS passes further options"
	@echo "make gpu     compare numerical results and exact resuming on a GPU with the CPU"
	@echo "make fuzz    check that INPUTS damaged files of each format are read correctly or rejected"
	@echo "make test    run all tests"
	@echo "make quick   run some of the tests, in about a minute"
	@echo "make docs    build the documentation site, docs/_build/html/index.html; fails on broken links"
	@echo "make lint    run ruff check and ruff format --check"
	@echo "make types   run mypy"
	@echo "make check   check that the installed packages are compatible"
	@echo "make format  format all files with ruff"
	@echo "make dist    build sdist and wheel in dist"
	@echo "make env     create only the environment, $(VENV)"
	@echo "make clean   remove $(VENV) and caches (runs/ is kept)"

env: $(VENV)/.molflt

# The stamp files make the setup run once, and again only when its inputs have changed. Without
# --no-compile, pip would compile 23,000 files, most of which are never imported.
$(VENV)/.molflt: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "molflt needs Python >= 3.11; $(PYTHON) is " + sys.version.split()[0] + "; use make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e .
	@touch $@

$(VENV)/.molflt-dev: $(VENV)/.molflt
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[dev]"
	@touch $@

check: $(VENV)/.molflt-dev
	$(BIN)/python -m pip check

# An interrupted demo is resumed, and a finished demo is only evaluated again. If configs/demo.yaml
# has changed since then, the old run is renamed, because it can be resumed only without changes.
demo: $(VENV)/.molflt
	@if [ -e $(RUN)/config.yaml ] && [ configs/demo.yaml -nt $(RUN)/config.yaml ]; then \
	    old=$(RUN).$$(date +%Y%m%d-%H%M%S); mv $(RUN) $$old; \
	    echo "configs/demo.yaml is newer than $(RUN), which is now $$old"; fi
	@if [ -e $(RUN)/checkpoints/last.ckpt ]; then \
	    $(BIN)/molflt train --resume $(RUN); \
	else \
	    $(BIN)/molflt train --config configs/demo.yaml --run $(RUN); fi
	$(BIN)/molflt evaluate $(RUN) --splits $(SPLITS)
	$(BIN)/molflt report $(RUN)

# Without NAME, lists the benchmarks. ARGS="--out runs/bench" does not change the documentation.
bench: $(VENV)/.molflt-dev
	@OMP_NUM_THREADS=1 $(BIN)/python scripts/run.py $(NAME) $(ARGS)

gpu: $(VENV)/.molflt-dev
	$(BIN)/python scripts/gpu.py $(ARGS)

fuzz: $(VENV)/.molflt-dev
	MOLFLT_FUZZ=$(INPUTS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/data/test_damaged_files.py

test: $(VENV)/.molflt-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

quick: $(VENV)/.molflt-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(QUICK)

# The source folder is the repository; docs/conf.py lists the pages. -W turns warnings, such as those
# about broken links, into errors; -E also checks pages that have not changed.
docs: $(VENV)/.molflt-dev
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -q -E -W --keep-going -n -c docs . docs/_build/html
	@echo "docs/_build/html/index.html"

lint: $(VENV)/.molflt-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.molflt-dev
	$(BIN)/mypy

format: $(VENV)/.molflt-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dist: $(VENV)/.molflt-dev
	$(BIN)/hatchling build -d dist

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
