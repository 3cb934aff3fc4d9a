//! Gives the shared library the name that programs linked with it ask for. The number changes with
//! the binary interface.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libfarpage.so.0");
    println!("cargo::rerun-if-changed=build.rs");
}
