//! Unmodified programs of this machine give the same bytes with a fraction of their memory.
//!
//! The rule it keeps: the program's whole output is compared with that of a plain run, and its use
//! of memory is read from `--stats`.

mod common;

use std::{fs, os::unix::fs::PermissionsExt, process::Command};

use common::{MIB, can_run, farpage, file_of_lines, modes, output, said, same_as_plain};
use farpage_testkit::text;

/// Compares a program's output with a plain run's, if the program is here. It takes at least four
/// budgets.
fn same(command: &[&str], budget_mib: u64) {
    if !can_run(&command[..1]) {
        return;
    }
    let plain = output(Command::new(command[0]).args(&command[1..]));
    let budget = format!("{budget_mib}MiB");
    let ours = farpage(&["--budget", &budget, "--stats"], command);
    let stats = same_as_plain(command, &plain, &ours);
    let allocated = said(&stats, " accessible");
    assert!(allocated >= 4 * budget_mib * MIB, "{stats}");
    // `--stats` rounds the number.
    let local = said(&stats, " of it in local memory");
    assert!(local <= budget_mib * MIB + MIB / 10, "{stats}");
    assert!(said(&stats, " written") > budget_mib * MIB, "{stats}");
}

const SORT: &str = "/usr/bin/sort";
const XZ: &str = "/usr/bin/xz";
const PYTHON: &str = "/usr/bin/python3";

#[test]
fn sort_gives_the_same_bytes_at_a_quarter_of_its_memory() {
    let (_folder, input) = file_of_lines(150_000);
    same(&[SORT, "-S", "32M", "--parallel=2", &input], 3);
}

#[test]
fn xz_gives_the_same_bytes_at_a_fraction_of_its_memory() {
    let (_folder, input) = file_of_lines(1500);
    same(&[XZ, "-9", "-T1", "-k", "-c", &input], 8);
}

#[test]
fn python_gives_the_same_bytes_at_a_quarter_of_its_memory() {
    let script = "
x = {i: str(i * 7919 % 1000003) for i in range(60000)}
b = bytearray(4 << 20)
for i in range(0, len(b), 1000): b[i] = i % 251
y = sorted(x.values(), key=lambda s: s[::-1])
print(sum(b), y[:5], y[-5:], len(''.join(y)))
";
    same(&[PYTHON, "-c", script], 4);
}

