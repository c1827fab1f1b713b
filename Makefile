# The two commands of the README. Both make the virtual environment when there is none.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo gpu test

# AdamW against Coupled Adam on real text; run it again to see the finished result again.
demo: $(VENV)/installed
	$(BIN)/coupled-adam compare --out runs/demo --resume

# Every check: format, lint, types, all tests, in two processes of one thread each.
test: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# On a machine with a GPU: is everything right there, and how fast? Ten minutes at most.
gpu: $(VENV)/installed
	$(BIN)/python benchmarks/gpu.py benchmarks/results/bench/gpu.json

# torch first and alone: its build for this machine is then kept by everything that needs torch.
$(VENV)/installed: pyproject.toml constraints.txt hatch_build.py src/coupled_adam/optim/kernels/native.c src/coupled_adam/optim/kernels/native_passes.h
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
