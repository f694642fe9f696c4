#!/bin/sh
# Large counts, run on request: too slow for every change.    sh tests/full.sh [SECTION ...]    without one: all of them
set -eu
cd "$(dirname "$0")/.."

# Planted trouble of eleven kinds and 200 ordinary steps, each explained: a table, and what was not named.
verdicts() {
  FULL=1 cargo test -p trainer --test it -- verdicts --nocapture
}

# Every writer after several hundred losses of power, and every byte of a store turned.
crashes() {
  FULL=1 cargo test -p ingest --lib -- crashes:: verify::
  FULL=1 cargo test -p trainer --test it -- crashes::
}

# The dedup scan of 10^7 documents in 64 MiB. One test alone in its process, whose memory is looked at.
scan() {
  FULL=1 cargo test -p ingest --lib -- memory_is_bounded_whatever_the_number_of_documents
}

# What ranks hold, send and lose, in more ways to share the work.
ranks() {
  FULL=1 cargo test --test it -- memory:: between::
  FULL=1 cargo test -p trainer --test it -- folded::
}

# A run in each tracker, by its own package.
trackers() {
  FULL=1 cargo test --test it -- metrics:: --nocapture
}

# The Python package from its wheel, with the whole of PyTorch: the tests of CI, and a Trainer of Hugging Face transformers.
package() {
  copy=$(mktemp -d)
  trap 'rm -rf "$copy"' EXIT
  sh loader/python/wheel.sh "$copy"
  python3 -m venv "$copy/venv"
  "$copy/venv/bin/pip" install --quiet torch==2.11.0 torchdata transformers accelerate "$copy"/zdata-*.whl
  cd "$copy"
  "$copy/venv/bin/zdata" --version
  for test in test_zdata.py test_torch.py; do FULL=1 "$copy/venv/bin/python" "$OLDPWD/loader/python/tests/$test"; done
  cd "$OLDPWD"
}

# Every property with twenty times its cases, in a copy of the tree.
cases() {
  copy=$(mktemp -d)
  trap 'rm -rf "$copy"' EXIT
  git clone -q . "$copy/tree"
  export CARGO_TARGET_DIR="$PWD/target"
  cd "$copy/tree"
  grep -rlE 'with_cases\([0-9]+\)|cases: [0-9]+,' --include=*.rs . \
    | xargs sed -i -E 's/with_cases\(([0-9]+)\)/with_cases(\1 * 20)/; s/cases: ([0-9]+),/cases: \1 * 20,/'
  for crate in mixer loader kernels trainer ingest; do cargo test -p "$crate" --lib --no-fail-fast; done
}

for section in ${@:-verdicts crashes scan ranks trackers package}; do "$section"; done
