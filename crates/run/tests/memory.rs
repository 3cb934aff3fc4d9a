//! Memory under `farpage run` behaves as in a plain run.
//!
//! The rule it keeps: bytes that programs read are compared with those of a plain run, and the
//! program itself asserts the words of the manual.

mod common;

use std::process::Command;

use common::{
    GCC, MIB, can_run, can_run_with, compile, farpage, farpage_as, farpage_in_pages_of, modes,
    output, said, same_as_plain,
};
use farpage_testkit::{serve_tcp, text};

const PYTHON: &str = "/usr/bin/python3";
const SEEDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/memory/seeded.py");

/// Beginning of the scripts.
const CALLS: &str = r#"
import ctypes, os, sys
from ctypes import c_void_p, c_size_t, c_int, c_long, c_ubyte, string_at, memset
c = ctypes.CDLL(None, use_errno=True)
def f(name, result, *types):
    function = getattr(c, name); function.restype = result; function.argtypes = types; return function
mmap = f('mmap', c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_long)
munmap, mprotect = f('munmap', c_int, c_void_p, c_size_t), f('mprotect', c_int, c_void_p, c_size_t, c_int)
mlock, munlock = f('mlock', c_int, c_void_p, c_size_t), f('munlock', c_int, c_void_p, c_size_t)
mlockall, munlockall = f('mlockall', c_int, c_int), f('munlockall', c_int)
madvise = f('madvise', c_int, c_void_p, c_size_t, c_int)
mincore = f('mincore', c_int, c_void_p, c_size_t, c_void_p)
mremap = f('mremap', c_void_p, c_void_p, c_size_t, c_size_t, c_int)
malloc, realloc = f('malloc', c_void_p, c_size_t), f('realloc', c_void_p, c_void_p, c_size_t)
free = f('free', None, c_void_p)
M = 1 << 20
NONE, READ, RW, PRIVATE = 0, 1, 3, 0x22
errno = ctypes.get_errno
def holds(p, byte, size):
    # In small parts, which are local memory.
    return all(string_at(p + at, min(65536, size - at)).strip(bytes([byte])) == b'' for at in range(0, size, 65536))
def locked():
    return next(int(line.split()[1]) << 10 for line in open('/proc/self/status') if line.startswith('VmLck'))
def rights(p):
    for line in open('/proc/self/maps'):
        start, end = (int(number, 16) for number in line.split()[0].split('-'))
        if start <= p < end: return line.split()[1]
