//! The interface of Umap, used by C++ programs: each case of `tests/umap` in a process of its own.
//!
//! The rule it keeps: a case that hangs or crashes fails alone.

mod common;

use std::{
    collections::BTreeSet,
    fs,
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
    time::Duration,
};

use common::{compile, have, scratch, serve, sources};
use farpage_testkit::{finish, run, socket_in, text};

const PATIENCE: Duration = Duration::from_secs(120);
/// Size of the buffer. Small, so that everything is evicted all the time.
const BUFFER_PAGES: &str = "64";

fn program() -> &'static Path {
    static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
        let program = scratch("program").join("umap");
        let more = ["-std=c++17", "-O1"];
        compile(
            "g++",
            &more,
            &sources("tests/umap", "cpp"),
            "umap",
            &program,
        );
        program
    });
    &PROGRAM
}

/// Returns the command of a case in a folder of its own; `None` if it cannot be compiled here.
fn case(name: &str) -> Option<Command> {
    if !have(&["g++", "pkg-config"]) {
        return None;
    }
    let folder = scratch(name);
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).expect("it is ours");
    let mut command = Command::new(program());
    command
        .arg(name)
        .env("CASE_FOLDER", folder)
        .env("UMAP_BUFSIZE", BUFFER_PAGES)
        .env("UMAP_PAGE_FILLERS", "2")
        .env("UMAP_PAGE_EVICTORS", "2")
        .env("FARPAGE_DEADLINE", "2")
        // The C library gives new threads arenas of 64 MiB of addresses each, which would look like
        // growth.
        .env("MALLOC_ARENA_MAX", "1");
    Some(command)
}

/// Makes tests of cases that need only the usual environment.
macro_rules! cases {
    ($($name:ident),+ $(,)?) => {
        $(
            #[test]
            fn $name() {
                if let Some(mut command) = case(stringify!($name)) {
                    run(&mut command, PATIENCE);
                }
            }
        )+
        const PLAIN: &[&str] = &[$(stringify!($name)),+];
    };
}

cases![
    unmap_while_evicting,
    flush_while_evicting,
    concurrent_map_and_unmap,
    prefetched_pages_need_no_fault_later,
    pinned_pages_stay_though_written_and_pinned_twice,
    file_is_mapped_from_its_offset,
    short_file_reads_as_zeros_and_keeps_its_length,
    file_that_somebody_cuts_is_an_error_not_zeros,
    sizes_that_are_no_multiple_of_a_page,
    wrong_arguments_are_an_errno,
    region_that_is_read_only_leaves_its_file_alone,
    files_opened_for_appending_and_for_direct_access,
    ten_thousand_regions,
    thousands_of_cycles_without_growth,
    page_size_of_a_region_is_its_stores,
    page_that_cannot_be_read_raises_sigbus,
    store_that_throws_is_a_store_that_fails,
    store_that_returns_less_shows_zeros_and_no_other_pages_bytes,
    segmentation_faults_elsewhere_are_the_programs,
    slow_store_does_not_stall_other_regions,
    child_after_fork,
    fork_while_other_threads_work,
    madvise_dontneed_by_the_application,
    file_store_made_by_hand,
    sparse_store_makes_files_on_demand_and_is_opened_again,
    sparse_store_of_an_absurd_size_is_an_error,
    sparse_store_from_several_threads,
    network_client_without_a_server_throws,
    fixed_region_keeps_its_neighbours,
    fixed_region_replaces_a_part_of_another,
    fixed_regions_of_several_files_replace_one_from_its_beginning,
    write_to_a_read_only_region_is_a_segmentation_fault,
    munmap_by_the_application,
    munmap_of_parts_of_pages,
    mremap_by_the_application,
    what_the_application_maps_into_a_region_is_its_own,
    application_maps_over_pages_that_are_being_evicted,
];

/// Cases that a test of their own runs, below.
const WITH_MORE: &[&str] = &[
    "tiny_buffer",
    "regions_share_the_buffer",
    "environment_is_told_back",
    "messages_up_to_the_level_asked_for",
    "network_arrays_as_on_the_poster",
    "store_that_writes_too_much_is_named",
    "page_that_cannot_be_written_is_reported_and_kept",
    "posters_call_needs_three_lines_before_it",
    "unprivileged_use",
];

