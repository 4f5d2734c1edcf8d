# make demo    sets everything up, then fine-tunes a small pretrained model (about two minutes)
# make check   sets everything up, then builds and runs every test, the C ones under sanitizers too
#
# make         build/forebay                       make bench       run the benchmark programs
# make setup   what building and testing need      make install     into PREFIX (/usr/local); DESTDIR is respected
# make bundle  a folder (and archive) that runs from wherever it is put
# make test    every test on the plain build       make deps        which folder of src includes which
# make test-asan, test-tsan   C tests, sanitized   make clean       remove the builds; distclean: all that is not in git
# make fuzz    each parser FUZZ_SECONDS (60) long  make fuzz-merge  keep the fewest inputs that reach what was reached
#
# Each target is safe to run again, and quick when there is nothing to do.  JOBS=2 limits the compiler's jobs.

PREFIX ?= /usr/local
JOBS   ?=
PYTHON := .venv/bin/python
SHELL  := /bin/sh

# Progress on a terminal, only what goes wrong elsewhere.
compile = [ -t 1 ] || quiet=--quiet; cmake --build --preset $(1) $(if $(JOBS),-j $(JOBS)) -- $$quiet

all: setup build/build.ninja
	@$(call compile,cpu)

setup:
	@tools/setup.sh

demo-setup:
	@tools/setup.sh demo

demo: demo-setup all
	@demo/run.sh

check: asan tsan all
	@$(PYTHON) tools/run_tests.py build build-asan build-tsan

test: all
	@$(PYTHON) tools/run_tests.py build

test-asan: asan
	@$(PYTHON) tools/run_tests.py --programs-only build-asan

test-tsan: tsan
	@$(PYTHON) tools/run_tests.py --programs-only build-tsan

asan tsan: %: setup build-%/build.ninja
	@$(call compile,$@)

fuzz-setup:
	@tools/setup.sh fuzz

fuzz-build: fuzz-setup build-fuzz/build.ninja
	@$(call compile,fuzz)

fuzz: fuzz-build
	@nice tests/fuzz/run.sh build-fuzz

fuzz-merge: fuzz-build
	@tests/fuzz/run.sh build-fuzz merge

# Configured once; after that the build tool notices by itself when the configuration has changed.
build/build.ninja: CMakePresets.json | setup
	@cmake --preset cpu --log-level=WARNING >/dev/null

build-%/build.ninja: CMakePresets.json | setup
	@cmake --preset $* --log-level=WARNING >/dev/null

bench: all
	@for program in build/bench/*; do echo "== $$program" && $$program || exit; done

install: all
	@cmake --install build --prefix $(PREFIX)

bundle: all
	@tools/bundle.sh build build/bundle

deps:
	@grep -rEo --include='*.[ch]' '#include "[a-z]+/' src | sed -E 's|^src/([a-z]+)/.*"([a-z]+)/|\1 -> \2|' \
	| awk '$$1 != $$3' | sort | uniq -c

clean:
	rm -rf build build-asan build-tsan build-fuzz

distclean: clean
	rm -rf .venv demo/out

.PHONY: all setup demo-setup demo check test test-asan test-tsan asan tsan fuzz-setup fuzz-build fuzz fuzz-merge bench install bundle \
        deps clean distclean
