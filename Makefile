.PHONY: setup check test test-all lint reports site

setup: ; ./scripts/setup.sh
check: ; ./.ci/run
test: ; ./scripts/test.sh
test-all: ; ./scripts/test.sh --all
lint: ; ./scripts/test.sh --lint-only
reports: ; ./scripts/run_all.sh
site: ; ./scripts/site.sh
