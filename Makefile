.PHONY: help setup check test test-all fuzz sanitize-cpu lint reports site notebooks versions

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
setup: ## make .venv with every package installed editable
	./scripts/setup.sh
check: ## run what CI runs: set-up, lint, the tests that are not slow
	./.ci/run
test: ## the same
	./scripts/test.sh
test-all: ## run the slow tests too
	./scripts/test.sh --all
fuzz: ## run random programs of every lens against their oracles
	./scripts/fuzz.sh
sanitize-cpu: ## run the CPU kernels under AddressSanitizer and UBSan
	./scripts/sanitize_cpu.sh
lint: ## run ruff, mypy and the import contracts
	./scripts/test.sh --lint-only
reports: ## measure everything on this machine and write the reports
	./scripts/run_all.sh
site: ## build every page and docstring into build/site/index.html
	./scripts/site.sh
notebooks: ## make Jupyter notebooks of the chapters in docs/learn
	./scripts/setup.sh notebooks && ./scripts/python.sh scripts/chapters.py notebooks
versions: ## test other versions of Python, torch and jax, with nox
	./scripts/versions.sh
