//! Tells the binaries and the tests where libtorch is: a run path reaches only the crate that asks for it.

fn main() {
    println!("cargo:rerun-if-changed=trainer/ztrain/build.rs");
    if let Ok(lib) = std::env::var("DEP_TCH_LIBTORCH_LIB") {
        // A `ztrain` that was copied to another machine finds a copy of libtorch in `lib` next to itself.
        println!("cargo:rustc-link-arg-bin=ztrain=-Wl,-rpath,{lib}:$ORIGIN/lib");
        println!("cargo:rustc-link-arg-tests=-Wl,-rpath,{lib}");
    }
}