def here(p, size):
    pages = (c_ubyte * (size // 4096))(); assert mincore(p, size, pages) == 0
    return sum(page & 1 for page in pages)
"#;

fn script(body: &str) -> String {
    format!("{CALLS}{body}")
}

#[test]
fn seeded_programs_read_what_they_read_without() {
    if !can_run(&[PYTHON]) {
        return;
    }
    for seed in ["1", "2", "3"] {
        let command = [PYTHON, SEEDED, seed, "1200"];
        let plain = output(Command::new(PYTHON).args(&command[1..]));
        assert!(plain.status.success(), "{}", text(&plain.stderr));
        let pages = ["4KiB", "16KiB", "64KiB"];
        let modes = pages
            .iter()
            .flat_map(|page| [(page, "--fillers"), (page, "--in-thread")]);
        for (page, mode) in modes {
            let story = format!("seed {seed}, {page} {mode}");
            let mut options = vec!["--budget", "1500KiB", "--capacity", "512MiB", "--stats"];
            options.push(mode);
            let ours = farpage_in_pages_of(page, &options, &command);
            let (seen, stats) = (text(&ours.stdout), text(&ours.stderr));
            assert!(ours.status.success(), "{story}: {} {stats}", ours.status);
            assert_eq!(seen, text(&plain.stdout), "{story}");
            assert!(said(&stats, " written") > MIB, "{story}: {stats}");
            let local = said(&stats, " of it in local memory");
            assert!(local <= (3 << 19) + MIB / 10, "{story}: {stats}");
        }
    }
}

#[test]
fn what_is_locked_stays_and_what_does_not_fit_is_refused() {
    let body = r#"
p = mmap(None, 16 * M, RW, PRIVATE, -1, 0); memset(p, 7, 16 * M)
assert here(p, 16 * M) < 8 * M // 4096
assert mlock(p, M) == 0 and here(p, M) == M // 4096
other = malloc(40 * M); memset(other, 1, 40 * M)
assert here(p, M) == M // 4096, 'what is locked has left'
assert madvise(p, 4096, 4) == -1 and errno() == 22, 'locked memory is not given up'
assert madvise(p, 4096, 21) == -1 and errno() == 22
assert mlock(p, 16 * M) == -1 and errno() == 12
assert here(p, M) == M // 4096 and string_at(p, M) == b'\7' * M
# Two locks of one page, one unlock.
assert mlock(p + 2 * M, 4096) == 0 and mlock(p + 2 * M + 4096, 4096) == 0
assert munlock(p + 2 * M, 4096) == 0
memset(other, 2, 40 * M); assert here(p + 2 * M + 4096, 4096) == 1
assert munlock(p, 16 * M) == 0
assert madvise(p, M, 21) == 0 and here(p, M) == 0, 'what is unlocked does not leave'
# What is given back is no longer locked: there is room for as much again, many times.
for _ in range(20):
    q = mmap(None, 2 * M, RW, PRIVATE, -1, 0); assert mlock(q, 2 * M) == 0; munmap(q, 2 * M)
    r = malloc(2 * M); assert mlock(r, 2 * M) == 0; r = realloc(r, 30 * M); free(r)
assert mlockall(1) == -1 and errno() == 12
free(other); munmap(p, 16 * M)
q = malloc(M); assert mlockall(3) == 0 and here(q & -4096, M) == M // 4096
r = malloc(M); assert here(r & -4096, M) == M // 4096
assert malloc(30 * M) is None and errno() == 12
assert munlockall() == 0 and malloc(30 * M)
v = mmap(None, M, RW, PRIVATE, -1, 0); munmap(v, M)
assert mlock(v, 4096) == -1 and errno() == 12
print('done')
"#;
    let why = is_done(body);
    assert!(why.is_none_or(|why| why.contains("mlock: ")));
}

/// Runs a script in 8 MiB, if this machine can. The script prints `done`. Returns its lines on
/// standard error.
fn is_done(body: &str) -> Option<String> {
    if !can_run(&[PYTHON]) {
        return None;
    }
    let options = ["--budget", "8MiB", "--capacity", "512MiB"];
    let ours = farpage(&options, &[PYTHON, "-c", &script(body)]);
    let why = text(&ours.stderr);
    assert_eq!(text(&ours.stdout), "done\n", "{why}");
    Some(why)
}

#[test]
fn program_that_locks_all_that_comes_pages_what_was_there() {
    // Before the runtime has made the mappings that it makes at its first need.
    let body = r#"
p = mmap(None, 32 * M, RW, PRIVATE, -1, 0)
assert mlockall(2) == 0 and locked() == 0
memset(p, 7, 32 * M); assert holds(p, 7, 32 * M)
assert locked() == 0, 'what the runtime maps is locked'
small = mmap(None, 1 << 16, RW, PRIVATE, -1, 0)
assert locked() == 1 << 16 and here(small, 1 << 16) == 16
q = malloc(M); assert here(q, M) == 256 and locked() == M + (1 << 16)
assert munlockall() == 0 and locked() == 0
print('done')
"#;
    is_done(body);
}

#[test]
fn what_is_locked_grows_at_once_and_leaves_no_lock_behind() {
    let body = r#"
import time
assert mlockall(2) == 0
since = time.monotonic()
for _ in range(60):
    # So that it lies within a page, and something lies behind it.
    p = mmap(None, M, RW, PRIVATE, -1, 0); q = mmap(None, M // 4, RW, PRIVATE, -1, 0)
    munmap(p, 4096); p += 4096
    memset(p, 5, M - 4096); assert mprotect(p, 4096, READ) == 0
    assert mremap(p, M - 4096, 32 * M, 1) == 2**64 - 1 and errno() == 12
    assert rights(p) == 'r--p' and holds(p, 5, M - 4096)
    assert madvise(p, 4096, 4) == -1 and errno() == 22, 'the lock is lost'
    assert mprotect(p, 4096, RW) == 0
    n = mremap(p, M - 4096, 2 * M, 1)
    assert n not in (p, 2**64 - 1) and holds(n, 5, M - 4096) and holds(n + M - 4096, 0, M + 4096)
    assert here(n, 2 * M) == 512 and locked() == 2 * M + M // 4
    munmap(n, 2 * M); munmap(q, M // 4); assert locked() == 0
assert time.monotonic() - since < 100, 'pages waited for their deadline'
r = malloc(6 * M + M // 2); assert r
assert munlockall() == 0
print('done')
"#;
    is_done(body);
}

#[test]
fn what_fails_to_be_locked_leaves_what_was_locked() {
    let body = r#"
a = malloc(4 * M); b = malloc(16 * M)
assert mlock(a, 4096) == 0
assert mlockall(1) == -1 and errno() == 12 and locked() == 4096
assert mlock(b, 6 * M) == 0 and munlock(b, 6 * M) == 0, 'something is pinned still'
p = mmap(None, M, RW, PRIVATE, -1, 0)
assert mlock(p, 4096) == 0 and mprotect(p + 8192, 4096, NONE) == 0
assert mlock(p, 16384) == -1 and errno() == 12 and locked() == 8192
# Given up under its lock, and written back beside it.
assert mlock(b, M) == 0 and madvise(b, 65536, 24) == 0 and locked() == M + 8192
assert madvise(p + 4096, 4096, 21) == 0 and locked() == M + 8192
print('done')
"#;
    is_done(body);
}

#[test]
fn block_that_is_reallocated_keeps_its_protections_and_locks() {
    let body = r#"
r = malloc(M); memset(r, 3, M); behind = malloc(M)
assert mlock(r, M // 2) == 0 and mprotect(r + M // 4, 4096, READ) == 0
assert realloc(r, M // 2 + M // 4) == r and realloc(r, M // 2 + M // 4 - 5) == r
assert locked() == M // 2 and rights(r + M // 4) == 'r--p'
assert madvise(r, 4096, 4) == -1 and errno() == 22, 'the lock is lost'
assert realloc(r, 400 * M * 2) is None and locked() == M // 2 and rights(r + M // 4) == 'r--p'
n = realloc(r, 3 * M); assert n != r and holds(n, 3, M // 2 + M // 4 - 5)
assert locked() == M // 2 and here(n, M // 2) == 128
assert rights(n + M // 4) == 'r--p' and rights(n + M // 4 + 4096) == 'rw-p' and rights(r + M // 4) == 'rw-p'
free(n); assert locked() == 0
print('done')
"#;
    is_done(body);
}

/// Allocators reserve addresses like this and commit parts of them.
#[test]
fn reserved_addresses_are_remote_when_they_are_used() {
    if !can_run(&[PYTHON]) {
        return;
    }
    let body = r#"
p = mmap(None, 64 * M, NONE, PRIVATE | 0x4000, -1, 0)
for at in range(0, 64, 4):
    assert mprotect(p + at * M, 2 * M, RW) == 0
    memset(p + at * M, at + 1, 2 * M)
for at in range(0, 64, 4):
    assert string_at(p + at * M, 2 * M) == bytes([at + 1]) * (2 * M)
# Kept while nobody may read it.
assert mprotect(p, 64 * M, NONE) == 0
q = malloc(40 * M); memset(q, 9, 40 * M)
assert mprotect(p, 64 * M, READ) == 0
assert string_at(p + 60 * M, 2 * M) == bytes([61]) * (2 * M)
# Mapped over: gone, and to be used again.
assert mmap(p + 4 * M, 2 * M, NONE, PRIVATE | 0x10, -1, 0) == p + 4 * M
assert mmap(p + 4 * M, 2 * M, RW, PRIVATE | 0x10, -1, 0) == p + 4 * M
assert string_at(p + 4 * M, 2 * M) == bytes(2 * M)
memset(p + 4 * M, 8, 2 * M)
# A file's, beside bytes that stay.
file = os.open('/proc/self/exe', os.O_RDONLY)
assert mmap(p, 4096, READ, 0x12, file, 0) == p
assert string_at(p, 4096) == os.pread(file, 4096, 0)
assert string_at(p + 4096, 2 * M - 4096) == b'\1' * (2 * M - 4096)
assert munmap(p, 64 * M) == 0
assert mprotect(p, 4096, RW) == -1 and errno() == 12
# Whoever gets the addresses next may use them.
r = malloc(60 * M); memset(r, 5, 60 * M)
print('done'); sys.stdout.flush()
guard = mmap(None, M, RW, PRIVATE, -1, 0)
mprotect(guard + 4096, 4096, [NONE, READ][len(sys.argv) % 2])
string_at(guard + 8192, 4096)
memset(guard + 4096, 1, 1)
"#;
    for argument in [&[][..], &["read"]] {
        let options = ["--budget", "4MiB", "--capacity", "512MiB", "--stats"];
        let script = script(body);
        let command = [&[PYTHON, "-c", &script], argument].concat();
        let ours = farpage(&options, &command);
        let stderr = text(&ours.stderr);
        assert_eq!(text(&ours.stdout), "done\n", "{stderr}");
        let status = ours.status.code();
        assert_eq!(status, Some(128 + 11), "what is protected was written to");
    }
}

/// Two vectors grow by turns, so that neither finds room behind it for long.
#[test]
fn vectors_grow_to_ten_budgets_without_coming_in() {
    if !can_run(&[PYTHON]) {
        return;
    }
    let body = r#"
sizes = [M // 2, M // 2]
blocks = [malloc(size) for size in sizes]
[memset(block, 3, M // 2) for block in blocks]
for _ in range(38):
    for i in range(2):
        blocks[i] = realloc(blocks[i], sizes[i] + M // 2)
        memset(blocks[i] + sizes[i], 3, M // 2)
        sizes[i] += M // 2
print(sum(string_at(blocks[i], sizes[i]).count(3) for i in range(2)))
"#;
    let options = ["--budget", "4MiB", "--capacity", "512MiB", "--stats"];
    let ours = farpage(&options, &[PYTHON, "-c", &script(body)]);
    let stats = text(&ours.stderr);
    println!("{stats}");
    assert_eq!(text(&ours.stdout), format!("{}\n", 39 << 20), "{stats}");
    // 39 MiB in pages of 16 KiB: once to be written, once to be read, and twice for Python's
    // copies. Copies during growth would take forty times as much.
    let before = &stats[..stats.find(" pages came in").unwrap()];
    let faults: u64 = before.rsplit(' ').next().unwrap().parse().unwrap();
    assert!(faults < 5 * (39 << 20) / (16 << 10), "{stats}");
}

/// Returns the local memory that a program says on standard error.
fn local_kib(stats: &str) -> u64 {
    let local = stats.split("RssAnon:").nth(1).expect("the program says it");
    let local = local.split_whitespace().next().expect("a number");
    local.parse().expect("a number")
}

/// Text of `--stats` if small objects have come to the arena.
const SWITCHED: &str = "small objects are in the arena since";

/// Checks that a program whose objects are all small keeps its budget, with the bytes of a plain
/// run, and that nothing of this is seen by the programs that it starts.
#[test]
fn small_objects_are_remote() {
    if !can_run(&[GCC, "/bin/sh"]) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let program = compile(folder.path(), "memory/small", &["-pthread"]).expect("it compiles");
    let command = [program.to_str().expect("a plain path"), "remote"];
    let plain = output(&mut Command::new(&program));
    for small in [["--small", "auto"], ["--small", "yes"]] {
        for mode in modes() {
            let options = [&small[..], mode, &["--budget", "16MiB", "--stats"]].concat();
            let ours = farpage_as("16KiB", &options, &command);
            let stats = same_as_plain(&command, &plain, &ours);
            let local = local_kib(&stats);
            assert!(local << 10 < 48 * MIB, "{local} KiB: {stats}");
            assert!(said(&stats, "were kept remotely") > 24 * MIB, "{stats}");
            assert_eq!(stats.contains(SWITCHED), small[1] == "auto", "{stats}");
        }
    }
    let see = ["/bin/sh", "-c", "echo \"<$LD_PRELOAD>\"; env"];
    let seen = text(&farpage(&["--small", "yes"], &see).stdout);
    assert!(seen.starts_with("<>\n"), "{seen}");
    assert!(!seen.contains("FARPAGE_RUN_"), "{seen}");
}

/// Blocks that find no room in the arena come from the C library, and each is freed where it came
/// from.
#[test]
fn small_objects_are_local_if_the_arena_is_full() {
    if !can_run(&[GCC]) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let program = compile(folder.path(), "memory/small", &["-pthread"]).expect("it compiles");
    let command = [program.to_str().expect("a plain path"), "full"];
    let plain = output(&mut Command::new(&program));
    for small in ["auto", "yes"] {
        let sizes = ["--budget", "8MiB", "--capacity", "24MiB"];
        let options = [&["--small", small, "--stats"], &sizes[..]].concat();
        let ours = farpage_as("16KiB", &options, &command);
        let stats = same_as_plain(&command, &plain, &ours);
        assert!(local_kib(&stats) << 10 > 24 * MIB, "{stats}");
        assert!(stats.contains("--capacity"), "{stats}");
    }
}

/// Below a quarter of the budget nothing changes: no block lies in the arena, and none is
/// jemalloc's.
#[test]
fn few_small_objects_stay_local() {
    if !can_run(&[GCC, PYTHON]) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let program = compile(folder.path(), "memory/small", &["-pthread"]).expect("it compiles");
    let command = [program.to_str().expect("a plain path")];
    let plain = output(&mut Command::new(&program));
    let options = ["--small", "auto", "--budget", "1GiB", "--stats"];
    let ours = farpage_as("16KiB", &options, &command);
    let stats = same_as_plain(&command, &plain, &ours);
    assert!(!stats.contains(SWITCHED), "{stats}");
    // The same block again and again: requests count for nothing, and only what is there.
    let body = r"
for _ in range(400):
    for block in [malloc(4000) for _ in range(250)]: free(block)
blocks = [malloc(1000) for _ in range(1500)]
print('done')
";
    let options = ["--small", "auto", "--budget", "16MiB", "--stats"];
    let ours = farpage_as("16KiB", &options, &[PYTHON, "-c", &script(body)]);
    let stats = text(&ours.stderr);
    assert_eq!(text(&ours.stdout), "done\n", "{stats}");
    assert!(!stats.contains(SWITCHED), "{stats}");
}

/// Blocks that the C library makes for itself stay local: it reads some of them where no fault can
/// be served.
#[test]
fn small_blocks_of_the_c_library_are_local_and_those_of_the_program_remote() {
    if !can_run_with(&["--in-thread"], &["userfaultfd", "--in-thread"], &[GCC]) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let options = ["-pthread", "-fno-builtin"];
    let program = compile(folder.path(), "memory/whose", &options).expect("it compiles");
    let command = [program.to_str().expect("a plain path")];
    let mut expected = "spawned\nby a shell\n".repeat(20);
    expected += "64 blocks at ends\n";
    for mode in modes() {
        let options = [&["--small", "yes", "--budget", "8MiB"], *mode].concat();
        let ours = farpage(&options, &command);
        assert_eq!(text(&ours.stdout), expected, "{}", text(&ours.stderr));
    }
}

/// A handle on the C library gives the functions that the program has without the handle.
#[test]
fn blocks_are_freed_by_functions_that_a_handle_on_the_c_library_gives() {
    if !can_run_with(&["--in-thread"], &["userfaultfd", "--in-thread"], &[PYTHON]) {
        return;
    }
    let body = r#"
given = ctypes.CDLL('libc.so.6')
for name in ['malloc', 'calloc', 'realloc', 'memalign', 'aligned_alloc', 'strdup']:
    getattr(given, name).restype = c_void_p
for size in [24, 3000, 100000, M]:
    blocks = [malloc(size) for _ in range(M // size + 100)]
    for block in blocks: memset(block, 7, size)
    blocks = [given.realloc(c_void_p(block), c_size_t(size + 9)) for block in blocks]
    assert all(string_at(block, size) == b'\7' * size for block in blocks)
    assert given.malloc_usable_size(c_void_p(blocks[0])) >= size + 9
    for block in blocks: given.free(c_void_p(block))
    for block in [given.malloc(c_size_t(size)), given.calloc(c_size_t(3), c_size_t(size)),
            given.memalign(c_size_t(64), c_size_t(size)), given.aligned_alloc(c_size_t(64), c_size_t(size))]:
        free(realloc(block, size * 2))
free(given.strdup(b'a text'))
assert not hasattr(given, 'no_such_function')
print('done')
"#;
    for small in ["auto", "yes", "no"] {
        let options = ["--small", small, "--budget", "8MiB", "--capacity", "512MiB"];
        let ours = farpage(&options, &[PYTHON, "-c", &script(body)]);
        assert_eq!(text(&ours.stdout), "done\n", "{}", text(&ours.stderr));
    }
}

#[test]
fn arena_is_made_by_a_thread_with_the_smallest_stack() {
    if !can_run(&[GCC]) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let options = ["-pthread", "-fno-builtin"];
    let program = compile(folder.path(), "memory/narrow", &options).expect("it compiles");
    for how in ["large", "small"] {
        let command = [program.to_str().expect("a plain path"), how];
        let plain = output(Command::new(command[0]).arg(how));
        for mode in modes() {
            let options = [&["--budget", "8MiB", "--stats"], *mode].concat();
            let ours = farpage_as("16KiB", &options, &command);
            let stats = same_as_plain(&command, &plain, &ours);
            assert_eq!(stats.contains(SWITCHED), how == "small", "{stats}");
        }
    }
}

/// `RTLD_NEXT` is about the caller of `dlsym`, also where that is a library behind ours.
#[test]
fn library_that_wraps_malloc_finds_the_next_one() {
    if !can_run(&[GCC, PYTHON]) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let library = compile(folder.path(), "memory/wrapper", &["-shared", "-fPIC"]);
    let library = library.expect("it compiles");
    for mode in modes() {
        let mut farpage = Command::new(env!("CARGO_BIN_EXE_farpage"));
        farpage.env("LD_PRELOAD", &library).arg("run").args(*mode);
        farpage.args(["--small", "yes", "--budget", "8MiB", "--"]);
        let text_of = "print(len([str(i) * 20 for i in range(100000)]))";
        let ours = output(farpage.args([PYTHON, "-c", text_of]));
        let said = text(&ours.stderr);
        assert_eq!(text(&ours.stdout), "100000\n", "{said}");
        assert!(said.contains("wrapped"), "{said}");
        let why = "the program has an allocator of its own";
        assert!(said.contains(why), "{said}");
    }
}

/// A program that has asked for no large block goes on without an arena, and says so once.
#[test]
fn small_objects_stay_local_where_no_arena_can_be_made() {
    const BASH: &str = "/bin/bash";
    if !can_run(&[BASH]) {
        return;
    }
    let (_server, url) = serve_tcp(64 << 20);
    let body = "for ((i = 0; i < 60000; i++)); do a[i]=some-text-$i; done; echo ${#a[@]} ${a[777]}";
    let options = ["--server", &url, "--budget", "4MiB", "--capacity", "1GiB"];
    let ours = farpage(&options, &[BASH, "-c", body]);
    let said = text(&ours.stderr);
    assert_eq!(text(&ours.stdout), "60000 some-text-777\n", "{said}");
    let line = "all memory stays local from now on: ";
    assert_eq!(said.matches(line).count(), 1, "{said}");
    assert!(said.contains("--capacity"), "{said}");
}

/// Tables of jemalloc are local, so that `free` waits for the block's page alone.
#[test]
fn arena_has_small_blocks_and_no_tables_of_theirs() {
    const BASH: &str = "/bin/bash";
    if !can_run(&[BASH]) {
        return;
    }
    let body = "for i in {1..2000}; do a[i]=x$i; done; echo ${#a[@]}";
    for mode in modes() {
        let options = [&["--small", "yes", "--budget", "16MiB", "--stats"], *mode].concat();
        let ours = farpage(&options, &[BASH, "-c", body]);
        let stats = text(&ours.stderr);
        assert_eq!(text(&ours.stdout), "2000\n", "{stats}");
        // Jemalloc takes 2 MiB at first, and tables of 6 MiB for them.
        assert!(said(&stats, " accessible;") < 4 * MIB, "{stats}");
    }
}

/// Jemalloc is a part of farpage's library: no library comes into the program that it would not
/// have.
#[test]
fn small_objects_bring_no_library_along() {
    const CAT: &str = "/bin/cat";
    if !can_run(&[CAT]) {
        return;
    }
    let maps = [CAT, "/proc/self/maps"];
    let files = |text: &str| {
        let files = text.lines().filter_map(|line| line.split_once('/'));
        let files = files.map(|(_, path)| path.to_owned());
        files
            .filter(|path| path.contains(".so"))
            .collect::<std::collections::BTreeSet<_>>()
    };
    let [none, small] =
        ["no", "yes"].map(|small| files(&text(&farpage(&["--small", small], &maps).stdout)));
    assert!(!none.is_empty());
    assert_eq!(none, small);
}

#[test]
fn small_objects_of_other_languages_are_what_they_are_in_a_plain_run() {
    const GXX: &str = "/usr/bin/g++";
    const PERL: &str = "/usr/bin/perl";
    if !can_run(&[GXX, PERL, PYTHON]) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("maps").display().to_string();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/memory/maps.cpp");
    let strict = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"];
    let made = output(
        Command::new(GXX)
            .args(strict)
            .args([source, "-o", &program]),
    );
    assert!(made.status.success(), "{}", text(&made.stderr));
    let hash =
        "my %h; $h{$_}=$_*3 for 1..200000; my $s=0; $s+=$h{$_} for sort keys %h; print qq($s\n)";
    let names = "x = {str(i): [i, str(i * 7)] for i in range(150000)}; print(sum(len(b) + a for a, b in x.values()))";
    let commands: [&[&str]; 3] = [
        &[&program],
        &["/usr/bin/env", PERL, "-e", hash],
        &[PYTHON, "-c", names],
    ];
    for command in commands {
        let plain = output(Command::new(command[0]).args(&command[1..]));
        for mode in modes() {
            let small = ["--small", "auto", "--budget", "16MiB", "--stats"];
            let options = [*mode, &small].concat();
            let ours = farpage_as("16KiB", &options, command);
            let stats = same_as_plain(command, &plain, &ours);
            if command[0] == program {
                assert!(local_kib(&stats) << 10 < 48 * MIB, "{stats}");
            }
            // Python has an allocator of its own for its objects, which maps memory.
            assert_eq!(stats.contains(SWITCHED), command[0] != PYTHON, "{stats}");
        }
    }
}

/// The names of an allocator, `operator new` among them, belong to no library that farpage loads.
#[test]
fn allocator_that_a_program_brings_serves_its_small_objects() {
    if !can_run(&[GCC]) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let program = compile(
        folder.path(),
        "memory/statics",
        &["-pthread", "-DALLOCATOR", "-fno-builtin"],
    );
    let program = program.expect("it compiles");
    let command = [program.to_str().expect("a plain path")];
    let ours = farpage_as(
        "16KiB",
        &["--small", "auto", "--budget", "16MiB", "--stats"],
        &command,
    );
    let said = text(&ours.stderr);
    assert!(ours.status.success(), "{said}");
    assert!(!said.contains(SWITCHED), "{said}");
}

#[test]
fn static_arrays_are_remote_whatever_is_done_with_them() {
    if !can_run(&[GCC]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let make = |name: &str, options: &[&str]| {
        let made = compile(folder.path(), "memory/statics", options).unwrap();
        std::fs::rename(made, at(name)).unwrap();
    };
    make("libstatics.so", &["-shared", "-fPIC", "-DLIBRARY"]);
    let (search, path) = (format!("-L{}", at("")), format!("-Wl,-rpath,{}", at("")));
    make("pie", &["-pthread", "-pie", "-fPIE"]);
    make("fixed", &["-pthread", "-no-pie", "-fno-pie"]);
    let linked = ["-Wl,--no-as-needed", &search, "-lstatics", &path];
    for (name, code) in [("library", "-fPIC"), ("copied", "-fPIE")] {
        let options = ["-pthread", "-DWITH_LIBRARY", "-pie", code];
        make(name, &[&options[..], &linked].concat());
    }
    make("allocator", &["-pthread", "-DALLOCATOR", "-fno-builtin"]);
    let names = ["pie", "fixed", "library", "copied", "allocator"];
    let tight = names.map(|name| (name, "16MiB"));
    // Room for all: what is locked fits.
    for (name, budget) in tight.into_iter().chain([("pie", "128MiB")]) {
        let program = at(name);
        let command = [&*program];
        let plain = output(&mut Command::new(command[0]));
        for mode in modes() {
            let options = [&["--budget", budget, "--stats"], *mode].concat();
            let ours = farpage_as("16KiB", &options, &command);
            let stats = same_as_plain(&command, &plain, &ours);
            let local = said(&stats, " local at the end");
            // An allocator's own tables stay where it is.
            match name == "allocator" || budget == "128MiB" {
                true => assert!(local > 48 * MIB, "{name}: {stats}"),
                false => assert!(local < 40 * MIB, "{name}: {stats}"),
            }
        }
    }
}

/// Programs that this one starts would meet the filter of system calls, at the same addresses.
#[test]
fn static_arrays_stay_local_without_random_addresses() {
    if !can_run_with(&["--in-thread"], &["userfaultfd", "--in-thread"], &[GCC]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "memory/statics", &["-pthread"]).unwrap();
    let command = ["setarch", "-R", program.to_str().unwrap()];
    let plain = output(Command::new(command[0]).args(&command[1..]));
    let options = ["--budget", "16MiB", "--stats", "--in-thread"];
    let stats = same_as_plain(&command, &plain, &farpage_as("16KiB", &options, &command));
    assert!(
        stats.contains("static arrays (.bss) stay local: addresses are not random"),
        "{stats}"
    );
}
