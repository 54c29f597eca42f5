# Every target sets up what it needs. A second run re-installs nothing: the stamp is newer than what it was made from.
PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
COMPARED := baukit captum nnsight pyvene torchlens torchvision transformer_lens
RUN := $(VENV)/bin/python
SITE := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
TWO := -n 2 --dist loadgroup
SETUP := pyproject.toml constraints.txt
RANKS := $(RUN) -m torch.distributed.run --standalone --nproc-per-node 2
# run again by the slow tests: with every model compiled, and with every model spread over two processes
SUITES := tests/traps tests/test_capture.py tests/test_edits.py tests/test_edit_sessions.py tests/test_no_effect.py

.PHONY: demo more test slow gpu survey fuzz count diagnose foreign vision partners compare bench-peers wheel page page-check shots gallery check house bench docs format notebooks clean

demo: $(VENV)/.ready  ## the main job on real input: look at what it prints
	rm -rf demo-out/broken demo-out/healthy
	$(VENV)/bin/gaff watch --out demo-out/broken -- $(RUN) examples/train_digits.py --bug dead-relu
	$(VENV)/bin/gaff watch --out demo-out/healthy -- $(RUN) examples/train_digits.py
	$(VENV)/bin/gaff report demo-out/broken demo-out/healthy --html demo-out/training.html
	@echo
	@echo "Above: a script that knows nothing of gaff, once with a bug and once without. The alarm names the layer and the remedy."
	@echo "Next: $(VENV)/bin/gaff report demo-out/broken tells it again; other bugs: --bug nan, no-zero-grad, detached, lr-too-high ..."
	@echo "Look at demo-out/training.html in a browser: both runs, every layer over time; key ? lists its keys."
	@echo "      make more shows the rest: trace, take, apply, nan, and examples with real sentences and photos."

more: $(VENV)/.ready  ## what else there is
	$(VENV)/bin/gaff trace examples/digits.py:model examples/digits.py:image --backward
	$(VENV)/bin/gaff take examples/digits.py:model features head.hidden --input examples/digits.py:image --out demo-out/digits.safetensors
	$(VENV)/bin/gaff apply examples/half.json examples/digits.py:model examples/digits.py:image
	$(VENV)/bin/gaff trace examples/resnet50.py:model examples/resnet50.py:photo --backward --html demo-out/resnet50.html > /dev/null
	$(VENV)/bin/gaff nan --again examples/broken.py || test $$? -eq 3  # 3: there is something, and it was found
	@echo
	@echo "Look at demo-out/resnet50.html in a browser: a photo on its way through ResNet-50, layer by layer."
	@echo "Next: $(VENV)/bin/gaff sites examples/digits.py:model shows what can be addressed; add --json for data."
	@echo "      $(RUN) examples/minilm.py (real sentence embeddings), $(RUN) examples/resnet50.py (a photo) show more;"
	@echo "      $(RUN) examples/heads.py silences every attention head of MiniLM, all in one forward."

# two workers with a thread each: with two, those of one wait for those of the other
test slow: export OMP_NUM_THREADS = 1

test: $(VENV)/.ready  ## the tests that every change passes, under two minutes
	$(RUN) -m pytest -m "not slow" $(TWO)

slow: $(VENV)/.ready $(if $(shell command -v npm),page/node_modules/.package-lock.json)  ## compile, forty architectures, examples, types as users see them
	$(RUN) -m pytest -m slow $(TWO)
	$(RUN) -m pytest $(SUITES) -m "not slow" $(TWO) --inside aot_eager -W ignore
	BACKEND=inductor $(RUN) -m pytest tests/test_settings.py $(TWO)
	$(RUN) -m pytest $(SUITES) -m "not slow" $(TWO) --inside inductor -W ignore
	OMP_NUM_THREADS=1 $(RANKS) -m pytest $(SUITES) -m "not slow" -p no:xdist -p no:cacheprovider --inside ddp -W ignore
	OMP_NUM_THREADS=1 $(RANKS) -m pytest $(SUITES) -m "not slow" -p no:xdist -p no:cacheprovider --inside fsdp2 -W ignore

gpu: $(VENV)/.ready  ## on a machine with a GPU, and a torch for it: its own tests, the suites there, and what things cost
	$(RUN) -m pytest tests/test_gpu.py
	$(RUN) -m pytest $(SUITES) -m "not slow" $(TWO) --inside cuda -W ignore
	$(RUN) -m benchmarks.gpu

survey: $(VENV)/.ready  ## the weights of fused attention, over all architectures of transformers that have both kinds
	SURVEY=1 $(RUN) -m pytest tests/slow/test_attention_of_transformers.py $(TWO)

MINUTES ?= 10
fuzz: $(VENV)/.ready  ## fresh random programs against the truth for MINUTES=10, SETTING=fsdp2 (or another): a table, and small scripts
	cd tests && OMP_NUM_THREADS=1 ../$(RUN) -W ignore -m fuzz --minutes $(MINUTES) $(if $(SETTING),--inside $(SETTING))