#[test]
fn every_case_is_run() {
    if !have(&["g++", "pkg-config"]) {
        return;
    }
    let listed = text(&run(Command::new(program()).arg("--list"), PATIENCE).stdout);
    let listed: BTreeSet<&str> = listed.lines().collect();
    let run: BTreeSet<&str> = PLAIN.iter().chain(WITH_MORE).copied().collect();
    assert_eq!(listed, run);
}

#[test]
fn tiny_buffer() {
    for pages in ["1", "2", "3", "16"] {
        if let Some(mut command) = case("tiny_buffer") {
            command
                .env("UMAP_BUFSIZE", pages)
                .env("UMAP_PAGE_FILLERS", "8");
            run(&mut command, PATIENCE);
        }
    }
}

#[test]
fn regions_share_the_buffer() {
    if let Some(mut command) = case("regions_share_the_buffer") {
        run(command.env("UMAP_BUFSIZE", "1024"), PATIENCE);
    }
}

#[test]
fn page_that_cannot_be_written_is_reported_and_kept() {
    let Some(mut command) = case("page_that_cannot_be_written_is_reported_and_kept") else {
        return;
    };
    let said = text(&run(&mut command, PATIENCE).stderr);
    assert!(said.contains("umap ERROR: umap_flush: "), "{said}");
    assert!(
        said.contains("umap ERROR: uunmap: the region stays mapped: "),
        "{said}"
    );
}

#[test]
fn network_arrays_as_on_the_poster() {
    with_servers("network_arrays_as_on_the_poster");
}

#[test]
fn posters_call_needs_three_lines_before_it() {
    with_servers("posters_call_needs_three_lines_before_it");
}

/// Runs a case with a server of each kind.
fn with_servers(name: &str) {
    let Some(mut command) = case(name) else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder for the socket");
    let shm = socket_in(&folder).to_string();
    for endpoint in [shm.as_str(), "tcp://127.0.0.1:0"] {
        let server = serve(endpoint);
        let endpoint = server.endpoints()[0].to_string();
        // A host and a port alone are enough.
        run(
            command.env("SERVER", endpoint.trim_start_matches("tcp://")),
            PATIENCE,
        );
    }
}

#[test]
fn store_that_writes_too_much_is_named() {
    // A whole page, and the last page, which is shorter.
    for (too_many, touch, asked) in [
        ("1", "0", "4096 bytes that it was asked for at offset 0"),
        (
            "4096",
            "5000",
            "4096 bytes that it was asked for at offset 4096",
        ),
        (
            "1",
            "12300",
            "100 bytes that it was asked for at offset 12288",
        ),
    ] {
        let Some(mut command) = case("store_that_writes_too_much_is_named") else {
            return;
        };
        command.env("TOO_MANY", too_many).env("TOUCH", touch);
        command.env("UMAP_READ_AHEAD", "0");
        let output = finish(&mut command, PATIENCE);
        let said = text(&output.stderr);
        assert_eq!(
            output.status.signal(),
            Some(11),
            "{}: {said}",
            output.status
        );
        for expected in ["StoreThatWritesTooMuch", asked] {
            assert!(said.contains(expected), "{said}");
        }
    }
}

#[test]
fn unprivileged_use() {
    let Some(mut command) = case("unprivileged_use") else {
        return;
    };
    let is_root = fs::metadata("/proc/self").is_ok_and(|about| about.uid() == 0);
    // A folder that another user can read: the checkout may be root's alone.
    let folder = tempfile::tempdir().expect("a folder");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).expect("it is ours");
    if is_root {
        for library in ["libumap.so.0", "libfarpage.so.0"] {
            let from = common::prefix().join("lib").join(library);
            fs::copy(from, folder.path().join(library)).expect("it can be copied");
        }
        let copy = folder.path().join("umap");
        fs::copy(program(), &copy).expect("it can be copied");
        let mut theirs = Command::new(copy);
        theirs.args(command.get_args());
        theirs.envs(
            command
                .get_envs()
                .filter_map(|(name, value)| Some((name, value?))),
        );
        command = theirs;
        command.uid(65534).gid(65534);
    }
    command
        .env("CASE_FOLDER", folder.path())
        .env("LD_LIBRARY_PATH", folder.path());
    run(&mut command, PATIENCE);
}

