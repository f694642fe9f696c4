#!/bin/sh
# Builds the wheel of the Python package into target/wheels (or the folder given): one for every Python from 3.10 on.
# maturin installs itself into target/maturin. It checks the library against the policies of manylinux and names the
# oldest glibc that will do: build where glibc is old (any image of manylinux) for a wheel that runs everywhere.
set -eu
cd "$(dirname "$0")/../.."
target=${CARGO_TARGET_DIR:-target}
out=$(realpath -m "${1:-$target/wheels}")
home=$target/maturin
[ -x "$home/bin/maturin" ] || { python3 -m venv "$home" && "$home/bin/pip" install --quiet 'maturin>=1.9,<2'; }
"$home/bin/maturin" build --release --locked --manifest-path loader/python/Cargo.toml --out "$out"
ls -l "$out"/zdata-*.whl
