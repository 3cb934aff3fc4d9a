//! The C examples: compiled as C by gcc and as C++ by g++, against the shared and the static
//! library, by pkg-config and by CMake, and run.

mod common;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use common::{compile, have, pkg_config, prefix, scratch, serve};
use farpage_memserver::RunningServer;
use farpage_testkit::{run, socket_in, text};
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("examples")
        .join(name)
}

fn server() -> (RunningServer, TempDir) {
    let folder = tempfile::tempdir().expect("a folder for the socket");
    (serve(&socket_in(&folder).to_string()), folder)
}

/// Compiles an example as C and as C++. Returns the programs.
fn both_ways(name: &str, folder: &Path) -> Vec<PathBuf> {
    let ways = [("gcc", "c", "-std=gnu11"), ("g++", "c++", "-std=c++17")];
    ways.map(|(compiler, language, standard)| {
        let program = folder.join(compiler);
        compile(
            compiler,
            &["-x", language, standard],
            &[example(name)],
            "farpage",
            &program,
        );
        program
    })
    .into()
}

#[test]
fn remote_array_in_c_and_cpp() {
    if !have(&["gcc", "g++", "pkg-config"]) {
        return;
    }
    let (server, _folder) = server();
    for program in both_ways("remote.c", &scratch("remote")) {
        let output = run(
            Command::new(program).env("FARPAGE_SERVER", server.endpoints()[0].to_string()),
            PATIENCE,
        );
        let n: u128 = 1 << 22;
        let sum = ((n - 1) * n * (2 * n - 1) / 6) as u64;
        let printed = text(&output.stdout);
        assert!(printed.starts_with(&format!("sum {sum}; ")), "{printed}");
    }
}

#[test]
fn own_store_in_c_and_cpp() {
    if !have(&["gcc", "g++", "pkg-config"]) {
        return;
    }
    let folder = scratch("own_store");
    for program in both_ways("own_store.c", &folder) {
        let file = folder.join("pages");
        let output = run(Command::new(program).arg(&file), PATIENCE);
        assert_eq!(text(&output.stdout), "line 8192\n");
        let kept: Vec<u8> = fs::read(&file)
            .expect("it was made")
            .iter()
            .map(|byte| byte ^ 0x5a)
            .collect();
        assert_eq!(&kept[..7], b"line 0\0");
        assert_eq!(kept.len(), 1 << 20);
        fs::remove_file(file).expect("it is there");
    }
}

#[test]
fn program_linked_with_the_static_library_runs_without_the_shared_one() {
    if !have(&["gcc", "pkg-config"]) {
        return;
    }
    let folder = scratch("static");
    let program = folder.join("own_store");
    let private = pkg_config(&["--static", "--libs-only-l", "farpage"]);
    let mut command = Command::new("gcc");
    command
        .args(["-Wall", "-Wextra", "-Werror"])
        .args(pkg_config(&["--cflags", "farpage"]))
        .arg(example("own_store.c"))
        .arg(prefix().join("lib/libfarpage.a"))
        .args(private.iter().filter(|word| *word != "-lfarpage"))
        .arg("-o")
        .arg(&program);
    run(&mut command, Duration::from_secs(120));
    let output = run(Command::new(&program).arg(folder.join("pages")), PATIENCE);
    assert_eq!(text(&output.stdout), "line 8192\n");
    let needed = run(Command::new("ldd").arg(&program), PATIENCE);
    assert!(!text(&needed.stdout).contains("libfarpage"));
}

/// Uses the command lines of build files of programs written for Umap.
#[test]
fn program_whose_build_names_libumap_a_alone_runs_without_shared_libraries() {
    if !have(&["g++"]) {
        return;
    }
    let folder = scratch("libumap");
    let (source, program) = (folder.join("main.cpp"), folder.join("main"));
    let main = "#include <umap/umap.h>\nint main() { return umapcfg_get_umap_page_size() == 4096 ? 0 : 1; }\n";
    fs::write(&source, main).expect("it can be written");
    let mut command = Command::new("g++");
    command
        .arg("-I")
        .arg(prefix().join("include"))
        .arg(source)
        .arg(prefix().join("lib/libumap.a"))
        .arg("-pthread")
        .arg("-o")
        .arg(&program);
    run(&mut command, Duration::from_secs(120));
    run(&mut Command::new(&program), PATIENCE);
    let needed = text(&run(Command::new("ldd").arg(&program), PATIENCE).stdout);
    assert!(
        !needed.contains("libumap") && !needed.contains("libfarpage"),
        "{needed}"
    );
}

#[test]
fn cmake_finds_all_three_libraries() {
    if !have(&["cmake", "make", "gcc", "g++"]) {
        return;
    }
    let folder = scratch("cmake");
    let sources = folder.join("source");
    fs::create_dir_all(&sources).expect("a folder");
    let list = format!(
        "cmake_minimum_required(VERSION 3.13)\nproject(user C CXX)\nfind_package(farpage 0.1 REQUIRED)\n\
         add_executable(shared {0})\ntarget_link_libraries(shared farpage::farpage)\n\
         add_executable(static {0})\ntarget_link_libraries(static farpage::static)\n\
         add_executable(umap main.cpp)\ntarget_link_libraries(umap farpage::umap)\n",
        example("own_store.c").display()
    );
    fs::write(sources.join("CMakeLists.txt"), list).expect("it can be written");
    let main = "#include <umap/umap.h>\nint main() { return umapcfg_get_umap_page_size() == 4096 ? 0 : 1; }\n";
    fs::write(sources.join("main.cpp"), main).expect("it can be written");
    let build = folder.join("build");
    run(
        Command::new("cmake")
            .arg("-S")
            .arg(&sources)
            .arg("-B")
            .arg(&build)
            .arg(format!("-DCMAKE_PREFIX_PATH={}", prefix().display())),
        PATIENCE,
    );
    run(
        Command::new("cmake").arg("--build").arg(&build),
        Duration::from_secs(120),
    );
    for program in ["shared", "static"] {
        let output = run(
            Command::new(build.join(program)).arg(folder.join(program)),
            PATIENCE,
        );
        assert_eq!(text(&output.stdout), "line 8192\n", "{program}");
    }
    run(&mut Command::new(build.join("umap")), PATIENCE);
}

#[test]
fn pages_come_while_a_thread_is_inside_malloc() {
    if !have(&["gcc", "pkg-config"]) {
        return;
    }
    let program = scratch("malloc").join("malloc");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/malloc.c");
    compile("gcc", &["-std=gnu11"], &[source], "farpage", &program);
    let folder = tempfile::tempdir().expect("a folder for the socket");
    let shm = socket_in(&folder).to_string();
    for endpoint in [&*shm, "tcp://127.0.0.1:0"] {
        let server = serve(endpoint);
        for mode in ["filler", "in-thread"] {
            let mut program = Command::new(&program);
            program.env("FARPAGE_SERVER", server.endpoints()[0].to_string());
            let output = run(program.arg(mode), PATIENCE);
            assert_eq!(text(&output.stdout), "all pages came\n");
        }
    }
}
