//! Programs that fork under `farpage run`: children have what their parent had.
//!
//! The rule it keeps: each test runs by fillers and in-thread, and a child looks at memory that is
//! mostly absent at the fork.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    env, fs,
    path::PathBuf,
    process::Output,
    sync::{
        Arc,
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use common::{GCC, MIB, can_run, compile, farpage, modes};
use farpage_testkit::{Both, Relay, Rng, say, seed, text, wait_until};

const PYTHON: &str = "/usr/bin/python3";

/// Helpers of the scripts: a block four times as large as the budget, of which a quarter can be
/// present.
const HEAD: &str = r"
import ctypes, mmap, os, signal, sys, time
M = 1 << 20
c = ctypes.CDLL(None, use_errno=True)
c.malloc.restype = c.realloc.restype = c.mremap.restype = ctypes.c_void_p
pages = range(0, 64 * M, 4096)
def value(at): return (at >> 12) % 251 + 1
def fill(block, add=0):
    for at in pages: block[at] = (value(at) + add) % 256
def holds(block, add=0):
    return all(block[at] == (value(at) + add) % 256 for at in pages)
def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
";

/// Runs a script in both modes with more `options`, and calls `check` with the mode and the result.
fn run(options: &[&str], body: &str, check: impl Fn(&[&str], &Output)) {
    if !can_run(&[PYTHON]) {
        return;
    }
    let script = format!("{HEAD}{body}");
    for &mode in modes() {
        // Python's own memory is local.
        let options = [&["--budget", "16MiB", "--min-bytes", "4MiB"], options, mode].concat();
        check(mode, &farpage(&options, &[PYTHON, "-c", &script]));
    }
}

/// Runs a script in both modes, which must print `done` and nothing else.
fn is_done(body: &str) {
    run(&[], body, |mode, ours| {
        let (said, why) = (text(&ours.stdout), text(&ours.stderr));
        assert_eq!(said, "done\n", "{mode:?} {} {why}", ours.status);
    });
}

#[test]
fn children_by_each_call_read_and_write_what_the_parent_had() {
    let body = r#"
block = bytearray(64 * M)
fill(block)
stack = (ctypes.c_char * (1 << 20))()
end = ctypes.cast(ctypes.addressof(stack) + (1 << 20) - 64, ctypes.c_void_p)
def in_child(argument=None):
    right = holds(block)
    fill(block, 7)
    os._exit(0 if right and holds(block, 7) else 1)
def check(fork):
    child = fork()
    if child == 0: in_child()
    assert child > 0, ctypes.get_errno()
    fill(block, 3)
    assert ended(child) == 0
    assert holds(block, 3)
    fill(block)
check(os.fork); check(c.fork); check(c._Fork); check(c.__fork)
terminal = ctypes.c_int()
def forkpty(): return c.forkpty(ctypes.byref(terminal), None, None, None)
check(forkpty)
start = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(in_child)
check(lambda: c.clone(start, end, signal.SIGCHLD, None))
print('done')
"#;
    is_done(body);
}

#[test]
fn children_by_clone_and_by_number_have_what_the_parent_had() {
    if !can_run(&[GCC]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "forks/clone", &[]).unwrap();
    for &mode in modes() {
        let options = [&["--budget", "8MiB", "--min-bytes", "1MiB"], mode].concat();
        let ours = farpage(&options, &[program.to_str().unwrap()]);
        let (said, why) = (text(&ours.stdout), text(&ours.stderr));
        assert_eq!(said, "done\n", "{mode:?} {} {why}", ours.status);
    }
}

#[test]
fn daemon_goes_on_with_what_its_parent_had_and_the_parent_waits() {
    let body = r#"
block = bytearray(64 * M)
fill(block)
assert c.daemon(1, 1) == 0
time.sleep(0.3)
assert holds(block)
print('done')
"#;
    is_done(body);
}

#[test]
fn children_allocate_grow_and_free_what_they_have() {
    let body = r#"
block = c.malloc(64 * M)
bytes_at = lambda at: (ctypes.c_ubyte * (64 * M)).from_address(at)
fill(bytes_at(block))
mapping = mmap.mmap(-1, 64 * M, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
fill(mapping, 1)
child = os.fork()
if child == 0:
    grown = c.realloc(ctypes.c_void_p(block), 80 * M)
    right = grown and holds(bytes_at(grown)) and holds(mapping, 1)
    c.free(ctypes.c_void_p(grown))
    mapping.resize(80 * M)
    right = right and holds(mapping, 1) and mapping[70 * M] == 0
    more = bytearray(32 * M)
    os._exit(0 if right and more[5] == 0 else 1)
assert ended(child) == 0
assert holds(bytes_at(block)) and holds(mapping, 1)
print('done')
"#;
    is_done(body);
}

#[test]
fn grandchildren_see_what_their_parent_has_dropped_as_zeros() {
    let body = r#"
block = mmap.mmap(-1, 64 * M, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
fill(block)
def is_right(): return all(block[at] == (0 if at < 32 * M else value(at)) for at in pages)
child = os.fork()
if child == 0:
    block.madvise(mmap.MADV_DONTNEED, 0, 32 * M)
    grandchild = os.fork()
    if grandchild == 0: os._exit(0 if is_right() else 1)
    os._exit(ended(grandchild) or (0 if is_right() else 2))
fill(block, 9)
assert ended(child) == 0
assert holds(block, 9)
print('done')
"#;
    is_done(body);
}

#[test]
fn pools_of_processes_read_and_write_arrays() {
    let body = r#"
import multiprocessing
block = bytearray(64 * M)
fill(block)
part = 8 * M
def work(at):
    mine = range(at, at + part, 4096)
    right = all(block[i] == value(i) for i in mine)
    for i in mine: block[i] = 0
    return right and not any(block[i] for i in mine)
with multiprocessing.get_context('fork').Pool(3) as pool:
    assert all(pool.map(work, range(0, 64 * M, part)))
assert holds(block)
print('done')
"#;
    is_done(body);
}

/// A child whose parent is killed cannot go on: nobody has its memory. The child keeps standard
/// output open while it lives, and this test waits for the end of that.
#[test]
fn children_of_a_killed_parent_end() {
    let body = r"
block = bytearray(64 * M)
fill(block)
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, b'x')
    while True: sum(block[at] for at in pages)
os.read(reader, 1)
os.kill(os.getpid(), signal.SIGKILL)
";
    run(&[], body, |_, ours| {
        let why = text(&ours.stderr);
        assert_eq!(ours.status.code(), Some(137), "{why}");
        assert!(why.contains("processes that it had made by fork"), "{why}");
    });
}

/// The child has no connection to its parent then, and a message on its way alone holds what
/// catches its faults, as soon as the parent has noticed that. The child writes a file if it lives
/// to see the parent's end.
#[test]
fn children_of_a_killed_parent_end_without_descriptors_too() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("wrong");
    let body = r"
block = bytearray(64 * M)
fill(block)
reader, writer = os.pipe()
parent = os.getpid()
child = os.fork()
if child == 0:
    for descriptor in range(9000):
        if descriptor != writer: c.syscall(3, descriptor)
    # The parent has noticed the end of the connection when it has brought a few pages in.
    for at in pages[::16]: block[at]
    os.write(writer, b'x')
    while os.getppid() == parent: time.sleep(0.001)
    wrong = sum(block[at] != value(at) for at in pages)
    with open('FILE', 'w') as file: file.write(str(wrong))
    os._exit(0)
print(child, flush=True)
os.read(reader, 1)
os.kill(parent, signal.SIGKILL)
";
    let body = body.replace("FILE", file.to_str().unwrap());
    run(&[], &body, |mode, ours| {
        let why = text(&ours.stderr);
        assert_eq!(ours.status.code(), Some(137), "{why}");
        let child = format!("/proc/{}/stat", text(&ours.stdout).trim());
        let has_ended = || fs::read_to_string(&child).map_or(true, |it| it.contains(") Z "));
        wait_until("the child has ended", has_ended);
        let wrong = fs::read_to_string(&file).unwrap_or_default();
        assert!(wrong.is_empty() || wrong == "0", "{mode:?}: {wrong} pages");
    });
}

/// The parent ends when it knows of the `exec`. Only then `cat` finds the end of its input.
#[test]
fn children_that_have_called_exec_outlive_their_parent() {
    let body = r"
block = bytearray(64 * M)
fill(block)
reader, writer = os.pipe()
if os.fork() == 0:
    for descriptor in range(3, 9000):
        if descriptor != reader: c.syscall(3, descriptor)
    os.dup2(reader, 0)
    os.execv('/bin/sh', ['sh', '-c', 'cat; kill -0 $$; echo done'])
";
    is_done(body);
}

/// The parent is stopped before the `exec`, and killed after: it never knows of the `exec`.
#[test]
fn children_that_have_called_exec_outlive_a_parent_that_is_killed_at_once() {
    let body = r"
block = bytearray(64 * M)
fill(block)
if os.fork() == 0:
    for at in pages[::16]: block[at]
    os.kill(os.getppid(), signal.SIGSTOP)
    lives = 'kill -9 $PPID; while [ -e /proc/PARENT ]; do :; done; echo done'
    os.execv('/bin/sh', ['sh', '-c', lives.replace('PARENT', str(os.getppid()))])
while True: time.sleep(1)
";
    run(&[], body, |mode, ours| {
        let (said, why) = (text(&ours.stdout), text(&ours.stderr));
        assert_eq!(ours.status.code(), Some(137), "{mode:?} {why}");
        assert_eq!(said, "done\n", "{mode:?} {why}");
    });
}

/// The kernel counts descriptors in messages that nobody has received, over all processes of a user
/// without rights. Children leave none there: with one each, they would be too many.
#[test]
fn children_do_not_use_up_the_descriptors_that_may_be_on_their_way() {
    // SAFETY: always succeeds.
    if unsafe { libc::geteuid() } != 0 {
        return say("only root can give up rights");
    }
    let body = r"
import resource, socket
block = bytearray(64 * M)
fill(block)
os.setresuid(65533, 65533, 65533)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
pair = socket.socketpair()
socket.send_fds(pair[0], [b'x'], [0] * 90)
reader, writer = os.pipe()
children = []
for number in range(20):
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0 if all(block[at] == value(at) for at in pages[number::64]) else 1)
    children.append(child)
os.close(writer)
print([ended(child) for child in children])
";
    run(&[], body, |mode, ours| {
        let (said, why) = (text(&ours.stdout), text(&ours.stderr));
        let expected = format!("{:?}\n", [0; 20]);
        assert_eq!(said, expected, "{mode:?} {} {why}", ours.status);
    });
}

