//! Tells the binaries and the tests where libtorch lies: a run path reaches only the crate that asks for it.

fn main() {
    println!("cargo:rerun-if-changed=trainer/ztrain/build.rs");
    if let Ok(lib) = std::env::var("DEP_TCH_LIBTORCH_LIB") {
        println!("cargo:rustc-link-arg-bin=ztrain=-Wl,-rpath,{lib}");
        println!("cargo:rustc-link-arg-tests=-Wl,-rpath,{lib}");
    }
}
