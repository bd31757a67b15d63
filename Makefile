# A fresh clone needs python3 (3.11 or newer) and this file; every target sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# The plugins by name: found by themselves, pytest would rewrite the assertions of what comes with one, all of dtensor. Nothing logs.
PLUGINS := --disable-plugin-autoload -p xdist -p hypothesispytest -p dtensor.debug.pytest_plugin -p no:logging
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PLUGINS)
PARALLEL ?= -n 2 --dist worksteal

.PHONY: wheel site demo demo-4 test test-4 test-chaos test-hf test-all check lint format types stubs layers docs bench profile clean

demo: $(VENV)/.test
	$(BIN)/python docs/examples/train_gpt.py

demo-4: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4 docs/examples/train_gpt.py

test: $(VENV)/.test
	$(PYTEST) -m "not gloo and not slow" $(PARALLEL)

test-4: $(VENV)/.test
	$(PYTEST) -m gloo

test-chaos: $(VENV)/.test
	DTENSOR_CHAOS=1 $(PYTEST) tests/divergence

test-hf: $(VENV)/.hf
	HF_HUB_OFFLINE=1 $(PYTEST) tests/hf $(PARALLEL)

test-all: $(VENV)/.test
	$(PYTEST) -m "not gloo" $(PARALLEL)
	$(PYTEST) -m gloo

check: lint types layers
	$(MAKE) test

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(VENV)/.dev
	$(BIN)/mypy
	$(PYTEST) -q tests/unit/test_typing.py

# The types of the methods of a DTensor, from those of the installed torch
stubs: $(VENV)/.dev
	$(BIN)/python tests/support/tensor_methods_stub.py > dtensor/base/.stub.pyi && mv dtensor/base/.stub.pyi dtensor/base/tensor_methods.pyi
	$(BIN)/ruff format --quiet dtensor/base/tensor_methods.pyi

layers: $(VENV)/.test
	$(PYTEST) -q -s tests/unit/test_layers.py

docs: $(VENV)/.test
	$(BIN)/python tests/support/ops_page.py > docs/.ops.md && mv docs/.ops.md docs/ops.md
	$(PYTEST) -q tests/unit/test_docs.py tests/rules/test_ops_page.py

# The documentation as a site, build/site; to look at it: python3 -m http.server -d build/site
site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	$(PYTEST) -q tests/unit/test_site.py

bench: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/dispatch.py

profile: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/dispatch_parts.py

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

# The wheel and the sdist, each installed into a fresh environment of every Python that is here, and tried outside of the repository.
PYTHONS ?= $(or $(wildcard $(HOME)/.pyenv/versions/3.1[1-9].*/bin/python),$(PYTHON))
wheel: $(VENV)/.dev
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m build --outdir build/wheel .
	$(BIN)/python tests/support/try_wheel.py build/wheel constraints.txt $(PYTHONS)

# Stamps: installed once, and again when what is to be installed changes.
$(VENV)/.test: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[test]'
	touch $@

$(VENV)/.hf: $(VENV)/.test
	$(INSTALL) -e '.[test,hf]'
	touch $@

$(VENV)/.docs: $(VENV)/.test
	$(INSTALL) -e '.[test,docs]'
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(INSTALL) -e '.[test,dev]'
	touch $@
