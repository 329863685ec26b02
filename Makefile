# Every command of the repository. `make` alone lists them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# The interpreter of this machine, never a downloaded one.
export UV_PYTHON_DOWNLOADS := never

PYTHON ?= python3.11
VENV := .venv/local
BIN := $(VENV)/bin
UV := .venv/bootstrap/bin/uv
DISTRIBUTIONS := settings connector gateway services/ctl services/engine services/simulator services/stack
# Of an environment with another vLLM; the stack and the gateway there for tests alone, without what only they need.
ENGINE_DISTRIBUTIONS := settings connector gateway services/engine services/stack
# What an interpreter with a vLLM of its own needs to import the connector from this checkout, and what compares answers.
CONNECTOR := settings/src:connector/src:services/engine/src
VERSION := 0.1.0
HELM ?= helm
KEYRING ?= $(HOME)/.gnupg/secring.gpg
CONTAINER ?= $(firstword $(foreach c,docker podman,$(if $(shell command -v $(c)),$(c))))
REGISTRY ?=
# bench-copy and bench-gpu need PyTorch (and vLLM) for CUDA, which the local environment does not hold.
PYTHON_CUDA ?= python3
ASCEND_VARIANTS ?= default
# The vLLM of engine images, and the tag of vllm-ascend's image that each pairs with (docs/versions.md).
IMAGE_VLLM = $(or $(VLLM),0.23)
IMAGE_SUFFIX = $(if $(filter-out 0.23,$(IMAGE_VLLM)),-vllm$(IMAGE_VLLM))
ASCEND_TAG_0.23 := v0.23.0
ASCEND_TAG_0.30 := v0.30.0
ASCEND_TAG_0.32 := v0.32.0rc1
ASCEND_TAG = $(ASCEND_TAG_$(IMAGE_VLLM))
ASCEND_REPOSITORY ?= $(if $(IMAGE_SUFFIX),,quay.io/ascend/vllm-ascend)
# Where vLLM's own image is, e.g. docker.io/vllm/vllm-openai; empty: no CUDA image is built.
CUDA_REPOSITORY ?=
REQUIREMENTS := requirements/uv.txt requirements/local.txt
NEEDS_INSTALL := { [ -x $(BIN)/python ] || { echo "nothing is installed here, so nothing runs; start with make up"; exit 1; }; }
# Engines of another vLLM have an environment of their own: VLLM=0.30 or 0.32; 0.23 is in the local one.
VLLM_ENVIRONMENTS := 0.30 0.32
# Versions of which no build for CPUs is on the package index: their environment runs vLLM's scheduler, not its engine.
VLLM_SCHEDULERS := 0.33
# Of VLLM_ENVIRONMENTS, what make test runs too.
TESTED_VLLM := 0.32
installed = .venv/vllm-$(1)/installed-$(shell cat requirements/vllm-$(1).txt $(ENGINE_DISTRIBUTIONS:%=%/pyproject.toml) | sha256sum | cut -c1-16)
COMMA := ,
ENGINE_STAMP := $(foreach version,$(filter $(VLLM_ENVIRONMENTS) $(VLLM_SCHEDULERS),$(subst $(COMMA), ,$(VLLM))),$(call installed,$(version)))
STAMP := .venv/installed-$(shell cat $(REQUIREMENTS) $(DISTRIBUTIONS:%=%/pyproject.toml) | sha256sum | cut -c1-16)

##@ Use
.PHONY: up
up: $(STAMP) $(ENGINE_STAMP) ## Install, prepare the model, start everything and wait for a first answer
##+ VLLM=0.23|0.30|0.32 PORT= ENGINES= MODEL= DTYPE=auto|bfloat16|float16|float32 MAX_LENGTH= DEVICE_BLOCKS=
##+ OFFLOAD=on|off NUM_CPU_BLOCKS= NODE_TIER=1GiB|off SHARED_TIER=nvme|redis|s3|none GATEWAY_PROCESSES=
##+ SELF_CHECK=auto|off SELF_CHECK_TEXT="sentences that the model knows"
##+ ENGINE_ARGS="arguments of vLLM" ENGINE_SET="key=value of the engine service"
	@$(BIN)/python -m spillway_stack up