/// Functions for memory behave as their manual says.
#[test]
fn memory_behaves_as_the_manual_says() {
    if !can_run(&[PYTHON]) {
        return;
    }
    let script = r#"
import ctypes
from ctypes import c_void_p, c_size_t, c_int, c_long, c_char_p, string_at, memset
c = ctypes.CDLL(None, use_errno=True)
def f(name, result, *types):
    function = getattr(c, name); function.restype = result; function.argtypes = types; return function
malloc, free = f('malloc', c_void_p, c_size_t), f('free', None, c_void_p)
calloc, realloc = f('calloc', c_void_p, c_size_t, c_size_t), f('realloc', c_void_p, c_void_p, c_size_t)
usable = f('malloc_usable_size', c_size_t, c_void_p)
aligned = f('aligned_alloc', c_void_p, c_size_t, c_size_t)
mmap = f('mmap', c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_long)
munmap = f('munmap', c_int, c_void_p, c_size_t)
mremap = f('mremap', c_void_p, c_void_p, c_size_t, c_size_t, c_int, c_void_p)
madvise = f('madvise', c_int, c_void_p, c_size_t, c_int)
M = 1 << 20
def regions():
    return [line for line in open('/proc/self/smaps') if line.startswith('VmFlags') and ' um' in line]
# Fresh memory is zeros, whatever was there before.
for _ in range(50):
    p = calloc(1, M); assert string_at(p, M) == bytes(M); memset(p, 7, M)
    assert usable(p) >= M; free(p)
# Growing and shrinking, from small to large and back.
p = malloc(100); memset(p, 5, 100)
for size in [M, 3 * M, 200_000, 40 * M, 300, 2 * M]:
    before = min(size, usable(p)); p = realloc(p, size); assert string_at(p, 100) == b'\5' * 100, size
free(p)
assert realloc(malloc(M), 0) is None
for align in [64, 4096, 1 << 16, 1 << 21]:
    p = aligned(align, M); assert p % align == 0; memset(p, 1, M); free(p)
assert malloc(1 << 50) is None and ctypes.get_errno() == 12
# Mappings: parts that go, and what stays.
RW, PA = 3, 0x22
p = mmap(None, 300_000, RW, PA, -1, 0); assert p % 4096 == 0
memset(p, 9, 300_000)
assert munmap(p + 4096 * 10, 4096 * 30) == 0
assert string_at(p, 40960) == b'\x09' * 40960 and string_at(p + 40 * 4096, 100_000) == b'\x09' * 100_000
assert madvise(p, 8192, 4) == 0
assert string_at(p, 8192) == bytes(8192) and string_at(p + 8192, 4096) == b'\x09' * 4096
assert munmap(p, 4096 * 10) == 0
q = mremap(p + 40 * 4096, 100_000, 4 * M, 1, None)
assert string_at(q, 100_000) == b'\x09' * 100_000
memset(q + 3 * M, 2, M)
q = mremap(q, 4 * M, M, 0, None); assert string_at(q, 1000) == b'\x09' * 1000
assert munmap(q, M) == 0
# What is not plain is the kernel's: fixed, shared, to execute.
s = mmap(None, M, RW, 0x21, -1, 0); assert s; assert munmap(s, M) == 0
x = mmap(None, M, 7, PA, -1, 0); assert x; assert munmap(x, M) == 0
# Threads and system calls.
import os, threading
def work(n):
    for _ in range(20):
        p = malloc(M + n); memset(p, n, M); assert string_at(p + M - 9, 9) == bytes([n]) * 9; free(p)
threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
[t.start() for t in threads]; [t.join() for t in threads]
r, w = os.pipe()
p = malloc(M); memset(p, 3, M); memset(malloc(40 * M), 1, 40 * M)
assert f('write', c_long, c_int, c_void_p, c_size_t)(w, p, 50_000) == 50_000
assert f('read', c_long, c_int, c_void_p, c_size_t)(r, p + 500_000, 50_000) == 50_000
print('done')
"#;
    for budget in ["2MiB", "256MiB"] {
        let options = ["--budget", budget, "--capacity", "512MiB", "--stats"];
        let ours = farpage(&options, &[PYTHON, "-c", script]);
        let stderr = text(&ours.stderr);
        assert_eq!(text(&ours.stdout), "done\n", "{stderr}");
        assert!(ours.status.success(), "{stderr}");
        assert!(
            stderr.contains("raise") || stderr.contains("--capacity"),
            "{stderr}"
        );
    }
}

