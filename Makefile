# make demo      set up and run the whole method on real images (no download beyond PyPI)
# make test      set up and run every check
# make results   make every table and figure of README and docs from the records in results/
# make speed     measure how fast the code is
# make fuzz      give it what nobody should: half an hour
# make test-timm try models of timm, in an environment of their own
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
export OMP_NUM_THREADS ?= 2
# without cached bytecode, importing torch takes seconds
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-results results pacs-results data-cifar10 cifar10-results reproduce-cifar10 \
  models-results own-classifier-results dart-results accuracy-results passes-results \
  guard-results \
  test test-slow test-timm lint types imports unit speed fuzz docs clean

# One stamp per set of extras; uv if it can be installed (much faster), pip otherwise.
define install
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q uv 2>/dev/null || true
	@if UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/python -m uv pip install -q --python $(BIN)/python -c constraints.txt -e '.[$(1)]'; \
	then :; else $(BIN)/python -m pip install -q -c constraints.txt -e '.[$(1)]'; fi
	@touch $@
endef

$(VENV)/.demo: pyproject.toml constraints.txt
	$(call install,demo)

$(VENV)/.dev: pyproject.toml constraints.txt
	$(call install,dev)

RESULTS := efficientnet,plots
$(VENV)/.results: pyproject.toml constraints.txt
	$(call install,$(RESULTS))

$(VENV)/.docs: pyproject.toml constraints.txt
	$(call install,docs)

$(VENV)/.slow: pyproject.toml constraints.txt
	$(call install,slow)

demo: $(VENV)/.demo
	$(BIN)/twoshift demo --out demo

# the demo's table and figures in README and docs
demo-results: demo
	cp demo/results.jsonl results/demo.jsonl
	cp demo/label_estimate.png docs/images/
	$(BIN)/python -m reproduction.publish

results: $(VENV)/.results
	$(BIN)/python -m reproduction.publish

# The targets below measure what reproduction/published.yaml names, in hours on a CPU; DATA is the
# folder of the data sets. Run again after an interruption, they continue.
DATA  ?= data
MEASURE := $(BIN)/python -m reproduction.measure --data $(DATA)
OF_CIFAR10 := selection finals selection-streams table1 ablations recommended beyond mild streams

pacs-results: $(VENV)/.results
	$(MEASURE) pacs

# verifies data that are already there instead of downloading them again
data-cifar10: $(VENV)/.results
	$(BIN)/twoshift data get cifar10 --data $(DATA)
	$(BIN)/twoshift data get frost --data $(DATA)

$(OF_CIFAR10:=-results): %-results: data-cifar10
	$(MEASURE) $*-cifar10

# other networks, from the reference checkpoints
models-results: data-cifar10
	$(MEASURE) selection-models streams-models streams-others

# classifiers of one's own, trained here and adapted by the lines of the README
own-classifier-results: data-cifar10
	$(BIN)/python -m reproduction.own_classifier --data $(DATA)
	$(BIN)/python -m reproduction.publish

# settings of DART's training; the chosen ones are the defaults of fit_dart
dart-results: data-cifar10
	$(BIN)/python -m reproduction.dart --data $(DATA)
	$(BIN)/python -m reproduction.publish

# offline passes of twoshift predict, beside an online run
passes-results: data-cifar10
	$(BIN)/python -m reproduction.passes --data $(DATA) --images 3000
	$(BIN)/python -m reproduction.publish

# how well accuracy is told without labels
accuracy-results: data-cifar10
	$(BIN)/python -m reproduction.accuracy_features --data $(DATA)
	$(BIN)/python -m reproduction.accuracy --data $(DATA)
	$(BIN)/python -m reproduction.publish

# what a guard is worth, and what it costs
guard-results: data-cifar10
	$(BIN)/python -m reproduction.guard --data $(DATA)
	$(BIN)/python -m reproduction.publish

# all CIFAR-10 tables, starting from the reference checkpoints
cifar10-results: data-cifar10
	$(MEASURE) $(OF_CIFAR10:=-cifar10)

# the same from nothing: models are searched for in this folder first, and trained into it
ANEW := runs/anew
reproduce-cifar10: data-cifar10 $(foreach norm,bn iabn gn,$(ANEW)/cifar10-$(norm)/card.json)
	$(BIN)/twoshift calibrate --source $(ANEW)/cifar10-bn --folds 2 --also dart --data $(DATA)
	$(BIN)/twoshift calibrate --source $(ANEW)/cifar10-iabn --folds 2 --data $(DATA)
	$(MEASURE) --models $(ANEW) --store $(ANEW)/results.db $(OF_CIFAR10:=-cifar10)

$(ANEW)/cifar10-%/card.json: | data-cifar10
	$(BIN)/twoshift train source --recipe cifar-cpu --set settings.norm=$* --data $(DATA) --out $(@D)

test: lint types imports unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

# one thread per worker: two workers with two threads each are slower on two cores
unit: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

test-slow: $(VENV)/.slow
	$(BIN)/pytest -m slow

# Not in .venv: torchvision's compiled part wants CUDA, and breaks others who import it. --no-deps,
# since its dependencies would bring a torch with CUDA.
test-timm .venv-timm/%: VENV := .venv-timm
test-timm .venv-timm/%: BIN := .venv-timm/bin

.venv-timm/.dev: pyproject.toml constraints.txt
	$(call install,dev)

.venv-timm/.timm: .venv-timm/.dev
	$(BIN)/python -m pip install -q --no-deps 'torchvision==0.28.*' 'timm>=1.0'
	@touch $@

test-timm: .venv-timm/.timm
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal tests/timm

speed: $(VENV)/.dev
	@failed=; \
	$(BIN)/python -m benchmarks.runner_speed || failed=1; \
	$(BIN)/python -m benchmarks.speed || failed=1; \
	$(BIN)/python -m benchmarks.streams || failed=1; \
	$(BIN)/python -m benchmarks.loader || failed=1; \
	$(BIN)/python -m benchmarks.speed_report || failed=1; \
	test -z "$$failed"

fuzz: $(VENV)/.dev
	$(BIN)/python -m benchmarks.reliability --page docs/reliability.md

docs: $(VENV)/.docs
	$(BIN)/sphinx-build -q -W -b html docs docs/_build/html

clean:
	rm -rf $(VENV) .venv-timm demo docs/_build dist build
