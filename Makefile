# The README's commands. Each makes the virtual environment when there is none.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Three tests at a time, even on two cores, as many wait for the processes that they start.
WORKERS ?= 3
# Each process that a test starts would compile our modules anew if it could not keep them.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal --durations 10

.PHONY: coverage demo docs format gpu gpu-compile test test-slow test-torchrec ways

# AdamW, Coupled Adam and LEAN on real text; run it again to see the finished result again.
demo: $(VENV)/demo
	$(BIN)/coupled-adam compare --resume
	@echo "Here the command is $(BIN)/coupled-adam; after 'source $(BIN)/activate' it is coupled-adam."

# Every check before a change lands: format, lint, types, and all tests that do not take long.
test: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -m "not slow"

# Rewrites what `make test` would refuse of the format, and of the style what can be mended so.
format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# How much of the package the quick tests run, line by line; processes that they start do not count.
coverage: $(VENV)/installed
	$(PIP) --constraint constraints.txt pytest-cov
	$(PYTEST) -m "not slow" --cov coupled_adam --cov-report term:skip-covered

# What takes long: the whole demo, real launchers, compilers, several nodes, wide fuzzing.
test-slow: $(VENV)/installed $(VENV)/frameworks
	$(PYTEST) -m "slow or fuzz" --hypothesis-profile wide --dist load --maxschedchunk 1

# torchrec's tables. FBGEMM loads beside this torch alone, so they have an environment of their own;
# without dependencies, as torchrec would install FBGEMM's package for GPUs.
TORCHREC := $(VENV)/torchrec
test-torchrec: $(TORCHREC)/installed
	PYTHONPATH=src $(TORCHREC)/bin/python -m pytest tests/frameworks/test_torchrec.py

$(TORCHREC)/installed: $(VENV)/installed
	$(PYTHON) -m venv $(TORCHREC)
	$(TORCHREC)/bin/pip install torch==2.14.1 fbgemm-gpu-cpu==1.9.0 hypothesis pytest
	$(TORCHREC)/bin/pip install tensordict torchmetrics==1.0.3 tqdm pyre-extensions
	$(TORCHREC)/bin/pip install --no-deps torchrec==1.9.2
	touch $@

# How long the ways through the package are, of which CONTRIBUTING.md has the ceilings.
ways: $(VENV)/installed
	$(BIN)/python -W ignore benchmarks/ways.py

# On a machine with a GPU: is everything right there, and how fast? In about four minutes.
gpu: $(VENV)/installed
	$(BIN)/python benchmarks/gpu.py

# Without a GPU: compiles the kernels for several with the Triton of each torch since 2.7.
TRITONS := 3.3.1 3.4.0 3.5.1 3.6.0 3.7.1 3.8.0 3.9.0
gpu-compile: $(TRITONS:%=gpu-compile-%)
gpu-compile-%: $(VENV)/installed
	test -d $(VENV)/triton-$* || $(PIP) --no-deps --target $(VENV)/triton-$* triton==$*
	TRITON_CACHE_DIR=$(VENV)/triton-$*/cache PYTHONPATH=$(VENV)/triton-$*:src:tests $(BIN)/python benchmarks/gpu_compile.py

SOURCES := pyproject.toml constraints.txt hatch_build.py src/coupled_adam/optim/kernels/native.c src/coupled_adam/optim/kernels/native_passes.h src/coupled_adam/optim/kernels/native_dtypes.h
PIP := $(BIN)/pip --disable-pip-version-check install --no-compile
# On all cores, where pip would use one. Some packages have files for other versions of Python, which fail.
COMPILE = $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

# Training frameworks for tests/frameworks, which skips those that are not installed. They are compiled
# as far as a test imports them, which is a small part.
$(VENV)/frameworks: $(VENV)/torch tests/frameworks/requirements.txt
	$(PIP) --quiet --no-deps --upgrade --target $@ --requirement tests/frameworks/requirements.txt
	touch $@

# The site, in site/; a link that leads nowhere is an error.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/docs: $(VENV)/installed
	$(PIP) --constraint constraints.txt --editable '.[docs]'
	touch $@

# torch first and alone: its build for this machine is then kept by everything that needs torch.
$(VENV)/torch: constraints.txt
	@echo "1 of 2: torch, into $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	touch $@

# What the demo needs, and no more.
$(VENV)/demo: $(VENV)/torch $(SOURCES)
	@echo "2 of 2: what the coupled-adam command needs, into $(VENV)"
	$(PIP) --constraint constraints.txt --editable '.[lab]'
	$(COMPILE)
	touch $@

$(VENV)/installed: $(VENV)/torch $(SOURCES)
	@echo "2 of 2: what the command and all tests need, into $(VENV)"
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	$(COMPILE)
	touch $@ $(VENV)/demo