count: $(VENV)/.ready  ## hours: how many programs were tried in each setting, for the table in docs/limits.md
	rm -f tests/fuzz/counts.json
	cd tests && for setting in "" aot_eager inductor ddp fsdp2 fsdp1 tp 2d checkpoint amp; do \
		OMP_NUM_THREADS=1 ../$(RUN) -W ignore -m fuzz --record --seed 10000 --count 1200 $${setting:+--inside $$setting}; done
	cd tests && ../$(RUN) -m settings

SEEDS ?= 0
HALF ?= held out
diagnose: $(VENV)/.ready  ## how often the verdict names the fault: scripts with one fault each, and healthy ones; TRY=--try asks gaff try
	cd tests && OMP_NUM_THREADS=1 ../$(RUN) -m diagnose --half "$(HALF)" --seeds $(SEEDS) $(TRY)

foreign: $(VENV)/.ready  ## programs that would notice that they are watched; TORCH_TESTS=FOLDER: torch's own tests, too
	$(RUN) -m pytest tests/foreign $(TWO)
	$(if $(TORCH_TESTS),$(RUN) tests/foreign/torch_tests.py $(TORCH_TESTS),@echo "torch's own tests were left out: make foreign TORCH_TESTS=FOLDER runs them")

vision: $(PEERS)/.ready  ## torchvision and timm models
	$(PEERS)/bin/python -m pytest tests/vision $(TWO)

partners: $(PEERS)/.ready  ## real trackers, tables and event files
	$(PEERS)/bin/python -m pytest tests/partners $(TWO)

compare: $(VENV)/.ready $(COMPARED:%=.venv-compare/%/.ready)  ## every trap sprung on gaff, on hooks by hand and on seven other tools, each in its own environment
	cd tests && ../$(RUN) -m traps --against gaff raw $(COMPARED) --write traps/against/answers.json
	cd tests && for one in baukit transformer_lens; do ../.venv-compare/$$one/bin/python -W ignore -m peers.same_as_$$one || exit 1; done

bench-peers: $(VENV)/.ready $(COMPARED:%=.venv-compare/%/.ready)  ## what keeping the outputs of many modules costs with each of them
	$(RUN) -m benchmarks.peers --write tests/traps/against/prices.json

page: page/node_modules/.package-lock.json  ## the page's script and style, built into the package; needs node
	cd page && npm run --silent check && npm run --silent test && npm run --silent build

shots: $(VENV)/.ready page/node_modules/.package-lock.json  ## pictures of all pages, three sizes and two themes, in shots/; ONLY=verdict for some
	$(RUN) tests/shots.py

gallery: $(VENV)/.ready  ## the pictures of docs/gallery.md, of real runs and models
	$(RUN) tests/gallery.py

page-check: page/node_modules/.package-lock.json  ## whether what is in the package is what page/ builds
	cd page && npm run --silent check && npm run --silent test && npm run --silent build -- --check

page/node_modules/.package-lock.json: page/package.json page/package-lock.json
	cd page && npm ci --silent --ignore-scripts
	touch $@

wheel: $(VENV)/.ready  ## a wheel with the compiled kernel and the sources, into dist/, tried in a fresh environment without a compiler
	rm -rf dist build
	GAFF_PACK_KERNEL=1 $(RUN) -m pip wheel . --quiet --disable-pip-version-check --no-build-isolation --no-deps -w dist
	$(RUN) -m hatchling build -t sdist
	$(RUN) tests/wheel.py dist/*.whl

check: $(VENV)/.ready  ## lint, format, strict types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

house: $(VENV)/.ready  ## the house, measured, and drawn into docs/house.svg
	cd tests && ../$(RUN) -m house
	cd tests && ../$(RUN) -m house_picture

format: $(VENV)/.ready
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(PEERS)/.ready  ## every figure of docs/benchmarks.md, beside raw hooks and peers in one process
	$(PEERS)/bin/python -m benchmarks

docs: $(VENV)/.ready  ## the documentation as a site, into site/html; notebooks that have changed are run
	$(RUN) -m sphinx -W --keep-going -q -b html -d docs/_build/read docs site/html

$(VENV)/.ready: $(SETUP)
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch -e ".[dev]"
	$(RUN) -m gaff.training.statistics.kernel || true  # without a compiler plain torch counts the same
	touch $@

$(PEERS)/.ready: $(VENV)/.ready  # stands on the other: what that has is not installed again
	$(PYTHON) -m venv $(PEERS)
	$(RUN) $(SITE) > $$($(PEERS)/bin/python $(SITE))/stands_on.pth
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch -e ".[dev,peers]"
	touch $@

.venv-compare/%/.ready: tests/traps/against/pins/%.txt
	$(PYTHON) -m venv .venv-compare/$*
	.venv-compare/$*/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	.venv-compare/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

notebooks: $(VENV)/.ready  ## the notebooks of the documentation as .ipynb, into notebooks/
	mkdir -p notebooks
	for one in docs/notebooks/[01]*.md; do $(RUN) -m jupytext --quiet --to ipynb --output notebooks/$$(basename $$one .md).ipynb $$one; done

clean:
	rm -rf $(VENV) $(PEERS) .venv-compare site docs/_build notebooks dist demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
