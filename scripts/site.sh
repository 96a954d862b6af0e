#!/usr/bin/env bash
# The site: the repository's Markdown, figures and docstrings as pages in build/site/, which open from disk (index.html).
# A dead link, a name that a docstring gives wrongly or a page without a place in the navigation ends it with a message.
#
#   ./scripts/site.sh                          into .venv, with what building pages needs besides
#   SETUP=0 PYTHON=python3 ./scripts/site.sh   in a ready environment, nothing installed; torch need not be there
set -euo pipefail
[[ ${1:-} == -h || ${1:-} == --help ]] && { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0; }
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

say() { printf 'site: %s\n' "$*" >&2; }
(($# == 0)) || { say "it takes no arguments, got $*; --help says what it does"; exit 1; }

if [[ ${SETUP:-1} == 0 ]]; then
    ./scripts/python.sh -c ''
    ./scripts/python.sh -c 'import griffe, material, mkdocs_gen_files, mkdocs_literate_nav, mkdocs_redirects, mkdocstrings_handlers.python' 2>/dev/null || {
        say "SETUP=0 installs nothing, and ${PYTHON:-python3} lacks what builds pages: pip install -c constraints.txt mkdocs-material mkdocs-gen-files mkdocs-literate-nav mkdocs-redirects mkdocstrings-python, or run without SETUP=0"
        exit 1
    }
else
    ./scripts/setup.sh site
fi

# The variables silence remarks about MkDocs 2, which constraints.txt keeps out.
NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true ./scripts/python.sh -m mkdocs build --strict
say "build/site/index.html"
