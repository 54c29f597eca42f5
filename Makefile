# Every target sets up what it needs. A second run re-installs nothing: the stamp is newer than what it was made from.
PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
RUN := $(VENV)/bin/python
SETUP := pyproject.toml constraints.txt

.PHONY: demo test slow vision check bench docs format clean

demo: $(VENV)/.ready  ## the main job on real input: look at what it prints
	$(VENV)/bin/gaff trace examples/digits.py:model examples/digits.py:image --backward
	$(VENV)/bin/gaff take examples/digits.py:model features head.hidden --input examples/digits.py:image --out demo-out/digits.safetensors
	$(VENV)/bin/gaff apply examples/half.json examples/digits.py:model examples/digits.py:image
	$(VENV)/bin/gaff nan --again examples/broken.py || test $$? -eq 3  # 3: there is something, and it was found
	@echo
	@echo "Next: $(VENV)/bin/gaff sites examples/digits.py:model shows what can be addressed; add --json for data."
	@echo "      $(RUN) examples/minilm.py (real sentence embeddings), $(RUN) examples/resnet50.py (a photo) show more;"
	@echo "      $(RUN) examples/heads.py silences every attention head of MiniLM, all in one forward."

test: $(VENV)/.ready  ## the tests that every change passes, under two minutes
	$(RUN) -m pytest -m "not slow" -n 2

slow: $(VENV)/.ready  ## compile, forty architectures, examples
	$(RUN) -m pytest -m slow -n 2

vision: $(PEERS)/.ready  ## torchvision and timm models
	$(PEERS)/bin/python -m pytest tests/vision -n 2

check: $(VENV)/.ready  ## lint, format, strict types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(VENV)/.ready
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(PEERS)/.ready  ## every figure of docs/benchmarks.md, beside raw hooks and peers in one process
	$(PEERS)/bin/python -m benchmarks

docs: $(VENV)/.ready  ## the documentation as a site, into site/
	$(RUN) -m mkdocs build --strict --quiet

$(VENV)/.ready: $(SETUP)
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch -e ".[dev]"
	touch $@

$(PEERS)/.ready: $(SETUP)
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch -e ".[dev,peers]"
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) site demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