/// A signal ends a parent at once, with `--stats`, too, which handles signals to report.
#[test]
fn a_signal_ends_a_parent_of_living_children() {
    let body = r"
block = bytearray(64 * M)
fill(block)
if os.fork() == 0: time.sleep(60)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
";
    let begun = Instant::now();
    run(&["--stats"], body, |_, ours| {
        assert_eq!(ours.status.code(), Some(143), "{}", text(&ours.stderr));
    });
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(50), "waits for the child");
}

#[test]
fn shells_and_interpreters_start_children_by_fork() {
    let bash = r#"
x=$(head -c 20000000 /dev/zero | tr '\0' a)
y=$(echo ${#x}); z=$(printf %s "$x" | wc -c)
(echo sub ${#x})
echo $y $z"#;
    let perl = r#"
my $x = "abcdefgh" x (8 << 20); print `echo hi`;
my $child = fork();
if (!$child) { my $sum = 0; $sum += ord(substr($x, $_ * 4096, 1)) for 0 .. 16000; print "$sum\n"; exit 0 }
waitpid($child, 0); print "$?\n"; system("echo system");"#;
    let sizes = "sub 20000000\n20000000 20000000\n";
    let programs = [
        (["/bin/bash", "-c", bash], sizes),
        (["/usr/bin/perl", "-e", perl], "hi\n1552097\n0\nsystem\n"),
    ];
    for (program, expected) in programs {
        if !can_run(&program[..1]) {
            continue;
        }
        for &mode in modes() {
            let options = [&["--budget", "6MiB", "--min-bytes", "256KiB"], mode].concat();
            let ours = farpage(&options, &program);
            let (said, why) = (text(&ours.stdout), text(&ours.stderr));
            assert_eq!(said, expected, "{program:?} {why}");
        }
    }
}

/// Helpers of the scripts that compare the memory of children with the budget: a block eight times
/// as large, of which little is present at the fork.
const LARGE: &str = r"
pages = range(0, 128 * M, 4096)
def resident(process, block):
    start = ctypes.addressof(ctypes.c_char.from_buffer(block))
    inside, kib = False, 0
    for line in open(f'/proc/{process}/smaps'):
        first = line.split(' ')[0]
        if '-' in first:
            at, end = (int(it, 16) for it in first.split('-'))
            inside = at < start + 128 * M and start < end
        elif inside and first == 'Rss:': kib += int(line.split()[1])
    return kib << 10
def most_of(child, block):
    most = 0
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended: return most, os.waitstatus_to_exitcode(status)
        most = max(most, resident(child, block))
        time.sleep(0.005)
";

#[test]
fn children_keep_to_their_share_of_the_budget() {
    let body = r"
block = bytearray(128 * M)
fill(block)
child = os.fork()
if child == 0:
    right = holds(block)
    fill(block, 5)
    right = right and holds(block, 5)
    grandchild = os.fork()
    if grandchild == 0: os._exit(0 if holds(block, 5) else 1)
    fill(block, 6)
    os._exit(ended(grandchild) or (0 if right and holds(block, 6) else 2))
fill(block, 9)
most, status = most_of(child, block)
assert status == 0, status
# What was present at the fork, what a child may bring in before it is looked after, and what is
# on its way.
assert most <= 16 * M + 16 * M + 4 * M, most
assert holds(block, 9)
print('done')
";
    is_done(&format!("{LARGE}{body}"));
}

#[test]
fn a_child_without_rights_and_descriptors_keeps_to_its_share() {
    // SAFETY: always succeeds.
    if unsafe { libc::geteuid() } != 0 {
        return say("only root can give up rights");
    }
    let body = r"
block = bytearray(128 * M)
fill(block)
child = os.fork()
if child == 0:
    fill(block, 5)
    os.setresuid(65534, 65534, 65534)
    os.closerange(0, 1000)
    right = holds(block, 5)
    fill(block, 6)
    os._exit(0 if right and holds(block, 6) else 1)
most, status = most_of(child, block)
assert status == 0, status
assert most <= 16 * M + 16 * M + 4 * M, most
print('done')
";
    is_done(&format!("{LARGE}{body}"));
}

/// Cuts all connections of a relay at random moments, from the moment on when a file exists.
struct Cutting {
    ends: Sender<()>,
    thread: Option<JoinHandle<usize>>,
}

impl Cutting {
    fn start(relay: Arc<Relay>, begun: PathBuf, seed: u64) -> Cutting {
        let (ends, has_ended) = channel();
        let mut rng = Rng(seed);
        let cut = move || {
            for cuts in 0.. {
                let pause = Duration::from_millis(20 + rng.below(200) as u64);
                if has_ended.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                    return cuts;
                }
                if begun.exists() {
                    relay.cut();
                }
            }
            unreachable!("the range has no end")
        };
        let thread = Some(thread::spawn(cut));
        Cutting { ends, thread }
    }

    /// Ends the cutting. Returns the number of cuts.
    fn end(mut self) -> usize {
        self.ends.send(()).unwrap();
        self.thread.take().unwrap().join().unwrap()
    }
}

/// Variable of the environment with the number of seeds, for a longer run.
const SEEDS: &str = "FARPAGE_TEST_SEEDS";

#[test]
fn children_at_random_moments_have_what_their_parent_had_whatever_connections_break() {
    if !can_run(&[GCC]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "forks/random", &["-pthread"]).unwrap();
    let seeds: u64 = env::var(SEEDS).map_or(1, |seeds| seeds.parse().unwrap());
    let first = seed();
    for seed in first..first + seeds {
        for &mode in modes() {
            let begun = folder.path().join(format!("{seed}{}", mode[0]));
            let server = Both::start(512 * MIB, Duration::from_secs(20));
            let relay = Arc::new(Relay::to(&server.tcp.to_string()));
            let cutting = Cutting::start(relay.clone(), begun.clone(), seed);
            let near = [
                "--budget",
                "4MiB",
                "--min-bytes",
                "128KiB",
                "--server",
                &relay.url,
            ];
            let options = [&near, mode].concat();
            let number = seed.to_string();
            let command = [
                program.to_str().unwrap(),
                &number,
                "300",
                begun.to_str().unwrap(),
            ];
            let ours = farpage(&options, &command);
            let (said, why) = (text(&ours.stdout), text(&ours.stderr));
            assert_eq!(said, "done\n", "{seed} {mode:?} {} {why}", ours.status);
            println!(
                "{seed} {mode:?}: {} connections, {} cuts",
                relay.accepted(),
                cutting.end()
            );
        }
    }
}
