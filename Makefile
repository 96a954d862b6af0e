.PHONY: setup test test-all lint reports

setup: ; ./scripts/setup.sh
test: ; ./scripts/test.sh
test-all: ; ./scripts/test.sh --all
lint: ; ./scripts/test.sh --lint-only
reports: ; ./scripts/run_all.sh
