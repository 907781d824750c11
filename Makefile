# Every target sets up what it needs; nothing has to be installed by hand but Python 3.11, git and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Processes start faster that find their modules compiled, and the tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup debian-venv postgresql debian-postgresql prometheus chromium mock-gpu debian-gcc demo test test-all test-nightly check format lock docs release gpu-kit editor clean

setup: $(VENV)/.installed

# torch comes first and alone: pip then takes the CPU build where one is offered, and what follows finds it there.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); $(MAKE) debian-venv && $(PYTHON) -m venv $(VENV); }
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Debian ships venv apart from Python.
debian-venv:
	@[ "$$(id -u)" = 0 ] || { echo 'Python has no venv module; run: sudo apt-get install python3-venv' >&2; exit 1; }
	apt-get update --quiet && apt-get install --quiet --yes python3-venv

# The browser of the web page's tests. Without it these fail and say so; all others run.
chromium:
	@command -v chromium > /dev/null || [ "$$(id -u)" != 0 ] || { \
		apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends chromium; } || true

demo: setup
	$(BIN)/boost demo

# The tests start a PostgreSQL of their own from Debian's programs.
postgresql:
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || $(MAKE) debian-postgresql

debian-postgresql:
	@[ "$$(id -u)" = 0 ] || { echo 'PostgreSQL is missing; run: sudo apt-get install postgresql' >&2; exit 1; }
	apt-get update --quiet && apt-get install --quiet --yes postgresql

# Prometheus with promtool and Alertmanager, and what makes several hosts of one machine. Without the first the tests of
# what is seen fail and say so; without the second those of several hosts are skipped and say so.
prometheus:
	@{ command -v promtool && command -v ip; } > /dev/null || [ "$$(id -u)" != 0 ] || { \
		apt-get update --quiet && \
		apt-get install --quiet --yes --no-install-recommends prometheus prometheus-alertmanager iproute2; } || true

# torch's CUDA builds, for the tests on a mock GPU (docs/mock-gpu.md): the pinned torch, and the oldest supported one. All
# else they take from the other environment. With ===, pip does not take a build for CPUs (2.13.0+cpu) that lies nearby.
mock-gpu: setup debian-gcc .venv-cuda213/.installed .venv-cuda211/.installed

.venv-cuda213/.installed: TORCH := 2.13.0
.venv-cuda211/.installed: TORCH := 2.11.0
.venv-cuda213/.installed .venv-cuda211/.installed:
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	grep -v -e '^torch=' -e '^triton=' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/pip install --quiet --constraint $(@D)/constraints.txt 'torch===$(TORCH)'
	touch $@

# The mock is C, and Triton compiles its launcher against Python's headers.
debian-gcc:
	@{ command -v gcc && $(PYTHON) -c 'import sysconfig; open(sysconfig.get_path("include") + "/Python.h")'; } > /dev/null 2>&1 || \
		{ [ "$$(id -u)" = 0 ] && apt-get update --quiet && \
		apt-get install --quiet --yes --no-install-recommends gcc libc6-dev python3-dev; } || \
		{ echo 'gcc or Python.h is missing; run: sudo apt-get install gcc python3-dev' >&2; exit 1; }

# What a change may break in a way that matters, in eight minutes; without the tests that are marked full or nightly.
test: setup postgresql prometheus chromium mock-gpu
	$(BIN)/python -m pytest -n 2 -m 'not full and not nightly' --durations 10 --durations-min 10

# What a merge requires. Two processes: one takes what starts a cluster, one such test after the other, the other all else.
test-all: setup postgresql prometheus chromium mock-gpu
	$(BIN)/python -m pytest -n 2 -m 'not nightly'

# More of the same kinds: faults in other places, the oldest supported torch, other types of numbers.
test-nightly: setup postgresql prometheus chromium mock-gpu
	$(BIN)/python -m pytest -n 2 -m nightly --timeout 1800

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/architecture/test_words.py
	$(MAKE) docs

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# What is taken to a GPU machine without a network, in the folder .gpu: sh .gpu/run.sh there. GPU_PYTHON: its Python.
GPU_PYTHON ?= 3.12
gpu-kit: setup
	$(BIN)/python -m tests.gpu.kit --python $(GPU_PYTHON)

# The web page's editor: npm packages as one ES module, which is kept in the repository. Only this needs node.
editor:
	cd deploy/editor && npm ci && node build.mjs

# Resolve everything anew and pin it, around the torch that the product is tested with and the Triton that its GPU build
# wants. The local part of torch's version (+cpu) is dropped, so that the pins serve machines with and without a GPU.
lock:
	rm -rf $(VENV)
	printf 'torch==2.13.0\ntriton==3.7.1\n' > constraints.txt
	$(MAKE) setup
	$(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//' | LC_ALL=C sort --ignore-case > constraints.txt
	touch $(VENV)/.installed

# The documentation as a site, in site/. Links and anchors that lead nowhere are errors.
docs: setup
	rm -rf .docs && mkdir .docs
	git ls-files -z --cached --others --exclude-standard -- '*.md' ':!service' ':!tests' docs examples deploy/kuberay \
		deploy/prometheus/rules helm/boost/ci tests/benchmarks/results.csv | xargs -0 cp --parents --target-directory .docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# A release: the wheel in dist/, and the images, which need Docker or what stands for it. Change __version__ in
# boost_core/__init__.py first; a test says where else the version stands.
DOCKER ?= docker
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' boost_core/__init__.py)
release: setup
	rm -rf dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	$(DOCKER) build --file docker/api.Dockerfile --tag boost-api:$(VERSION) .
	$(DOCKER) build --file docker/trainer.Dockerfile --tag boost-trainer:$(VERSION) .
	$(DOCKER) build --file docker/trainer.Dockerfile --tag boost-trainer:$(VERSION)-cpu \
		--build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .

clean:
	rm -rf .docs site $(VENV) .venv-cuda213 .venv-cuda211 .mock-gpu .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