.PHONY: demo
demo: $(STAMP) ## Show what offload is for: a table, build/demo/report.json and a chart. DEMO=--longest: the longest documents that fit
	@$(BIN)/python -m spillway_stack demo $(DEMO)

.PHONY: status
status: ## What runs; fails unless all of it is ready
	@$(NEEDS_INSTALL) && $(BIN)/python -m spillway_stack status

.PHONY: doctor
doctor: ## What is wrong with the running stack, as its processes say it, and what to change
	@$(NEEDS_INSTALL) && $(BIN)/python -m spillway_ctl doctor

.PHONY: logs
logs: ## The ends of the logs. COMPONENT=engine-0 for one of them
	@$(NEEDS_INSTALL) && $(BIN)/python -m spillway_stack logs $(COMPONENT)

.PHONY: down
down: ## End everything
	@$(NEEDS_INSTALL) && $(BIN)/python -m spillway_stack down

##@ Work on it
.PHONY: test
test: $(STAMP) $(if $(TESTS),$(ENGINE_STAMP),$(foreach version,$(TESTED_VLLM),$(call installed,$(version)))) ## Every test, engines included; the slowest 30 at the end
##+ TESTS=path narrows it; then VLLM=0.32 runs it in the environment of that vLLM
ifeq ($(TESTS),)
	@PYTHONPATH=tests $(BIN)/python -m lanes unit quick engine full $(if $(TESTED_VLLM),other-vllm --vllm $(TESTED_VLLM))
else
	@$(if $(filter $(VLLM_ENVIRONMENTS) $(VLLM_SCHEDULERS),$(VLLM)),.venv/vllm-$(VLLM)/bin/python,$(BIN)/python) -m pytest $(TESTS)
endif

.PHONY: test-vllm
test-vllm: $(STAMP) $(ENGINE_STAMP) ## What another vLLM runs of the tests, e.g. VLLM=0.33: of 0.33 those that start no engine. About ten minutes
	@PYTHONPATH=tests $(BIN)/python -m lanes other-vllm --vllm $(VLLM)

.PHONY: test-generations
test-generations: $(STAMP) $(foreach version,$(VLLM_ENVIRONMENTS) $(VLLM_SCHEDULERS),$(call installed,$(version))) ## What works on each vLLM, as a table and build/generations.json. VLLM="0.32" narrows it. Under twenty minutes on two cores
##+ GENERATIONS="--columns 'two ranks' LoRA" runs these alone and leaves the file's others as they are
	@PYTHONPATH=tests $(BIN)/python -m generations $(subst $(COMMA), ,$(VLLM)) $(GENERATIONS)

.PHONY: test-unit
test-unit: $(STAMP) ## Tests that need no vLLM and no server. Under four minutes on two idle cores
	@PYTHONPATH=tests $(BIN)/python -m lanes unit

.PHONY: test-quick
test-quick: $(STAMP) ## Everything but engines and the cluster: vLLM's modules, Valkey, Helm too. Under twenty minutes on two slow cores
	@PYTHONPATH=tests $(BIN)/python -m lanes unit quick

.PHONY: test-cluster
test-cluster: $(STAMP) ## The chart on a real Kubernetes on this machine: root, Go; compiles it once. KUBECONFIG= another one, KEEP_CLUSTER=1, WITH_KEDA=1, TESTS=
	@$(BIN)/python -m pytest $(or $(TESTS),tests/cluster)

.PHONY: test-ascend-acceptance
test-ascend-acceptance: $(STAMP) ## The acceptance script of an Ascend node on vLLM's CPU engine and the ACL emulator. About 5 minutes
	@TEST_ASCEND_ACCEPTANCE=1 $(BIN)/python -m pytest tests/ascend_acceptance

.PHONY: test-experts
test-experts: $(STAMP) ## Two data parallel ranks of a mixture of experts on CPUs, in lockstep. About 3 minutes
	@TEST_EXPERTS=1 $(BIN)/python -m pytest tests/engine_matrix/test_data_parallel.py -k mixture -n 0

