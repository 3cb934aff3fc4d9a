//! `cargo xtask vm`: a command in a virtual machine with RDMA, on any host: Debian's kernel with
//! its software implementation (`rdma_rxe`) under QEMU.
//!
//! The rule it keeps: the command runs on this machine's own files, which it cannot change, with
//! the caller's folder and environment. Its output and status come back unchanged. It ends with its
//! time limit. Missing files are fetched, and nothing else of this machine is touched.

mod archive;
mod kernel;
mod machine;
mod options;

use std::{
    env,
    ffi::OsStr,
    io::{self, Write},
    os::unix::ffi::OsStrExt,
    path::Path,
    process::ExitCode,
    time::Instant,
};

use anyhow::{Result, bail};

use self::kernel::Kernel;
pub(crate) use self::{
    machine::{End, Sink},
    options::Options,
};
use crate::setup::{self, Need};

pub(crate) const USAGE: &str = "\
Usage: cargo xtask vm [OPTIONS] [--] COMMAND [ARG...]

Runs COMMAND as root in a virtual machine that has RDMA (Debian's kernel with Soft-RoCE under QEMU). It sees this machine's files at the
same paths; what it writes is gone afterwards. It has your folder and environment and no standard input. Build first, then run what was built:

    cargo test --no-run -p farpage-fabric --features rdma      # prints the path of the test program
    cargo xtask vm target/debug/deps/farpage_fabric-... --test-threads 1

and build nothing while it runs. `cargo xtask test --rdma [FILTER...]` builds and runs all tests of RDMA.

In the guest: the device rxe0 at 10.99.0.1, also in FARPAGE_TEST_RDMA_ADDRESS; --hosts (FARPAGE_TEST_HOSTS) network namespaces host1, host2, ...
with a device each (rxe1, rxe2, ...) at 10.97.0.1, 10.97.0.2, ..., joined by a bridge. `ip netns exec host1 COMMAND` runs something on one;
`ip link set to-host1 down` cuts it off.

Exit status: that of COMMAND; 124 if the time was up; 125 if there is no machine or it died. The first run installs what is missing with apt
and downloads a kernel (170 MB; 30 MB of it are kept in ~/.cache/farpage/vm). On Debian it comes from the mirror in apt's own sources.
Other systems with apt, such as Ubuntu, need --mirror, and are untried.

Options:
  --timeout SECONDS  for everything, downloads included [600]
  --hosts N          network namespaces, 0 to 9 [2; more than 0 needs Linux 7]
  --suite SUITE      whose kernel: trixie-backports (Linux 7) or trixie (6.12) [trixie-backports]
  --mirror URL       a mirror of Debian to get the kernel from, such as http://HOST/debian [FARPAGE_VM_MIRROR, else apt's own]
  --cpus N           [2]
  --memory MIB       half of it for what the guest writes to disk [4096]";

/// Statuses of `xtask` itself, like those of `timeout` and `env`.
const TIMED_OUT: u8 = 124;
const NO_MACHINE: u8 = 125;

/// Status of a test program that has run to its end, but whose tests did not all pass.
pub(crate) const TESTS_FAILED: u8 = 101;

/// Runs the command `cargo xtask vm`.
pub(crate) fn run(args: &[String]) -> ExitCode {
    let (options, command) = match Options::read(args) {
        Ok(read) => read,
        Err(error) => {
            eprintln!("error: {error}\n\n{USAGE}");
            return ExitCode::from(NO_MACHINE);
        }
    };
    let run = || {
        let mut script = Script::new();
        script.line(["cd".as_ref(), env::current_dir()?.as_os_str()]);
        script.line(command.iter().map(AsRef::as_ref));
        Machine::prepare(options)?.run(
            &script,
            &mut |bytes| pass(io::stdout(), bytes),
            &mut |bytes| pass(io::stderr(), bytes),
        )
    };
    match run() {
        Ok(End::Exited(status)) => ExitCode::from(status),
        Ok(End::TimedOut) => {
            eprintln!("error: the time limit (`--timeout`) is up");
            ExitCode::from(TIMED_OUT)
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(NO_MACHINE)
        }
    }
}

/// Passes output on. The reader may be gone: the command goes on all the same.
fn pass(mut to: impl Write, bytes: &[u8]) {
    let _ = to.write_all(bytes).and_then(|()| to.flush());
}

/// A machine that can be booted.
pub(crate) struct Machine {
    options: Options,
    kernel: Kernel,
    end: Instant,
}

impl Machine {
    /// Gets all missing files. The time limit starts here.
    ///
    /// # Errors
    /// The reason why no such machine is possible, and the remedy.
    pub(crate) fn prepare(options: Options) -> Result<Machine> {
        if !cfg!(target_arch = "x86_64") {
            bail!("the virtual machine needs an x86-64 processor");
        }
        let end = Instant::now() + options.time_max;
        setup::install(&NEEDS, "the virtual machine")?;
        let kernel = kernel::prepare(&options.suite, options.mirror.as_deref(), end)?;
        Ok(Machine {
            options,
            kernel,
            end,
        })
    }

    /// Boots the machine, runs a script and ends the machine.
    ///
    /// # Errors
    /// A machine that does not come up or dies; not a script that fails.
    pub(crate) fn run(&self, script: &Script, out: Sink, err: Sink) -> Result<End> {
        let (options, script) = (&self.options, script.finish());
        machine::run(options, &self.kernel, &script, self.end, out, err)
    }
}

/// Lines for the guest's shell, which begin with this process's environment. The first line that
/// fails ends the script, except for an [`attempt`](Self::attempt).
pub(crate) struct Script {
    text: Vec<u8>,
}

impl Script {
    pub(crate) fn new() -> Script {
        let mut script = Script {
            text: b"set -e\nstatus=\n".to_vec(),
        };
        for (name, value) in env::vars_os() {
            let name = name.as_bytes();
            let of_shell = |c: &u8| c.is_ascii_alphanumeric() || *c == b'_';
            // The guest itself sets the variables that describe it.
            if name.iter().all(of_shell) && !name.starts_with(b"FARPAGE_TEST_") {
                script.text.extend(b"export ");
                script.text.extend(name);
                script.text.push(b'=');
                script.quote(value.as_bytes());
                script.text.push(b'\n');
            }
        }
        script.text.extend(b"PATH=\"$PATH:/usr/sbin:/sbin\"\n");
        script
    }

    /// Adds a command.
    pub(crate) fn line<'a>(&mut self, words: impl IntoIterator<Item = &'a OsStr>) {
        self.words(words);
        self.text.push(b'\n');
    }

    /// Adds a test program. If it fails, the script goes on, and fails at its end with the
    /// program's status; with [`TESTS_FAILED`] only if no other program failed worse.
    pub(crate) fn attempt<'a>(&mut self, words: impl IntoIterator<Item = &'a OsStr>) {
        self.words(words);
        let keep = format!(
            "|| {{ now=$?; [ $now -eq {TESTS_FAILED} ] && [ -n \"$status\" ] || status=$now; }}\n"
        );
        self.text.extend(keep.bytes());
    }

    /// Returns the text of the script.
    fn finish(&self) -> Vec<u8> {
        [&self.text[..], b"exit ${status:-0}\n"].concat()
    }

    fn words<'a>(&mut self, words: impl IntoIterator<Item = &'a OsStr>) {
        for word in words {
            self.quote(word.as_bytes());
            self.text.push(b' ');
        }
    }

    fn quote(&mut self, word: &[u8]) {
        self.text.push(b'\'');
        for &byte in word {
            match byte {
                b'\'' => self.text.extend(b"'\\''"),
                _ => self.text.push(byte),
            }
        }
        self.text.push(b'\'');
    }
}

