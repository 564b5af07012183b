# Each target is enough on a fresh clone with Python and make. g++ and nvcc are used where present.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# The demo needs less than the tests do.
DEMO_READY := $(VENV)/.demo
READY := $(VENV)/.installed
comma := ,
# Modules are compiled when they are first imported, and not all of them when they are installed: half of the time.
unexport PYTHONDONTWRITEBYTECODE
SHARD ?=
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

.PHONY: help demo test check-kernels test-all lint kernels wheel docs distill bench-cpu gpu-test gpu-bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 22

# The package is installed editable. Unless HTREE_CUDA_KERNELS says otherwise, its kernels are built here only where an
# NVIDIA driver is: without one the demo cannot run them. What building takes is asked of the same hook that pip asks,
# and installed here, so that later builds need no environment of their own; for the demo alone, only what it builds.
DRIVER := $(wildcard /proc/driver/nvidia/version /dev/nvidiactl /dev/nvidia0 /usr/lib/wsl/lib/libcuda.so.1)
KERNELS := $(or $(HTREE_CUDA_KERNELS),$(if $(DRIVER),auto,off))
define install
	@echo "== setting up $(VENV) (PyTorch is the large part; a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --no-compile -c constraints.txt "torch>=2.6" numpy "setuptools>=77" wheel \
	  $$($(2) PYTHONPATH=build_backend $(PYTHON) -m htree_cuda_build)
	HTREE_CUDA_KERNELS=$(KERNELS) \
	  $(PY) -m pip install --quiet --no-compile -c constraints.txt --no-build-isolation -e ".[$(1)]"
endef
$(DEMO_READY): pyproject.toml setup.py constraints.txt
	$(call install,demo,HTREE_CUDA_KERNELS=$(KERNELS))
	@touch $@
$(READY): pyproject.toml setup.py constraints.txt
	$(call install,demo$(comma)hf$(comma)test)
	@touch $(DEMO_READY) $@

# One process, which imports PyTorch once.
demo: $(DEMO_READY) ## install into .venv and search a book with attention, beside dense attention
	$(PY) -c 'from htree_cuda.__main__ import main; import sys; main(["info"]); sys.exit(main(["demo"]))'

test: $(READY) lint ## the tests, with a sample of the kernels on the emulator where there is no GPU
	$(PY) -m pytest -n $(JOBS) --dist worksteal -q
	$(PY) -m tools.update_docs --check

check-kernels: $(READY) ## compile every kernel for sm_90a and read the compiler's log for spills and advisories
	@if PYTHONPATH=build_backend $(PY) -m htree_cuda_build --kernels; then \
	  $(PY) tools/build_inplace.py --benchmarks && $(PY) tools/check_build_log.py; \
	else echo "== the kernels are not compiled here"; fi

test-all: $(READY) lint check-kernels ## all tests that this machine can run, every kernel on the emulator: hours
	HTREE_CUDA_EMULATED=all HTREE_CUDA_THOROUGH=1 $(PY) -m pytest -n $(JOBS) --dist worksteal -q
	$(PY) -m tools.update_docs --check

lint: $(READY) ## ruff, and the rules of the house: includes, layout, words
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) tools/check_house_rules.py

kernels: $(READY) ## compile the kernels and the C++ benchmarks into this folder, or fail
	$(PY) tools/build_inplace.py --benchmarks
	$(PY) tools/check_build_log.py

wheel: $(READY) ## a wheel with kernels for every Python found here, into dist/; compiled objects are used again
	$(PY) tools/make_wheels.py

docs: $(READY) ## write the figures and tables of README and docs and the rates of explain again, from benchmarks/results
	$(PY) -m tools.fit_costs
	$(PY) -m tools.make_figures
	$(PY) -m tools.update_docs

distill: $(READY) ## train an indexer on a CPU, from attention over real text: a table and a figure in demo_out/
	$(PY) examples/indexer_distillation.py

bench-cpu: $(READY) ## time the PyTorch backend on this CPU, into benchmarks/results
	$(PY) -m htree_cuda bench forward --device cpu --dtype float32 --lengths 8192,16384,32768,65536,131072 \
	  --queries 2048 --heads 8 --kv-heads 2 --dim 64 --top-k 64 --out benchmarks/results/forward_cpu.json \
	  --plot benchmarks/results/forward_cpu.png
	$(PY) -m htree_cuda bench forward --device cpu --dtype float32 --lengths 32768 --heads 8 --kv-heads 2 --dim 64 \
	  --top-k 64 --out benchmarks/results/forward_cpu_whole.json

gpu-test: ## on a Hopper machine, with the torch of $(PYTHON): tests and compute-sanitizer; SHARD=i/n for a part
	$(PYTHON) tools/gpu_test.py $(if $(SHARD),--shard $(SHARD))

gpu-bench: ## on a Hopper machine: every benchmark; SHARD=i/n for a part
	$(PYTHON) tools/gpu_bench.py $(if $(SHARD),--shard $(SHARD))

clean: ## remove what builds left in this folder; compiled objects stay in the user's cache
	rm -rf build dist *.egg-info htree_cuda/_C*.so htree_cuda/libhtree_cuda.so htree_cuda/_build_info.json