.PHONY: test-models
test-models: ## Answers with and without offload on tiny models of every KV layout. About 25 minutes. PLATFORM=cuda PYTHON_CUDA=
ifeq ($(PLATFORM),cuda)
	@PYTHONPATH=tests:$(CONNECTOR) PYTHONHASHSEED=0 $(PYTHON_CUDA) -m engine_matrix --platform cuda $(if $(MODELS),--only $(MODELS))
else
	@$(MAKE) $(STAMP)
	@PYTHONPATH=tests PYTHONHASHSEED=0 $(BIN)/python -m engine_matrix $(if $(MODELS),--only $(MODELS))
endif

.PHONY: test-adapters
test-adapters: $(STAMP) ## LoRA adapters that two engines load and unload at run time, behind a gateway. About 3 minutes
	@TEST_ADAPTERS=1 $(BIN)/python -m pytest tests/e2e/test_adapters.py -n 0

.PHONY: test-real-engines
test-real-engines: $(STAMP) $(foreach version,$(TESTED_VLLM),$(call installed,$(version))) ## Harmful requests, coding agents, pauses, a cut index, changed weights, kills, quotas on real engines of 0.23 and 0.32; build/real-engines.json. Hours on two cores
##+ REAL_ENGINES="0.32 --parts poisoned failover" narrows it
	@PYTHONPATH=tests $(BIN)/python -m real_engines $(REAL_ENGINES)

.PHONY: test-random
test-random: $(STAMP) ## 100,000 random copies, 10,000 random schedules of each shape, and four times the examples of every property test
	@PYTHONPATH=tests $(BIN)/python -m lanes --profile full unit quick
	@PYTHONPATH=tests PYTHONHASHSEED=0 $(BIN)/python -m random_plans
	@PYTHONPATH=tests PYTHONHASHSEED=0 $(BIN)/python -m engine_lives

.PHONY: test-node-tier
test-node-tier: $(STAMP) ## 10,000 random schedules of engines that share the CPU tier of a node, and 1,000 that are stopped and killed. About twelve minutes
	@PYTHONPATH=tests $(BIN)/python -m node_tier

.PHONY: test-chain
test-chain: $(STAMP) ## An engine with a disk above a bucket: both are killed at random. CHAIN="--kills 30 --seed 0". About 40 s a kill
	@PYTHONPATH=tests $(BIN)/python -m engine_chain $(CHAIN)

.PHONY: test-selfcheck
test-selfcheck: $(STAMP) ## The start-up check of healthy and of broken engines, and 30 starts; build/selfcheck.json. About 45 minutes
	@PYTHONPATH=tests $(BIN)/python -m self_check $(SELFCHECK)

.PHONY: test-chaos
test-chaos: $(STAMP) ## 200 streams while engines and a gateway are killed, hung, slowed and restarted, with the counts
	@PYTHONPATH=tests $(BIN)/python -m chaos $(CHAOS)

.PHONY: test-ui
test-ui: $(STAMP) ## The live page in headless Chromium (Debian: apt install chromium; CHROMIUM= another). Shots in build/ui/
	@$(BIN)/python -m pytest tests/ui/page_in_chromium.py

.PHONY: check
check: $(STAMP) ## Style and types, no engine needed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy $(DISTRIBUTIONS:%=%/src) bench/gateway_load bench/routing_policies bench/stamping bench/system bench/traces

.PHONY: schema
schema: $(STAMP) ## Generate the chart's schema, the table of its README and lines of new settings in values.yaml from settings/
	@$(BIN)/python -m spillway_settings.values charts/spillway

.PHONY: bench-continued
bench-continued: $(STAMP) ## 100 streams on two engines, one of which is killed: failures, wrong answers and pauses. About seven minutes
	@PYTHONPATH=tests $(BIN)/python bench/continued_streams.py

.PHONY: bench-first-token
bench-first-token: $(STAMP) $(ENGINE_STAMP) ## Time to first token by tier, beside recomputing and upstream's fs tier. About ten minutes
##+ VLLM=0.23,0.32 measures both, and 0.32's own tiering with fs and with Spillway's tiers. About twenty minutes
##+ BENCH="--busy-loops 2" lets two processes compute beside the engines
	@$(BIN)/python bench/first_token.py $(if $(VLLM),--vllm $(subst $(COMMA), ,$(VLLM))) $(BENCH)

