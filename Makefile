# make demo   golden outputs of the tiny checkpoint, in golden-tiny/
# make test   the tests, two at a time, each on one thread
# make graph  the step of the released config on 64 ranks as one graph, captured and read (1 minute, 0.6 GiB)
# make check  format, lint, types and the tests
PYTHON ?= python3.11
VENV ?= .venv
RUN = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(VENV)/bin
TEXT ?= The gate chooses two experts for each token, and the window holds the last thirty-two of them. Older rows are pooled in pairs; the indexer keeps only the best. Who asks for a row that was never written gets nothing, and is told so twice.

# These run with every shape type checked at every call; the rest without, since the check doubles the time of a small step.
TYPED = tests/test_ops.py tests/test_definitions.py tests/test_layerwise.py tests/test_golden_tiny.py tests/test_params.py
SHARED = -n 2 --dist worksteal
CHECKED = v41.spec,v41.api,v41.backends.cpu

.PHONY: demo test graph check

demo: $(VENV)/ready
	$(RUN)/v41 golden make checkpoints/tiny --text "$(TEXT)" --steps 8 --taps --out golden-tiny

test: $(VENV)/ready
	$(RUN)/python -m pytest -q $(SHARED) $(TYPED) --jaxtyping-packages=$(CHECKED),beartype.beartype
	$(RUN)/python -m pytest -q $(SHARED) $(addprefix --ignore=,$(TYPED))

graph: $(VENV)/ready
	$(RUN)/v41 graph --config released --rules lean --ranks 64 --bucket decode6

check: $(VENV)/ready
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(MAKE) test

# torch first: the pinned version, before anything that would choose another one
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt torch==2.13.0
	$(VENV)/bin/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@
