.PHONY: setup test lint reports

setup: ; ./scripts/setup.sh
test: ; ./scripts/test.sh
lint: ; ./scripts/test.sh --lint-only
reports: ; ./scripts/run_all.sh
