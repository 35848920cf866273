# The commands of the README. Each sets up a virtual environment first.
PYTHON ?= python3
VENV ?= .venv
# For a torch that is installed already: make ... VENV_OPTIONS=--system-site-packages CONSTRAINTS=/dev/null
VENV_OPTIONS ?=
CONSTRAINTS ?= constraints.txt
# For example --extra-index-url with PyTorch's CPU builds.
PIP_OPTIONS ?=
ARGS ?=

BIN := $(VENV)/bin

# Where an environment forbids it, each of a thousand processes compiles torch anew: 6 s in place of 2.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test docs docs-commands install clean

quickstart: install
	$(BIN)/envpipe quickstart $(ARGS)

# What tests import is compiled once: three workers that begin at once would each compile all of it.
test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m compileall -q envpipe_megatron benchmarks tests  # once, not in each child
	$(BIN)/mypy & types=$$!; \
		test -e $(VENV)/.compiled || $(BIN)/pytest --collect-only -qq > /dev/null; touch $(VENV)/.compiled; \
		$(BIN)/pytest -n 3 --dist loadgroup $(ARGS); tests=$$?; \
		wait $$types && exit $$tests

# A site of docs/ in site/; a link to nothing is an error.
docs:
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV_OPTIONS) $(VENV)
	$(BIN)/python -c "import material, latex2mathml" 2> /dev/null || \
		$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_OPTIONS) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

# Every command on the pages that needs no GPU, in a fresh clone, each with its time; an hour.
docs-commands:
	$(PYTHON) docs/tools/page_commands.py $(ARGS)

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_OPTIONS) $(VENV)
	-$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_OPTIONS) --upgrade pip  # Python's takes 20 s longer
	DS_BUILD_OPS=0 $(BIN)/pip install --no-compile --quiet --disable-pip-version-check $(PIP_OPTIONS) \
		-c $(CONSTRAINTS) -e '.[megatron,deepspeed,huggingface,dev]'
	touch $@

clean:
	rm -rf $(VENV) runs/quickstart site
