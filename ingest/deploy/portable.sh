#!/bin/sh
# Builds a `zdata` for any Linux of this processor with glibc 2.28 or newer (2018), whatever this machine has; without libtorch.
#
#   sh ingest/deploy/portable.sh [FILE]      default: target/portable/zdata
#
# It needs what `cargo build` needs, and pip, which fetches the linker (zig with its headers of every glibc, 80 MB) once into
# ~/.cache/ztrain. The binary needs glibc alone.
set -eu
cd "$(dirname "$0")/../.."
glibc=2.28
tools=${XDG_CACHE_HOME:-$HOME/.cache}/ztrain/zig-0.17.1
if [ ! -x "$tools/bin/cargo-zigbuild" ]; then
  python3 -m venv "$tools"
  "$tools/bin/python" -m pip install --quiet --disable-pip-version-check ziglang==0.17.1 cargo-zigbuild==0.24.1
fi
export PATH="$tools/bin:$PATH"

target=$(uname -m)-unknown-linux-gnu
cargo-zigbuild zigbuild --profile release --locked --no-default-features --features clouds --bin zdata --target "$target.$glibc"
folder=$(cargo metadata --locked --offline --no-deps --format-version 1 |
  python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
file=${1:-$folder/portable/zdata}
mkdir -p "$(dirname "$file")"
cp "$folder/$target/release/zdata" "$file"

# What it asks for is what was promised.
newest=$(readelf --version-info --wide "$file" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1)
libraries=$(readelf --dynamic --wide "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | tr '\n' ' ')
for library in $libraries; do
  case $library in
  libc.so.6 | libm.so.6 | libpthread.so.0 | libdl.so.2 | librt.so.1 | libutil.so.1 | ld-linux*) ;;
  *) echo "$file needs $library" >&2; exit 1 ;;
  esac
done
if [ "$(printf 'GLIBC_%s\n%s\n' $glibc "$newest" | sort -V | tail -n 1)" != "GLIBC_$glibc" ]; then
  echo "$file needs $newest" >&2
  exit 1
fi
"$file" --version
echo "$file: $newest, $libraries"
