#!/bin/sh
# What holds on a GPU, and how fast it is there: checks and measures in ten minutes (tests/device.py says what), and writes device.json,
# device.txt and the row for the table of levels, anew after each check.
#
#   sh tests/device.sh --pack FOLDER [PROGRAMS]   FOLDER/pack.tar.xz, for a machine that builds nothing and reaches no network: programs,
#                                                 text, what the emulator leaves; built here, or as they lie in PROGRAMS
#   sh tests/device.sh PACK OUT [ARGUMENT...]     checks with a pack, or with a folder of programs; nothing is built, nothing fetched
#   sh tests/device.sh PACK OUT --train           leaves runs in OUT/trained, small enough to be copied
#   sh tests/device.sh PACK OUT --replay TRAINED  computes their steps again, on another GPU of the same architecture
#   sh tests/device.sh --merge OUT OTHER...       one outcome of several, each of some checks (--only)
#   sh tests/device.sh --pretend PACK OUT [..]    on a GPU that is not there: the stand-in, compiled by $CXX against $LIBTORCH
#
# Where the programs do not find the libtorch that they were built with, they take that of `python3`. Exit 0 where everything holds that
# could be looked at; what could not is said with its reason. Exit 6 where there is no GPU, or nothing starts.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
case "${1:-}" in
  --pack)
    mkdir -p "$2"
    folder=$(cd "$2" && pwd)
    if [ $# -lt 3 ]; then
      mkdir -p "$folder/built/emulated"
      cd "$root" && . tests/built.sh
      cargo build --release --locked --bin zdata --bin ztrain
      bin=$(release_folder)
      program=$(cargo test --release --locked -p kernels --lib --no-run --message-format json |
        python3 -c '
import json, sys
told = (json.loads(line) for line in sys.stdin if line.startswith("{"))
print([one["executable"] for one in told if one.get("executable") and one["target"]["name"] == "kernels"][-1])')
      cp "$bin/zdata" "$bin/ztrain" "$folder/built"
      cp "$program" "$folder/built/kernels"
      # Without a GPU the test keeps what the emulator leaves, and says that it has compared nothing.
      env -u LD_LIBRARY_PATH ZTRAIN_EMULATED="$folder/built/emulated" "$folder/built/kernels" --nocapture device::emulated::on_gpu::
    fi
    exec python3 -B "$root/tests/device.py" --pack "${3:-$folder/built}" "$folder" ;;
  --pretend)
    shift
    out=$2
    mkdir -p "$out/pretended"
    pretended=$(cd "$out/pretended" && pwd)
    : "${LIBTORCH:?names the libtorch that the programs were built against}"
    torch=$(cd "$LIBTORCH" && pwd)
    flags="-std=c++17 -O2 -shared -fPIC -pthread"
    (
      cd "$root/kernels/device"
      ${CXX:-c++} $flags -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" standin/gpu.cpp \
        -L "$torch/lib" -ltorch_cpu -lc10 -o "$pretended/libtorch_cuda.so"
      ${CXX:-c++} $flags -ffp-contract=off -fno-strict-aliasing emulator/driver.cpp emulator/emulator.cpp -o "$pretended/libcuda.so.1"
      cp "$pretended/libcuda.so.1" "$pretended/libnvrtc.so.13"
    )
    export LD_LIBRARY_PATH="$pretended${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" XDG_CACHE_HOME="$pretended" ;;
esac
[ $# -ge 2 ] || { sed -n '2,/^set/p' "$0" | grep '^#' >&2; exit 2; }
exec python3 -B "$root/tests/device.py" "$@"
