# Two commands: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
# Compiling all 24,000 files would take a minute; Python compiles the fifth that it imports, and is to
# keep that: images of containers often forbid it, and then each process compiles torch again.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# What the demo needs, and all there is.
DEMO := .venv/demo
INSTALLED := .venv/installed
# An independent library that the tests compare with; its own requirements would pull in torchvision.
ORACLES := curvlinops-for-pytorch einconv linear-operator backpack-for-pytorch

.PHONY: demo test unit test-kernels test-browser test-engines check docs results-pages release fix clean

demo: $(DEMO)
	$(BIN)/decaylab demo

test: $(INSTALLED)
	$(MAKE) --jobs=2 check unit

unit: $(INSTALLED)
	$(BIN)/python -m pytest -q -n auto --dist worksteal

# CUDA kernels in Triton's interpreter, on the CPU. Beside the environment: nothing else is to find Triton.
test-kernels: .venv/triton
	OMP_NUM_THREADS=1 PYTHONPATH=.venv/triton $(BIN)/python -m pytest -q tests/curvature/test_kernels.py

# Needs Chromium (Debian: apt-get install chromium).
test-browser: $(INSTALLED)
	$(BIN)/python -m pytest -q -m browser tests/browser

# Sweeps on a real Slurm (needs root; Debian: apt-get install slurm-wlm) and a local Ray cluster; training under torchrun.
test-engines: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "slurm or ray or torchrun" tests/sweeps tests/training tests/attribution tests/docs

check: $(INSTALLED) docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# site/index.html; its numbers and figures are read from results/. `mkdocs serve` shows it while writing.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# What pages say of results, anew from results/ (the tests fail where it is out of date).
results-pages: $(INSTALLED)
	PYTHONPATH=docs $(BIN)/python -m results_pages README.md docs/reproduction.md docs/report.md results/README.md
	$(BIN)/python docs/from_records.py
	$(BIN)/python docs/picture.py
	$(BIN)/python docs/first_verdict.py

# dist/: the sdist and the wheel, checked.
release: $(INSTALLED)
	$(PIP) --group release
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

fix: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(DEMO): pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e '.[report]'
	touch $(DEMO)

$(INSTALLED): $(DEMO)
	$(PIP) 'pip>=25.1'  # the first that knows dependency groups
	$(PIP) -e '.[all]' --group dev
	$(PIP) --no-deps $(ORACLES)
	touch $(INSTALLED)

.venv/triton: $(INSTALLED)
	$(PIP) --no-deps --target .venv/triton triton
	touch .venv/triton

clean:
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache
