# Every target sets up what it needs. PYTHON: the interpreter that makes .venv.
PYTHON ?= python3
BIN := .venv/bin
# Spinning threads slow each other down ten times on a busy machine.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help setup quickstart reproduce test test-all lint format table report bench bench-attention bench-core bench-causal bench-launches figure-rmfa figure-direction figure-ppsbn claims golden clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-16s %s\n", $$1, $$2}'

setup: .venv/.installed ## make .venv and install the package with its development tools

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --no-compile -c constraints.txt -e '.[dev,sweep,figures,translate]'
	@touch $@

# Large: only the tests that need it install it.
.venv/.installed-ray: .venv/.installed
	$(BIN)/pip install --no-compile -c constraints.txt -e '.[dev,sweep,figures,translate,ray]'
	@touch $@

quickstart: setup ## train three models on generated ListOps on the CPU and print their table (8 minutes at most)
	$(BIN)/python train.py -m experiment=quickstart model=transformer,rfa,macformer_exp
	@$(BIN)/python scripts/table.py outputs/quickstart

reproduce: setup ## run what is missing of Table 2, then the table (weeks on a CPU; narrow it: TASKS= MODELS= SEEDS= PROTOCOL= TRAINER= SWEEP=; data elsewhere: IMDB= PAIRS=)
	$(BIN)/python train.py experiment=table2 $(if $(TASKS),task=$(TASKS)) $(if $(MODELS),model=$(MODELS)) $(if $(SEEDS),seed=$(SEEDS)) \
		$(if $(PROTOCOL),protocol=$(PROTOCOL)) $(if $(TRAINER),trainer=$(TRAINER)) $(if $(SWEEP),sweep=$(SWEEP)) \
		$(if $(IMDB),paths.text=$(IMDB)) $(if $(PAIRS),paths.retrieval=$(PAIRS)); \
	code=$$?; $(BIN)/python scripts/table.py results; exit $$code

test: lint ## lint, then the tests that take minutes at most
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-all: lint .venv/.installed-ray ## all tests, the slow ones included
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m 'slow or not slow'

lint: setup ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## let ruff format the code and sort the imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

table: setup ## turn the records in results/runs into Table 2 (results/tables, README), those of results/ablations into one table of settings, and print both
	@$(BIN)/python scripts/table.py results/ablations --settings
	@$(BIN)/python scripts/table.py results

report: setup ## the same records as a page with figures, results/report.html and results/figures
	@$(BIN)/python scripts/report.py results

bench: setup ## race training steps of whole models on each task, into results/bench (40 minutes; text-real needs IMDB=path; MODELS=mine,rfa)
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.bench models $(if $(IMDB),--imdb $(IMDB)) $(if $(MODELS),--models $(MODELS))

bench-attention: setup ## race all attentions over the length: time, memory, FLOP, into results/bench (20 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.bench attention

bench-core: setup ## race the core of the linear attention against the same formula in plain torch, into results/bench (2 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.bench core

bench-causal: setup ## race causal RMFA and RFA against the sums both ways, into results/bench (4 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.bench causal

bench-launches: setup ## count a training step's kernel launches, bytes and FLOP on a GPU, without one, into results/bench (a minute)
	$(BIN)/python -m scripts.bench launches

figure-rmfa: setup ## the paper's Figure 3, error and time of RMFA on random data, into results/figures (6 minutes; FULL=1: 11 hours)
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.figure_rmfa $(if $(FULL),--full)

figure-direction: setup ## draw what a token must see for ListOps to be learned, from records, into results/figures
	@$(BIN)/python -m scripts.figure_direction

figure-ppsbn: setup ## the paper's Figure 4, translation with and without ppSBN, into results/figures (an hour on 2 cores; MULTI30K=folder)
	$(BIN)/python -m scripts.figure_ppsbn $(if $(MULTI30K),--multi30k $(MULTI30K))

claims: setup ## measure and judge what the paper claims, into results/claims.md (4 minutes; FULL=1: 25)
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.claims $(if $(FULL),--full)

golden: setup ## write the golden losses and tables of tests/golden anew (only when a change of the numbers is meant)
	$(BIN)/python -m tests.golden.regenerate

clean: ## remove .venv, outputs and caches; data and results stay
	rm -rf .venv outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
