# The front door: what a newcomer types. Details are in scripts/ and guest/.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
# setup comes before build, whatever -j says.
.NOTPARALLEL:
.PHONY: help setup build demo test soak deb release bench lint

help: ## what can be asked for
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## packages (QEMU >= 10), Rust and guest images; does only what is missing
	@scripts/setup

build: ## the program (target/release/memfold), the library for QEMU and the guest agent
	@scripts/build

demo: ## boot three real VMs, fold them, show what was saved next to KSM
	@scripts/demo

test: ## what a change must not break, real guests included; where the time went
	@scripts/setup tests
	@scripts/test

soak: setup ## what takes long, or luck; goes on where it was interrupted
	@scripts/soak

deb: ## Debian packages: program, studies, library for QEMU, agent for guests
	@scripts/setup tests
	@scripts/build
	@scripts/deb

release: ## a signed apt repository, agent archive, bill of materials, notes: a directory for a web server
	@scripts/setup tests
	@scripts/release

bench: setup build ## the studies, quick ones: results in results/
	@scripts/bench

lint: ## formatting, clippy and shellcheck, without warnings
	@scripts/lint
