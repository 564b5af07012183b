# make demo, make test: each alone is enough on a fresh clone with Python and make. g++ and nvcc are used where present.
# make distill: trains an indexer on a CPU.
# make gpu-test [SHARD=i/n], make gpu-bench [SHARD=i/n]: on a Hopper machine, with the torch of $(PYTHON).

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
SHARD ?=
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

.PHONY: demo distill test lint check-kernels kernels docs bench-cpu gpu-test gpu-bench clean help

help:
	@sed -n 's/^# //p' Makefile

# The package is installed editable. Unless HTREE_CUDA_KERNELS says otherwise, its kernels are built here only where an
# NVIDIA driver is: without one the demo cannot run them (`make test` compiles them wherever nvcc is). What building
# takes is asked of the same hook that pip asks, and installed here, so that later builds are incremental.
DRIVER := $(wildcard /proc/driver/nvidia/version /dev/nvidiactl /dev/nvidia0 /usr/lib/wsl/lib/libcuda.so.1)
$(READY): pyproject.toml setup.py constraints.txt
	@echo "== setting up $(VENV) (PyTorch is the large part; a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -c constraints.txt "torch>=2.6" numpy "setuptools>=77" wheel \
	  $$(PYTHONPATH=build_backend $(PYTHON) -m htree_cuda_build)
	HTREE_CUDA_KERNELS=$${HTREE_CUDA_KERNELS:-$(if $(DRIVER),auto,off)} \
	  $(PY) -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[demo,test]"
	@touch $@

demo: $(READY)
	$(PY) -m htree_cuda info
	$(PY) -m htree_cuda demo

# An indexer learns from attention on real text: a table, demo_out/indexer_distillation.png and .json.
distill: $(READY)
	$(PY) examples/indexer_distillation.py

test: $(READY) lint check-kernels
	$(PY) -m pytest -n $(JOBS) --dist worksteal -q
	$(PY) -m tools.update_docs --check

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) tools/check_house_rules.py

# Compiles every kernel for sm_90a and reads the compiler's log; says so where no kernels are built.
check-kernels: $(READY)
	@if PYTHONPATH=build_backend $(PY) -m htree_cuda_build --kernels; then \
	  $(PY) tools/build_inplace.py --benchmarks && $(PY) tools/check_build_log.py; \
	else echo "== the kernels are not compiled here"; fi

kernels: $(READY)
	$(PY) tools/build_inplace.py --benchmarks
	$(PY) tools/check_build_log.py

# Tables and figures of README and docs, from benchmarks/results.
docs: $(READY)
	$(PY) -m tools.make_figures
	$(PY) -m tools.update_docs

bench-cpu: $(READY)
	$(PY) -m htree_cuda bench forward --device cpu --dtype float32 --lengths 8192,16384,32768,65536,131072 \
	  --queries 2048 --heads 8 --kv-heads 2 --dim 64 --top-k 64 --out benchmarks/results/forward_cpu.json \
	  --plot benchmarks/results/forward_cpu.png
	$(PY) -m htree_cuda bench forward --device cpu --dtype float32 --lengths 32768 --heads 8 --kv-heads 2 --dim 64 \
	  --top-k 64 --out benchmarks/results/forward_cpu_whole.json

gpu-test:
	$(PYTHON) tools/gpu_test.py $(if $(SHARD),--shard $(SHARD))

gpu-bench:
	$(PYTHON) tools/gpu_bench.py $(if $(SHARD),--shard $(SHARD))

clean:
	rm -rf build dist *.egg-info htree_cuda/_C*.so htree_cuda/libhtree_cuda.so htree_cuda/_build_info.json