.PHONY: bench-chat-turns
bench-chat-turns: $(STAMP) ## Turns of a chat whose KV was evicted, with the KV of answers kept or not, and what keeping it costs. About 20 minutes
	@$(BIN)/python bench/chat_turns.py $(BENCH)

.PHONY: bench-narrow-path
bench-narrow-path: $(STAMP) ## Loads from an object store over narrow paths, without an engine: when they are given up. About three minutes
	@$(BIN)/python bench/narrow_path.py $(BENCH)

.PHONY: bench-first-token-stamps
bench-first-token-stamps: $(STAMP) $(ENGINE_STAMP) ## Where the time of one first token from a tier goes, by process. About four minutes
##+ BENCH="--tiers redis" measures one shared tier
	@$(BIN)/python bench/first_token_stamps.py $(BENCH)

.PHONY: bench-slow-tier
bench-slow-tier: $(STAMP) ## First tokens where the shared tier is slower than computing: computed, loaded, both at once. About ten minutes
	@$(BIN)/python bench/slow_tier.py $(BENCH)

.PHONY: bench-gpu-slow-tier
bench-gpu-slow-tier: ## The same on one CUDA device, with 32,000 tokens. PYTHON_CUDA= as below. About ten minutes
	@PYTHONPATH=$(CONNECTOR) $(PYTHON_CUDA) bench/slow_tier.py --cuda $(BENCH)

.PHONY: bench-tiers
bench-tiers: $(STAMP) ## Shared tiers beside fio, vLLM's fs tier and redis-py. BENCH="--only disk" narrows it
	@$(BIN)/python bench/tiers.py $(BENCH)

.PHONY: bench-promotion
bench-promotion: $(STAMP) ## First tokens of queued requests, promoted meanwhile or at their turn, and what useless promotions cost. About ten minutes
	@$(BIN)/python bench/promotion.py $(BENCH)

.PHONY: bench-load-cpu
bench-load-cpu: $(STAMP) ## Processor time of one load from NVMe and Redis, beside vLLM's fs tier and the least it can take
##+ BENCH=--stores measures stores instead
	@$(BIN)/python bench/load_cpu.py $(BENCH)

.PHONY: bench-copy
bench-copy: ## KV copies on one CUDA device by size of piece, direction and path. PYTHON_CUDA= an interpreter with CUDA's PyTorch
	@PYTHONPATH=$(CONNECTOR) $(PYTHON_CUDA) bench/copies.py $(BENCH)

.PHONY: bench-gpu
bench-gpu: ## Time to first token on one CUDA device by tier, beside upstream. PYTHON_CUDA= one with vLLM 0.23.0 for CUDA. About ten minutes
	@PYTHONPATH=$(CONNECTOR) $(PYTHON_CUDA) bench/gpu.py $(BENCH)

.PHONY: bench-gpu-no-hit
bench-gpu-no-hit: ## Throughput where nothing is ever hit on one CUDA device, beside upstream. PYTHON_CUDA= as above. About five minutes
	@PYTHONPATH=$(CONNECTOR) $(PYTHON_CUDA) bench/gpu_no_hit.py $(BENCH)

.PHONY: bench-gpu-burst
bench-gpu-burst: ## Requests that share a prefix, all at once, on one CUDA device, beside upstream. PYTHON_CUDA= as above. About six minutes
	@PYTHONPATH=$(CONNECTOR) $(PYTHON_CUDA) bench/gpu_burst.py $(BENCH)

.PHONY: bench-gpu-fair-steps
bench-gpu-fair-steps: ## A user beside a flood on one CUDA device, with fair_steps off and on. PYTHON_CUDA= as above. About eight minutes
	@PYTHONPATH=$(CONNECTOR) $(PYTHON_CUDA) bench/gpu_fair_steps.py $(BENCH)

.PHONY: bench-gpu-chat-turns
bench-gpu-chat-turns: ## bench-chat-turns on one CUDA device, compiled, with CUDA graphs. PYTHON_CUDA= as above. About 20 minutes
	@PYTHONPATH=$(CONNECTOR) $(PYTHON_CUDA) bench/gpu_chat_turns.py $(BENCH)

