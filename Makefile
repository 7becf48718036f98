# `make generate` writes text with the embedded model; `make test` runs everything that CI runs.
# `make serve` answers at http://127.0.0.1:8000 with it. All set up what is missing first (tools/setup.sh says what it does and why).
VENV   ?= .venv
PYTHON ?= python3
PY     := $(VENV)/bin/python
PROMPT ?= def read_file(path):
TOKENS ?= 96
PORT   ?= 8000
# Of what was compiled before and has not changed since, one in so many is compiled again.
SHARE  ?= $(if $(filter long,$(HYBRID_CONFORMANCE)),1,96)
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)
# Hundreds of processes are started here: without byte code beside the sources each would compile them again, for 2 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help generate serve test quick lint check gates conformance processors floors docs spirv doctor mesa report clean

help:
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

generate: $(VENV)/.ready ## text from the embedded model (PROMPT="...", TOKENS=96)
	@$(PY) -m hybrid.generate --device "$$(cat $(VENV)/.device)" --prompt '$(subst ','\'',$(PROMPT))' --max-tokens $(TOKENS) --stats

serve: $(VENV)/.ready-serve ## a server with the embedded model: chat page; OpenAI's, Anthropic's and Ollama's APIs (PORT=8000)
	@$(PY) -m hybrid.serve --device "$$(cat $(VENV)/.device)" --port $(PORT)

test: $(VENV)/.ready-test ## everything that CI runs
	@$(MAKE) --no-print-directory -j2 lint check gates conformance processors floors

quick: $(VENV)/.ready-test ## for whoever changes a line: lint, specs, a share of every test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m hybrid.spec check
	HYBRID_CONFORMANCE=quick OPENBLAS_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist worksteal

lint: $(VENV)/.ready-test ## ruff, mypy, the layers of pyproject.toml
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-cache
	$(PY) tools/lines.py

check: $(VENV)/.ready-test ## specs valid; support matrix, quoted figures, paths in pages and SPIR-V up to date
	$(PY) -m hybrid.spec check
	$(PY) tools/pages.py --check
	$(PY) -m kernels.vulkan.build --check --share $(SHARE)
	$(PY) -m kernels.vulkan.build --check --source perf/reference/shaders --out perf/reference/spirv

gates: $(VENV)/.ready-test ## counts, sizes, gfx1103 statistics and ratios against perf/gates
	OPENBLAS_NUM_THREADS=1 HYBRID_REQUIRE_VULKAN=$${HYBRID_REQUIRE_VULKAN:-$$(test "$$(cat $(VENV)/.device)" = vulkan && echo 1)} \
	$(PY) -m perf.gate --share $(SHARE)

mesa: $(VENV)/.ready ## Debian 13's Mesa in build/, to compile for the Radeon 780M with matrix units
	$(PY) -m perf.mesa fetch

report: $(VENV)/.ready ## build/report/index.html: speed by commit, roofline, gates
	$(PY) -m perf.report

conformance: $(VENV)/.ready-test ## every operation, backend and dtype; whole models; mutants
	OPENBLAS_NUM_THREADS=1 HYBRID_REQUIRE_VULKAN=$${HYBRID_REQUIRE_VULKAN:-$$(test "$$(cat $(VENV)/.device)" = vulkan && echo 1)} \
	HYBRID_VULKAN_VALIDATION=$${HYBRID_VULKAN_VALIDATION:-$$(cat $(VENV)/.validation)} \
	$(PY) -m pytest -n $(JOBS) --dist worksteal

processors: $(VENV)/.ready-test ## what rests on NumPy's products, under the kernels of other processors
	HYBRID_REQUIRE_VULKAN=$${HYBRID_REQUIRE_VULKAN:-$$(test "$$(cat $(VENV)/.device)" = vulkan && echo 1)} \
	$(PY) tools/processors.py --jobs $(JOBS)

floors: $(VENV)/.ready-test ## the server's tests with the lowest versions that pyproject.toml allows
	@VENV=$(VENV) PYTHON=$(PYTHON) JOBS=$(JOBS) sh tools/floors.sh

docs: $(VENV)/.ready-docs ## build/docs/index.html: pages, operations, commands, speeds; renews the generated parts of pages
	$(PY) tools/pages.py
	$(PY) -m tools.site

spirv: $(VENV)/.ready-test ## rebuild kernels/vulkan/spirv from the shaders
	$(PY) -m kernels.vulkan.build

doctor: $(VENV)/.ready ## what this machine has, and what to do about what it lacks
	@$(PY) -m hybrid.doctor

$(VENV)/.ready: pyproject.toml tools/setup.sh
	@VENV=$(VENV) PYTHON=$(PYTHON) sh tools/setup.sh run

$(VENV)/.ready-serve: pyproject.toml tools/setup.sh
	@VENV=$(VENV) PYTHON=$(PYTHON) sh tools/setup.sh serve

$(VENV)/.ready-docs: pyproject.toml tools/setup.sh
	@VENV=$(VENV) PYTHON=$(PYTHON) sh tools/setup.sh docs

$(VENV)/.ready-test: pyproject.toml tools/setup.sh
	@VENV=$(VENV) PYTHON=$(PYTHON) sh tools/setup.sh test

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
