# What the scripts beside this share; each reads it in the project's folder: `. tests/built.sh`.

# release_folder: where the programs lie that `cargo build --release` makes.
release_folder() {
  cargo metadata --locked --offline --no-deps --format-version 1 |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"] + "/release")'
}

# dependencies FILE: what cargo knows of this project's dependencies on this machine. Not offline: the build fetched what it
# needed, the list also names what only tests use.
dependencies() {
  cargo metadata --locked --filter-platform "$(rustc -vV | sed -n 's/^host: //p')" --format-version 1 >"$1"
}

# oddest RUN: the step of a run, by the program in $bin, that lies farthest from usual.
oddest() {
  "$bin/ztrain" spikes --run "$1" --json | python3 -c '
import json, sys
far = lambda one: max(abs(reason["score"] or 0) for reason in one["reasons"])
print(max(map(json.loads, sys.stdin), key=far)["farthest"])'
}
