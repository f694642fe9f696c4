#!/bin/sh
# What holds on a GPU, and how fast it is there: checks and measures in ten minutes (tests/device.py says what), and writes device.json,
# device.txt and the row for the table of levels.
#
#   sh tests/device.sh --pack FOLDER              builds what the check runs, for another machine: programs, text, what the emulator leaves
#   sh tests/device.sh FOLDER OUT [ARGUMENT...]   checks with what lies in FOLDER; nothing is built, nothing fetched
#   sh tests/device.sh --pretend FOLDER OUT [..]  the same on a GPU that is not there: the stand-in, compiled by $CXX against $LIBTORCH
#
# The programs find their CPU half of libtorch where it lay when they were built, else by LD_LIBRARY_PATH; its GPU half as
# `ztrain devices` says. Exit 0 where everything holds that could be looked at; what could not is said with its reason.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
case "${1:-}" in
  --pack)
    folder=$2
    mkdir -p "$folder/emulated"
    folder=$(cd "$folder" && pwd)
    cd "$root" && . tests/built.sh
    cargo build --release --locked --bin zdata --bin ztrain
    bin=$(release_folder)
    program=$(cargo test --release --locked -p kernels --lib --no-run --message-format json |
      python3 -c '
import json, sys
told = (json.loads(line) for line in sys.stdin if line.startswith("{"))
print([one["executable"] for one in told if one.get("executable") and one["target"]["name"] == "kernels"][-1])')
    cp "$bin/zdata" "$bin/ztrain" "$folder"
    cp "$program" "$folder/kernels"
    # Without a GPU the test keeps what the emulator leaves, and says that it has compared nothing.
    env -u LD_LIBRARY_PATH ZTRAIN_EMULATED="$folder/emulated" "$folder/kernels" --exact --nocapture \
      device::emulated::on_gpu::a_gpu_leaves_the_bits_of_the_emulator
    echo "packed: sh tests/device.sh $folder OUT"
    exit ;;
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
[ $# -ge 2 ] || { sed -n 2,11p "$0" >&2; exit 2; }
exec python3 -B "$root/tests/device.py" "$@"
