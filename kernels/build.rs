//! Compiles the C++ shim, and sets libtorch's run path for the tests of this crate.

use std::path::{Path, PathBuf};

const SOURCES: [&str; 10] = [
    "shim/attention.cpp",
    "shim/device.cpp",
    "shim/group.cpp",
    "shim/memory.cpp",
    "shim/product.cpp",
    "shim/profiler.cpp",
    "shim/shapes.cpp",
    "shim/signals.cpp",
    "shim/switches.cpp",
    "shim/tensors.cpp",
];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=shim");
    let lib = PathBuf::from(
        std::env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys says where libtorch lies"),
    );
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());
    println!("cargo:rustc-link-lib=dl");
    // Clippy does not link and has its own build directory, so compiling the shim for it would be wasted.
    println!("cargo:rerun-if-env-changed=RUSTC_WORKSPACE_WRAPPER");
    let wrapper = std::env::var_os("RUSTC_WORKSPACE_WRAPPER").map(PathBuf::from);
    if wrapper
        .is_some_and(|wrapper| wrapper.file_stem().is_some_and(|name| name == "clippy-driver"))
    {
        return;
    }
    let include = lib.parent().unwrap_or(Path::new("/")).join("include");
    cc::Build::new()
        .cpp(true)
        .files(SOURCES)
        .include(&include)
        .include(include.join("torch/csrc/api/include"))
        // c10d uses types of Gloo, whose headers no libtorch ships.
        .include("shim/gloo")
        .flag("-std=c++17")
        .flag("-D_GLIBCXX_USE_CXX11_ABI=1")
        .warnings(false)
        // The same machine code in every profile: debug and release builds must compute the same bits.
        .opt_level(2)
        .compile("ztrain_shim");
}