/// Small objects that another allocator cuts out of its memory are its own, also the object at the
/// beginning of a mapping.
#[test]
fn allocator_of_the_programs_own_has_its_small_objects_in_remote_memory() {
    if !can_run(&["/usr/bin/cc"]) {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary directory");
    let at = |name: &str| folder.path().join(name).display().to_string();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/allocator.c");
    let (library, program) = (at("liballocator.so"), at("program"));
    let strict = ["-O1", "-Wall", "-Wextra", "-Werror", "-fno-builtin"];
    let compile = |more: &[&str]| {
        let made = output(Command::new("cc").args(strict).arg(source).args(more));
        assert!(made.status.success(), "{}", text(&made.stderr));
    };
    compile(&["-shared", "-fPIC", "-o", &library]);
    let here = format!("-Wl,-rpath,{}", folder.path().display());
    compile(&["-DMAIN", &library, &here, "-o", &program]);

    let plain = output(&mut Command::new(&program));
    assert!(plain.status.success(), "{plain:?}");
    for &mode in modes() {
        let options = [&["--budget", "4MiB", "--stats"], mode].concat();
        let ours = farpage(&options, &[&program]);
        let stderr = text(&ours.stderr);
        assert_eq!(text(&ours.stdout), text(&plain.stdout), "{ours:?}");
        assert!(ours.status.success(), "{stderr}");
        let remote = said(&stderr, " in the arena");
        assert!(remote > 16 * MIB, "the small objects were local: {stderr}");
    }
}

/// Covers servers that root starts. The C library makes every thread of a process give up its
/// rights, the runtime's as well, and later calls must need no right.
#[test]
fn program_gives_up_its_rights_before_it_allocates() {
    if !can_run(&[PYTHON]) {
        return;
    }
    let script = r#"
import os
nobody = 65534
if os.getuid() == 0:
    os.setgroups([]); os.setgid(nobody); os.setuid(nobody)
else:
    os.setuid(os.getuid())
block = bytearray(24 << 20)
pages = range(0, len(block), 4096)
for at in pages:
    block[at] = (at >> 12) % 251
assert all(block[at] == (at >> 12) % 251 for at in pages)
print('done')
"#;
    for &more in modes() {
        // Nothing is remote before the rights are given up.
        let options = [&["--budget", "6MiB", "--min-bytes", "4MiB"], more].concat();
        let ours = farpage(&options, &[PYTHON, "-c", script]);
        assert_eq!(text(&ours.stdout), "done\n", "{}", text(&ours.stderr));
    }
}

#[test]
fn processes_are_started_and_are_not_interposed() {
    if !can_run(&[PYTHON]) {
        return;
    }
    let script = "
import os, subprocess
held = bytearray(4 << 20)
print(subprocess.run(['/bin/echo', 'started'], stdout=subprocess.PIPE, check=True).stdout)
print(subprocess.run('env', stdout=subprocess.PIPE).stdout.count(b'FARPAGE_RUN'), os.environ.get('LD_PRELOAD'))
";
    let options = ["--budget", "64MiB", "--min-bytes", "2MiB"];
    let ours = farpage(&options, &[PYTHON, "-c", script]);
    let (said, why) = (text(&ours.stdout), text(&ours.stderr));
    assert!(said.contains("b'started\\n'"), "{said} {why}");
    assert!(
        said.contains("0 None"),
        "a child is not interposed: {said} {why}"
    );
}

#[test]
fn status_is_the_programs() {
    if !can_run(&["/bin/sh"]) {
        return;
    }
    let status = |command: &[&str]| {
        let ended = farpage(&["--budget", "16MiB"], command);
        (ended.status.code().unwrap(), text(&ended.stderr))
    };
    assert_eq!(status(&["/bin/sh", "-c", "exit 7"]).0, 7);
    assert_eq!(status(&["/bin/sh", "-c", "kill -9 $$"]).0, 137);
    assert_eq!(status(&["no-such-program-here"]).0, 127);
    for (path, expected) in [("/no/such/file", 127), ("/bin/sh/none", 126), ("/tmp", 126)] {
        let (code, why) = status(&[path]);
        assert_eq!(code, expected, "{path}: {why}");
        assert!(why.contains(path), "{why}");
    }
}

/// Gives a file a capability, if this user may.
fn give_capability(path: &str) -> bool {
    let path = std::ffi::CString::new(path).expect("no zero byte");
    // Version 2, effective; CAP_NET_BIND_SERVICE is permitted.
    let value: Vec<u8> = [0x0200_0001_u32, 1 << 10, 0, 0, 0]
        .map(u32::to_le_bytes)
        .concat();
    let name = c"security.capability".as_ptr();
    // SAFETY: two strings of C's, and a value of as many bytes.
    let code =
        unsafe { libc::setxattr(path.as_ptr(), name, value.as_ptr().cast(), value.len(), 0) };
    code == 0
}

#[test]
fn programs_that_cannot_be_interposed_are_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let make = |name: &str, bytes: &[u8], mode: u32| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    // An ELF file with one program header: a note, or a kind that dynamic programs do not have.
    let elf = |kind: u32, contents: &[u8]| {
        let mut file = vec![0; 64 + 56];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[32] = 64;
        (file[54], file[56]) = (56, 1);
        file[64..68].copy_from_slice(&kind.to_le_bytes());
        file[72] = 120;
        file[96] = contents.len() as u8;
        file.extend_from_slice(contents);
        file
    };
    let go = b"\x04\0\0\0\x08\0\0\0\x04\0\0\0Go\0\0contents";
    let musl = b"/lib/ld-musl-x86_64.so.1";
    let cases = [
        (make("static", &elf(1, b""), 0o755), "statically linked"),
        (make("go", &elf(4, go), 0o755), "Go program"),
        (make("set-id", &elf(3, b""), 0o4755), "set-user-ID"),
        (make("text", b"hello", 0o755), "no 64-bit program"),
        (make("musl", &elf(3, musl), 0o755), "musl"),
    ];
    let mut cases = Vec::from(cases);
    let capable = make("capable", &elf(3, b"/lib/ld.so"), 0o755);
    match give_capability(&capable) {
        true => cases.push((capable, "capabilities")),
        false => eprintln!("SKIPPED: a file with capabilities: this user may give none"),
    }
    for (path, why) in cases {
        let refused = farpage(&[], &[&path]);
        assert_eq!(refused.status.code(), Some(125), "{path}");
        let said = text(&refused.stderr);
        assert!(said.contains(why), "{said}");
        let explained = farpage(&["--explain"], &[&path]);
        assert_eq!(explained.status.code(), Some(1), "{path}");
        let said = text(&explained.stdout);
        assert!(said.contains(why), "{said}");
    }
    let dynamic = make("dynamic", &elf(3, b"/lib/ld.so"), 0o755);
    let explained = farpage(&["--explain", "--min-bytes", "1MiB"], &[&dynamic]);
    let said = text(&explained.stdout);
    assert!(
        explained.status.success() && said.contains("1.0 MiB and more"),
        "{said}"
    );
    let script = make("script", b"#!/bin/sh -e\n", 0o755);
    let said = text(&farpage(&["--explain"], &[&script]).stdout);
    assert!(said.contains("a script of `/bin/sh -e`"), "{said}");
}

