#!/bin/sh
# Large counts, for whoever asks: too slow for every change.    sh tests/full.sh [SECTION ...]    without one: all of them
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

for section in ${@:-verdicts crashes}; do "$section"; done