.PHONY: bench-turns
bench-turns: ## Multi-turn load on one CUDA device, by offload. PYTHON_CUDA= one with vLLM 0.23.0 for CUDA. About eight minutes
	@PYTHONPATH=$(CONNECTOR) $(PYTHON_CUDA) bench/multi_turn.py $(BENCH)

.PHONY: bench-routing
bench-routing: $(STAMP) ## Routing policies over simulated engines, one run, virtual time. About four minutes
	@$(BIN)/python bench/routing.py

.PHONY: bench-system
bench-system: $(STAMP) ## The whole under load, simulated: agents, a router, engines with tiers; systems in turns. About ten minutes
	@PYTHONPATH=bench $(BIN)/python -m system.simulate $(BENCH)

.PHONY: bench-disaggregation
bench-disaggregation: $(STAMP) ## Prefill and decode apart beside whole requests, on two CPU engines; on GPUs: bench/system/device.md. About ten minutes
##+ BENCH="--mixes mixed --seconds 60" narrows it
	@PYTHONPATH=bench $(BIN)/python -m system.disaggregation --tiny \
	  --model "$$($(BIN)/python -c 'from spillway_stack import bundled_model as it; print(it.prepare(lambda _: None))')" $(BENCH)

.PHONY: bench-disaggregation-simulated
bench-disaggregation-simulated: $(STAMP) ## The same over simulated engines with the times of an H200, in many runs. About ten minutes
	@PYTHONPATH=bench $(BIN)/python -m system.legs_simulated $(BENCH)

.PHONY: bench-retention
bench-retention: $(STAMP) ## Hit ratio of a full tier on agents' sessions, by order of eviction, beside Belady's. About ten minutes
	@$(BIN)/python bench/retention.py $(BENCH)

.PHONY: bench-prediction
bench-prediction: $(STAMP) ## Cached tokens that the gateway expects, by tier, beside what two real engines report. About eight minutes
	@$(BIN)/python bench/prediction.py $(BENCH)

.PHONY: bench-gateway
bench-gateway: $(STAMP) ## The gateway beside other routers over mock engines: requests/s, added time, CPU, memory. About seven minutes
	@$(BIN)/python bench/gateway.py $(BENCH)

.PHONY: bench-fairness
bench-fairness: $(STAMP) ## A user's first token beside a flood of another tenant or session, simulated. Minutes of CPU. BENCH=
	@$(BIN)/python bench/fairness.py $(BENCH)

.PHONY: bench-picker
bench-picker: $(STAMP) ## A real Envoy that asks the gateway for an engine, beside the gateway itself: added time, requests/s. About three minutes
	@$(BIN)/python bench/picker.py $(BENCH)

.PHONY: bench-prefix-index
bench-prefix-index: $(STAMP) ## What a turn costs the gateway in its prefix index, beside reading each block. One minute
	@$(BIN)/python bench/prefix_index.py $(BENCH)

.PHONY: bench-attack
bench-attack: $(STAMP) ## How much longer another client's stream waits while the gateway is attacked. An idle machine; about four minutes
	@$(BIN)/python -m pytest tests/attack tests/attack/large_state.py --stream-gaps

.PHONY: bench-word-clock
bench-word-clock: $(STAMP) ## What a clock tells a tenant of words that another one has sent to the gateway. One minute
	@$(BIN)/python bench/word_clock.py $(BENCH)

.PHONY: bench-scheduler
bench-scheduler: $(STAMP) ## Cost of an engine step on the scheduler's thread, beside upstream's manager
	@$(BIN)/python bench/scheduler_step.py $(BENCH)

.PHONY: bench-beside
bench-beside: $(STAMP) ## Any bench of an older commit and of this tree, in turns. BENCH="COMMIT scheduler_step -- --steps 300 --only ready"
	@$(BIN)/python bench/beside_commit.py $(BENCH)

.PHONY: bench-late-stores
bench-late-stores: $(STAMP) ## Late stores beside eager ones on vLLM's scheduler, in virtual time: copies, losses, what is found. Minutes of CPU
##+ BENCH="--sessions 16 --seeds 1" narrows it
	@PYTHONPATH=tests PYTHONHASHSEED=0 $(BIN)/python -m engine_lives.timed_agents $(BENCH)