/// The environment's values, the values that libumap reports, and a message if they differ.
#[test]
fn environment_is_told_back() {
    let names = [
        "PAGESIZE",
        "BUFSIZE",
        "PAGE_FILLERS",
        "PAGE_EVICTORS",
        "MAX_FAULT_EVENTS",
        "READ_AHEAD",
        "EVICT_HIGH_WATER_THRESHOLD",
        "EVICT_LOW_WATER_THRESHOLD",
    ];
    let told = [
        "PAGESIZE", "BUFSIZE", "FILLERS", "EVICTORS", "EVENTS", "AHEAD", "HIGH", "LOW",
    ];
    let pages = farpage::Allowance::of_this_process().bytes / 65_536;
    let all_pages = pages.to_string();
    let table = [
        (
            ["65536", "99999999999999", "3", "2", "64", "7", "80", "60"],
            ["65536", &all_pages, "3", "2", "64", "7", "80", "60"],
            "UMAP_BUFSIZE=99999999999999 is not in 2 to",
        ),
        (
            ["65536", "100", "3", "2", "64", "7", "80", "60"],
            ["65536", "100", "3", "2", "64", "7", "80", "60"],
            "",
        ),
        // The nearest valid value, and a message.
        (
            ["5000", "1", "99", "99", "x", "0", "200", "300"],
            ["4096", "2", "2", "64", "256", "0", "100", "99"],
            "UMAP_PAGESIZE=5000 is no power of two",
        ),
        // The default, and a message.
        (
            ["65536", "100", "3", "2", "64", "7", "x", "x"],
            ["65536", "100", "3", "2", "64", "7", "95", "90"],
            "UMAP_EVICT_LOW_WATER_THRESHOLD=x is no number",
        ),
        (
            ["99999999", "10", "1", "1", "1", "-1", "50", "60"],
            ["2097152", "10", "1", "1", "1", "0", "50", "49"],
            "UMAP_READ_AHEAD=-1 is no number",
        ),
    ];
    for (given, expected, complaint) in table {
        let Some(mut command) = case("environment_is_told_back") else {
            return;
        };
        for (name, value) in names.iter().zip(given) {
            command.env(format!("UMAP_{name}"), value);
        }
        for (name, value) in told.iter().zip(expected) {
            command.env(format!("EXPECT_{name}"), value);
        }
        let said = text(&run(&mut command, PATIENCE).stderr);
        assert!(said.contains(complaint), "{said}");
        assert_eq!(said.is_empty(), complaint.is_empty(), "{said}");
    }
}

#[test]
fn messages_up_to_the_level_asked_for() {
    let names = ["ERROR", "WARNING", "INFO"];
    // The second column is the number of messages that are printed.
    let table = [
        (Some("ERROR"), 1),
        (None, 2),
        (Some("warning"), 2),
        (Some("INFO"), 3),
        (Some("DEBUG"), 3),
        // The default, and a message.
        (Some("LOUD"), 2),
    ];
    for (level, said) in table {
        let Some(mut command) = case("messages_up_to_the_level_asked_for") else {
            return;
        };
        match level {
            Some(level) => command.env("UMAP_LOG_LEVEL", level),
            None => command.env_remove("UMAP_LOG_LEVEL"),
        };
        command.env("UMAP_PAGESIZE", "5000");
        let lines = text(&run(&mut command, PATIENCE).stderr);
        for (number, name) in names.iter().enumerate() {
            let has = lines.contains(&format!("umap {name}: "));
            assert_eq!(has, number < said, "{level:?}, {name}: {lines}");
        }
        let complains = lines.contains("UMAP_LOG_LEVEL=LOUD: need ");
        assert_eq!(complains, level == Some("LOUD"), "{lines}");
    }
}