/// Programs and libraries of the guest, which runs on this machine's files.
pub(crate) const NEEDS: [Need; 8] = [
    Need::program("QEMU", "qemu-system-x86", "qemu-system-x86_64"),
    Need::new(
        "a busybox that needs no libraries",
        "busybox-static",
        || Path::new("/bin/busybox").is_file(),
    ),
    Need::program("`depmod` and `modprobe`", "kmod", "modprobe"),
    Need::program("`xz`", "xz-utils", "xz"),
    Need::new(
        "the keys of Debian's packages",
        "debian-archive-keyring",
        || Path::new(kernel::KEYS).is_file(),
    ),
    Need::program("`ip` and `rdma`", "iproute2", "rdma"),
    Need::new("the driver of Soft-RoCE", "ibverbs-providers", || {
        setup::has_library("libibverbs/librxe-rdmav*.so")
    }),
    Need::new("librdmacm", "librdmacm1", || {
        setup::has_library("librdmacm.so.1")
    }),
];

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Runs a script in the shell of this machine. Returns its status and output.
    fn status_of(script: &Script) -> (Option<i32>, String) {
        let mut shell = Command::new("sh");
        let output = shell.arg("-c").arg(OsStr::from_bytes(&script.finish()));
        let output = output.output().expect("there is a shell");
        let text = String::from_utf8(output.stdout).expect("it prints text");
        (output.status.code(), text)
    }

    fn words<'a>(words: &'a [&'a str]) -> impl Iterator<Item = &'a OsStr> {
        words.iter().map(OsStr::new)
    }

    #[test]
    fn words_reach_the_command_as_they_are() {
        let mut script = Script::new();
        let odd = ["printf", "%s|", "it's", "$HOME", "a b", "*", "", "\\\n\""];
        script.line(words(&odd));
        let (status, text) = status_of(&script);
        assert_eq!(status, Some(0));
        assert_eq!(text, "it's|$HOME|a b|*||\\\n\"|");
    }

    #[test]
    fn a_failed_command_ends_the_script_and_a_failed_test_program_does_not() {
        let mut script = Script::new();
        script.attempt(words(&["sh", "-c", "exit 139"]));
        script.attempt(words(&["sh", "-c", "exit 101"]));
        script.line(words(&["echo", "on"]));
        assert_eq!(status_of(&script), (Some(139), "on\n".to_owned()));
        script.line(words(&["sh", "-c", "exit 7"]));
        script.line(words(&["echo", "not"]));
        assert_eq!(status_of(&script), (Some(7), "on\n".to_owned()));
    }
}