.PHONY: bench-kv-rows
bench-kv-rows: $(STAMP) ## Bytes a token in the CPU tier of models with several KV groups, beside what the groups need. Seconds
	@$(BIN)/python bench/kv_rows.py $(BENCH)

.PHONY: bench-node-tier
bench-node-tier: $(STAMP) ## One CPU tier for engines of one machine: first tokens by whose prefix it is, after a kill, memory, hit ratio. About ten minutes
	@$(BIN)/python bench/node_tier.py $(BENCH)

.PHONY: bench-no-hit
bench-no-hit: $(STAMP) ## Throughput where nothing is ever hit: no offload, CPU tier, and shared tiers. About 8 GB
	@$(BIN)/python bench/no_hit.py $(BENCH)

.PHONY: bench-corruption
bench-corruption: $(STAMP) ## A million random corruptions of stored frames; none may be served
	@$(BIN)/python bench/corruption.py $(BENCH)

.PHONY: bench-soak
bench-soak: $(STAMP) ## Real engines under random faults, every answer checked. BENCH="--minutes 30 --tier both"
	@$(BIN)/python bench/soak.py $(BENCH)

.PHONY: install
install: $(STAMP) $(ENGINE_STAMP) ## The environment in .venv/local, and nothing else. VLLM=0.30|0.32|0.33: that of such engines or, for 0.33, schedulers too
	@$(foreach version,$(filter-out 0.23 $(VLLM_ENVIRONMENTS) $(VLLM_SCHEDULERS),$(subst $(COMMA), ,$(VLLM))), \
	  echo "VLLM=$(version) is none of 0.23 $(VLLM_ENVIRONMENTS) $(VLLM_SCHEDULERS); give one of them"; exit 1;)

