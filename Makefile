# make demo      set up and run the whole method on real images (no download beyond PyPI)
# make test      set up and run every check
# make results   every table and figure of README and docs again, from the records in results/
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
export OMP_NUM_THREADS ?= 2
# torch takes seconds to import where its bytecode may not be kept
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-results results pacs-results table1-results selection-results \
  ablations-results recommended-results reproduce-cifar10 test test-slow \
  lint types imports unit bench docs clean

# One stamp per set of extras; uv when it can be had (much faster), pip otherwise.
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

# what README and docs show of the demo
demo-results: demo
	cp demo/results.jsonl results/demo.jsonl
	cp demo/label_estimate.png docs/images/
	$(BIN)/python -m bench.results

results: $(VENV)/.results
	$(BIN)/python -m bench.results

# What follows measures: DATA is the folder of the data sets; hours on a CPU. Given again, it goes
# on; tables share a store, so that no cell is measured twice.
DATA  ?= data
STORE := runs/results.db
# table, what of it, and --add to keep what is published of it
define measure
	$(BIN)/twoshift bench $(1) --profile cpu $(2) --data $(DATA) --store $(STORE) \
	  --models runs --checkpoints checkpoints --launch processes
	$(BIN)/python -m bench.results --take $(1) $(2) --store $(STORE) $(3)
endef

pacs-results: $(VENV)/.results
	$(call measure,pacs)

# every row on two corruptions, those that the claims are about on two more
TWO := --only corruption=gaussian_noise,contrast
MORE := --only corruption=defocus_blur,jpeg_compression
CLAIMED := "row=Source,BN Stats,TENT,TENT+Ours,IABN,IABN+Ours,TENT+identity adapter,IABN+identity adapter,TENT+Ours (oracle),IABN+Ours (oracle),TENT+Ours (lambdas 1 -1.5 -3),IABN+Ours (lambdas 1 -1.5 -3),IABN (lr 1e-3),IABN+Ours (lambdas 1 -1 -2 lr 1e-3)"
table1-results: $(VENV)/.results
	$(call measure,table1-cifar10,$(TWO))
	$(call measure,table1-cifar10,$(MORE) --only $(CLAIMED),--add)

# where settings were chosen
selection-results: $(VENV)/.results
	$(call measure,selection-cifar10)
	$(call measure,finals-cifar10)

# what the adapter's parts and the simple baselines are worth
ABLATED := "row=Source,BN Stats,IABN,IABN+Ours,only db,5 points,7 points,any point,Logit adjustment,IM loss,SAR (BN),SAR (BN)+Ours,SAR (GN),SAR (GN)+Ours"
ablations-results: $(VENV)/.results
	$(call measure,ablations-cifar10,--only $(ABLATED))

# what is recommended, on all corruptions and under other label shifts
BEYOND := "row=Source,BN Stats,TENT,TENT+Ours (lambdas 1 -1.5 -3),TENT+Ours (oracle),IABN (lr 1e-3),IABN+Ours (lambdas 1 -1 -2 lr 1e-3),Matched,Matched+logit (em),Matched+logit (oracle),Recommended,Recommended (oracle),TENT+Ours (decayed counts),TENT+Ours (readout),Decoupled+logit (tilt)"
recommended-results: $(VENV)/.results
	$(call measure,recommended-cifar10)
	$(call measure,beyond-cifar10,--only $(BEYOND))

# all that docs/reproduction.md asks for, and what goes beyond; settings are chosen first
reproduce-cifar10: $(VENV)/.results
	$(BIN)/twoshift calibrate --source checkpoints/cifar10-bn --folds 2 --data $(DATA)
	$(BIN)/twoshift calibrate --source checkpoints/cifar10-iabn --folds 2 --data $(DATA)
	$(call measure,selection-cifar10)
	$(call measure,finals-cifar10)
	$(call measure,table1-cifar10)
	$(call measure,ablations-cifar10)
	$(call measure,recommended-cifar10)
	$(call measure,beyond-cifar10)

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

bench: $(VENV)/.dev
	@failed=; \
	$(BIN)/python -m bench.runner_speed || failed=1; \
	$(BIN)/python -m bench.speed --page docs/speed.md || failed=1; \
	$(BIN)/python -m bench.loader || failed=1; \
	test -z "$$failed"

docs: $(VENV)/.docs
	$(BIN)/sphinx-build -q -W -b html docs docs/_build/html

clean:
	rm -rf $(VENV) demo docs/_build dist build