/// A shell starts three programs at once, each of which would use the whole budget.
#[test]
fn programs_share_the_budget() {
    if !can_run(&[PYTHON, "/bin/sh"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("child.py");
    // All programs have touched more than the budget before any reads its use of memory, and ends.
    fs::write(
        &script,
        r#"
import os, re, sys, time
folder, me = sys.argv[1:3]
held = bytearray(40 << 20)
for turn in range(3):
    for at in range(0, len(held), 4096): held[at] = (at >> 12) % 251
    open(f'{folder}/{me}.{turn}', 'w').close()
    while len([name for name in os.listdir(folder) if name.endswith(f'.{turn}')]) < 3: time.sleep(0.01)
rss, there = 0, 0
for line in open('/proc/self/smaps'):
    if line.startswith('Rss:'): rss = int(line.split()[1])
    if line.startswith('VmFlags') and ' um' in line: there += rss
open(f'{folder}/{me}.seen', 'w').close()
while len([name for name in os.listdir(folder) if name.endswith('.seen')]) < 3: time.sleep(0.01)
print(there, all(held[at] == (at >> 12) % 251 for at in range(0, len(held), 4096)))
"#,
    )
    .unwrap();
    let line = format!(
        "for i in 1 2 3; do {PYTHON} {} {} $i & done; wait",
        script.display(),
        folder.path().display()
    );
    let options = ["--budget", "32MiB", "--capacity", "512MiB"];
    let options = [&options[..], &["--children", "--stats"]].concat();
    let ours = farpage(&options, &["/bin/sh", "-c", &line]);
    let (said, stats) = (text(&ours.stdout), text(&ours.stderr));
    println!("{said}{stats}");
    let seen: Vec<(u64, bool)> = (said.lines())
        .map(|line| line.split_once(' ').unwrap())
        .map(|(kib, right)| (kib.parse().unwrap(), right == "True"))
        .collect();
    assert_eq!(seen.len(), 3, "{said} {stats}");
    assert!(seen.iter().all(|&(_, right)| right), "{said}");
    let all: u64 = seen.iter().map(|&(kib, _)| kib << 10).sum();
    assert!(all <= 32 * MIB, "{} MiB in local memory", all >> 20);
    // The shell has no share, and the whole budget is used.
    assert!(all >= 18 * MIB, "{} MiB in local memory", all >> 20);
    assert!(seen.iter().all(|&(kib, _)| kib >= 5 << 10), "{said}");
    // One more program than the budget has room for.
    let options = ["--budget", "7MiB", "--capacity", "512MiB", "--children"];
    let nested = format!(
        "{PYTHON} -c 'import subprocess; subprocess.run([\"{PYTHON}\", \"-c\", \"bytearray(1 << 20)\"])'"
    );
    let ours = farpage(&options, &["/bin/sh", "-c", &format!("{nested}; true")]);
    let why = text(&ours.stderr);
    assert!(why.contains("too many programs share the budget"), "{why}");
}

/// Programs run however they are started, and a child by the system call itself has its parent's
/// memory and memory of its own.
#[test]
fn programs_start_others_in_every_way() {
    if !can_run(&[PYTHON]) {
        return;
    }
    let script = "
import ctypes, os, signal, sys
held = bytearray(40 << 20)
for at in range(0, len(held), 4096): held[at] = 7
print(os.waitstatus_to_exitcode(os.waitpid(os.posix_spawn('/bin/sh', ['sh', '-c', 'exit 3'], os.environ), 0)[1]))
c = ctypes.CDLL(None)
print(os.waitstatus_to_exitcode(c.system(b'exit 4')))
c.popen.restype = ctypes.c_void_p
c.fgetc.argtypes = c.pclose.argtypes = [ctypes.c_void_p]
pipe = ctypes.c_void_p(c.popen(b'echo 5', b'r')); print(chr(c.fgetc(pipe))); c.pclose(pipe)
sys.stdout.flush()
# clone without a word to the C library.
SYS_clone = {'x86_64': 56, 'aarch64': 220}[os.uname().machine]
child = c.syscall(SYS_clone, int(signal.SIGCHLD), 0, 0, 0, 0)
if child == 0:
    own = bytearray(8 << 20)
    own[-1] = 6
    os._exit(own[-1])
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
child = c.syscall(SYS_clone, int(signal.SIGCHLD), 0, 0, 0, 0)
if child == 0:
    os._exit(held[5 << 20])
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(held.count(7))
sys.stdout.flush()
os.execv('/bin/echo', ['echo', 'end'])
";
    // Python's own objects are local.
    let options = ["--budget", "4MiB", "--capacity", "128MiB"];
    let options = [&options[..], &["--min-bytes", "2MiB"]].concat();
    let ours = farpage(&options, &[PYTHON, "-c", script]);
    let (said, why) = (text(&ours.stdout), text(&ours.stderr));
    // Other processors have no function that serves the call as a fork.
    let inherited = if cfg!(target_arch = "x86_64") {
        7
    } else {
        -libc::SIGSEGV
    };
    let expected = format!("3\n4\n5\n6\n{inherited}\n10240\nend\n");
    assert_eq!(said, expected, "{why}");
    assert_eq!(ours.status.code(), Some(0), "{why}");
}

/// The estimate of `--stats` for twice the budget is compared with a run with twice the budget.
#[test]
fn stats_say_what_more_budget_would_have_been_worth() {
    if !can_run(&[PYTHON]) {
        return;
    }
    let script = "
import random
held = bytearray(20 << 20)
for at in range(0, len(held), 4096): held[at] = at >> 12 & 127
pages = random.Random(1)
print(sum(held[pages.randrange(5120) << 12] for _ in range(40000)))
";
    // Pages that came back, and the estimated saving.
    let run = |budget: &str| {
        let options = ["--budget", budget, "--capacity", "128MiB", "--stats"];
        let ours = farpage(&options, &[PYTHON, "-c", script]);
        let stats = text(&ours.stderr);
        println!("{stats}");
        let behind = |word: &str| {
            let rest = &stats[stats.find(word).unwrap() + word.len()..];
            let number = rest.split(|c: char| !c.is_ascii_digit() && c != '.').next();
            number.unwrap().parse::<f64>().unwrap()
        };
        assert!(behind("faults waited ") > 0.0);
        assert!(said(&stats, " were kept remotely") > 15 * MIB, "{stats}");
        (behind("came back: of "), behind("that did, ") / 100.0)
    };
    let ((less, would_stay), (more, _)) = (run("6MiB"), run("12MiB"));
    let stayed = 1.0 - more / less;
    assert!((0.2..0.5).contains(&would_stay), "{would_stay}");
    assert!(
        (-0.05..0.2).contains(&(stayed - would_stay)),
        "{would_stay} was {stayed}"
    );
}