.PHONY: requirements
requirements: $(UV) ## Compile requirements/*.txt from *.in. UPGRADE=1 takes the newest versions
	@cd requirements && export UV_CUSTOM_COMPILE_COMMAND="make requirements" && \
	compile="../$(UV) pip compile --quiet --python-version 3.11 --generate-hashes --no-emit-index-url $(if $(UPGRADE),--upgrade)" && \
	$$compile --override overrides.txt local.in --output-file local.txt && \
	for name in gateway build engine tools; do \
	  $$compile --constraint local.txt $$name.in --output-file $$name.txt || exit 1; done && \
	$$compile --constraint local.txt --override overrides.txt engine-cpu-0.23.in --output-file engine-cpu-0.23.txt && \
	for vllm in $(VLLM_ENVIRONMENTS); do \
	  compile_one="$$compile --override overrides-torch-2.13.txt" && \
	  $$compile_one --constraint engine.txt vllm-$$vllm.in --output-file vllm-$$vllm.txt && \
	  $$compile_one --constraint vllm-$$vllm.txt engine-cpu-$$vllm.in --output-file engine-cpu-$$vllm.txt || exit 1; done && \
	for vllm in $(VLLM_SCHEDULERS); do \
	  $$compile --override overrides-vllm-$$vllm.txt --constraint engine.txt vllm-$$vllm.in --output-file vllm-$$vllm.txt || exit 1; done && \
	$$compile uv.in --output-file uv.txt
	@! grep -nE '[a-z]+://' requirements/*.txt

##@ Package
.PHONY: images
images: ## Build the images with docker or podman. REGISTRY=host/path/ ASCEND_VARIANTS="default a3 310p a5 a3-openeuler"
##+ VLLM=0.23|0.30|0.32 of the engine images; from 0.30 on ASCEND_REPOSITORY=host/path/vllm-ascend
##+ CUDA_REPOSITORY=docker.io/vllm/vllm-openai: the CUDA image too
	@[ -n "$(CONTAINER)" ] || { echo "neither docker nor podman is installed; install one, or set CONTAINER="; exit 1; }
	@[ -n "$(ASCEND_TAG)" ] || { echo "VLLM=$(VLLM) is none of 0.23 $(VLLM_ENVIRONMENTS); give one of them"; exit 1; }
	@[ -n "$(ASCEND_REPOSITORY)" ] || [ -z "$(ASCEND_VARIANTS)" ] || { echo "ASCEND_REPOSITORY= is empty: vllm-ascend" \
	  "$(ASCEND_TAG) comes from third parties; name the repository that you have it from, or ASCEND_VARIANTS=\"\""; exit 1; }
	@build() { $(CONTAINER) build --build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD) "$$@" .; }; \
	build -f docker/gateway.Dockerfile -t $(REGISTRY)spillway-gateway:$(VERSION); \
	build -f docker/tools.Dockerfile -t $(REGISTRY)spillway-tools:$(VERSION); \
	build --build-arg VLLM=$(IMAGE_VLLM) \
	  -f docker/engine-cpu.Dockerfile -t $(REGISTRY)spillway-engine:$(VERSION)-cpu$(IMAGE_SUFFIX); \
	[ -z "$(CUDA_REPOSITORY)" ] || build --build-arg VLLM=$(IMAGE_VLLM) --build-arg BASE=$(CUDA_REPOSITORY):v$(IMAGE_VLLM).0 \
	  -f docker/engine-cuda.Dockerfile -t $(REGISTRY)spillway-engine:$(VERSION)-cuda$(IMAGE_SUFFIX); \
	for variant in $(ASCEND_VARIANTS); do \
	  suffix=$${variant#default}; suffix=$${suffix:+-$$suffix}; \
	  build --build-arg VLLM=$(IMAGE_VLLM) --build-arg BASE=$(ASCEND_REPOSITORY):$(ASCEND_TAG)$$suffix \
	    -f docker/engine-ascend.Dockerfile -t $(REGISTRY)spillway-engine:$(VERSION)-ascend$$suffix$(IMAGE_SUFFIX); \
	done

# Those that `make images` builds with the same variables, and the one that the chart takes from elsewhere.
BUILT_IMAGES = gateway:$(VERSION) tools:$(VERSION) engine:$(VERSION)-cpu$(IMAGE_SUFFIX) \
  $(if $(CUDA_REPOSITORY),engine:$(VERSION)-cuda$(IMAGE_SUFFIX)) \
  $(foreach variant,$(ASCEND_VARIANTS),engine:$(VERSION)-ascend$(patsubst %,-%,$(filter-out default,$(variant)))$(IMAGE_SUFFIX))
VALKEY_IMAGE = $(shell sed -n 's|.*image: "\(docker.io/[^"]*\)".*|\1|p' charts/spillway/Chart.yaml)

.PHONY: chart
chart: ## Package the chart into build/chart/. SOURCE=https://host/path of this repository, SIGN=key, HELM=helm
##+ SOURCE becomes the chart's home and source, and the alerts' links lead to its docs/operations.md
##+ The entries of CHANGELOG.md for this version become the annotation changes of Artifact Hub
##+ SIGN names a PGP key in KEYRING; helm then writes a provenance file beside the package, for helm verify
##+ SIGN_KEY_URL=https://... of the public key: its fingerprint and address become the annotation signKey
	@rm -rf build/chart && mkdir -p build/chart && cp -r charts/spillway build/chart/
	@awk -v version=$(VERSION) -f charts/changelog_entries.awk CHANGELOG.md > build/chart/changes.yaml
	@sed -i '/^annotations:/r build/chart/changes.yaml' build/chart/spillway/Chart.yaml
	@case "$(SOURCE)" in "") ;; \
	  https://*) printf 'home: %s\nsources: [%s]\n' "$(SOURCE)" "$(SOURCE)" >> build/chart/spillway/Chart.yaml; \
	    sed -i 's|^annotations:|&\n  artifacthub.io/links: "[{name: Changes, url: $(SOURCE)/blob/main/CHANGELOG.md}]"|' build/chart/spillway/Chart.yaml; \
	    sed -i 's|^    runbookBaseUrl: ""|    runbookBaseUrl: "$(SOURCE)/blob/main/docs/operations.md"|' build/chart/spillway/values.yaml;; \
	  *) echo "SOURCE=$(SOURCE) is no address; write https://host/path"; exit 1;; esac
	@case "$(SIGN_KEY_URL)" in "") ;; \
	  https://*) [ -n "$(SIGN)" ] || { echo "SIGN_KEY_URL needs SIGN, the key that it is of"; exit 1; }; \
	    print=$$(gpg --show-keys --with-colons "$(KEYRING)" | awk -F: -v key="$(SIGN)" '/^(pub|sec):/ { found = "" } \
	      /^fpr:/ && !found { found = $$10 } /^uid:/ && index($$10, key) { print found; exit }'); \
	    [ -n "$$print" ] || { echo "SIGN=$(SIGN) is no key in KEYRING=$(KEYRING)"; exit 1; }; \
	    sed -i "s|^annotations:|&\n  artifacthub.io/signKey: \"{fingerprint: $$print, url: $(SIGN_KEY_URL)}\"|" build/chart/spillway/Chart.yaml;; \
	  *) echo "SIGN_KEY_URL=$(SIGN_KEY_URL) is no address; write https://host/path"; exit 1;; esac
	@$(HELM) package build/chart/spillway -d build/chart $(if $(SIGN),--sign --key "$(SIGN)" --keyring "$(KEYRING)")

.PHONY: chart-push
chart-push: ## Push the packaged chart, with its provenance file if it has one. OCI=oci://host/path
	@case "$(OCI)" in oci://?*) ;; *) echo "OCI=$(OCI) is no address of a registry; write oci://host/path"; exit 1;; esac
	@$(HELM) push build/chart/spillway-*.tgz $(OCI)

.PHONY: sbom
sbom: ## CycloneDX lists of what all images hold, in build/sbom/. The variables of images choose them. Needs syft
	@mkdir -p build/sbom
	@for image in $(BUILT_IMAGES:%=$(REGISTRY)spillway-%) $(VALKEY_IMAGE); do \
	  name=$${image##*/}; echo "$$image"; \
	  syft "$$image" -o cyclonedx-json > "build/sbom/$$(echo "$$name" | tr : -).json" || exit 1; done

.PHONY: clean
clean: ## Remove the environment, caches and build results (not the state of a running stack)
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis

.PHONY: help
help: ## This list
	@awk 'BEGIN { FS = ":.*## " } /^##@ / { printf "\n%s\n", substr($$0, 5) } /^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 } /^##\+ / { printf "%25s %s\n", "", substr($$0, 5) }' $(MAKEFILE_LIST)

# The installer, pinned by hash like everything it installs.
$(UV): requirements/uv.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing; install it (Debian 12: apt install python3 python3-venv make git)"; exit 1; }
	@echo "installing the package installer"
	@$(PYTHON) -m venv .venv/bootstrap
	@.venv/bootstrap/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
	@touch $@

# Named after the content of what it was made from: present means up to date. Bytecode is compiled here, once, because
# each engine start imports the same large packages in three processes.
$(STAMP): | $(UV)
	@echo "installing the environment (some minutes the first time, about 6 GB)"
	@rm -f .venv/installed-*
	@[ -x $(BIN)/python ] || $(UV) venv --quiet --python $(PYTHON) $(VENV)
	@$(UV) pip sync --python $(BIN)/python --require-hashes --compile-bytecode requirements/local.txt
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --compile-bytecode $(DISTRIBUTIONS:%=-e ./%)
	@touch $@

# One environment for each vLLM, named after its content like the local one.
define engine_environment
$(call installed,$(1)): | $(STAMP)
	@echo "installing the environment of vLLM $(1) (some minutes the first time, about 6 GB)"
	@rm -f .venv/vllm-$(1)/installed-*
	@[ -x .venv/vllm-$(1)/bin/python ] || $(UV) venv --quiet --python $(PYTHON) .venv/vllm-$(1)
	@$(UV) pip sync --python .venv/vllm-$(1)/bin/python --require-hashes --compile-bytecode requirements/vllm-$(1).txt
	@$(UV) pip install --quiet --python .venv/vllm-$(1)/bin/python --no-deps --no-build-isolation --compile-bytecode \
	  $(ENGINE_DISTRIBUTIONS:%=-e ./%)
	@touch $$@
endef
$(foreach version,$(VLLM_ENVIRONMENTS) $(VLLM_SCHEDULERS),$(eval $(call engine_environment,$(version))))
