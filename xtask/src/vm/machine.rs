//! One run of the virtual machine, from boot to end.
//!
//! The rule it keeps: the machine leaves nothing behind. The guest reads through inherited
//! descriptors, its output comes back through pipes, and its disk is in its own memory. The machine
//! does not outlive `xtask`, however that ends.

use std::{
    fs::{self, File},
    io::{self, PipeReader, PipeWriter, Read, Write},
    os::{
        fd::{AsRawFd, FromRawFd, RawFd},
        unix::process::CommandExt,
    },
    process::{Command, Stdio},
    sync::mpsc::{self, Sender},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use super::{archive::Archive, kernel::Kernel, options::Options};
use crate::children;

/// Emulation of a processor without KVM.
const TCG: &str = "tcg,thread=multi,tb-size=256";
/// Files of this machine, as the guest sees them.
const HOST: &str = "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap";
const INIT: &str = include_str!("init.sh");
const RUN: &str = include_str!("run.sh");

/// Longest time of a boot. An emulated machine is up after 6 s, on a busy host after 20 s, and one
/// with KVM after 2 s: a machine that takes longer never will be.
const BOOT_EMULATED_MAX: Duration = Duration::from_secs(120);
const BOOT_KVM_MAX: Duration = Duration::from_secs(20);
/// Time within which the guest, which has reported the end, must be gone.
const SHUTDOWN_MAX: Duration = Duration::from_secs(10);

/// End of the command in the guest.
pub(crate) enum End {
    /// The command's status, as a shell reports it.
    Exited(u8),
    TimedOut,
}

/// Receiver of the guest's output, called with bytes as they come.
pub(crate) type Sink<'a> = &'a mut (dyn FnMut(&[u8]) + Send);

/// Boots a machine and runs a shell script in it.
///
/// # Errors
/// A machine that does not come up twice in a row, or dies. Its last output is part of the message.
pub(crate) fn run(
    options: &Options,
    kernel: &Kernel,
    script: &[u8],
    end: Instant,
    out: Sink,
    err: Sink,
) -> Result<End> {
    let files = first_files(options, kernel, script)?;
    let mut boot = |accelerator| boot(options, kernel, &files, accelerator, end, out, err);
    let kvm = File::options().read(true).write(true).open("/dev/kvm");
    if kvm.is_ok() {
        if let Boot::Ran(end) = boot(Accelerator::Kvm)? {
            return Ok(end);
        }
        eprintln!("vm: KVM does not work here; emulating the machine");
    }
    match boot(Accelerator::None)? {
        Boot::Ran(end) => return Ok(end),
        Boot::Failed(why) => {
            eprintln!("{why}\nvm: the machine did not come up, as said above; once more ...");
        }
    }
    match boot(Accelerator::None)? {
        Boot::Ran(end) => Ok(end),
        Boot::Failed(why) => bail!("the machine did not come up, twice:\n{why}"),
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Accelerator {
    Kvm,
    None,
}

/// Result of one attempt.
enum Boot {
    Ran(End),
    /// The command was not started; the last output of the machine.
    Failed(String),
}

/// Report of the guest.
enum Report {
    Ready,
    Exit(u8),
    SetupFailed,
}

fn boot(
    options: &Options,
    kernel: &Kernel,
    files: &File,
    accelerator: Accelerator,
    end: Instant,
    out: Sink,
    err: Sink,
) -> Result<Boot> {
    let pipe = || io::pipe().context("cannot make a pipe");
    let (out_pipe, out_guest) = pipe()?;
    let (err_pipe, err_guest) = pipe()?;
    let (report_pipe, report_guest) = pipe()?;
    let (console_pipe, console_guest) = pipe()?;

    let mut command = emulator(options, kernel, files, accelerator);
    // The console and qemu's own complaints share a port: both are of interest only when the
    // machine fails.
    command
        .stdout(Stdio::null())
        .stderr(console_guest.try_clone().context("cannot share a pipe")?);
    command.args(["-serial", "chardev:console"]);
    let ports: [(&str, &PipeWriter); 4] = [
        ("console", &console_guest),
        ("out", &out_guest),
        ("err", &err_guest),
        ("report", &report_guest),
    ];
    for (set, (name, pipe)) in ports.iter().enumerate() {
        let fd = pipe.as_raw_fd();
        command.arg("-add-fd").arg(format!("fd={fd},set={set}"));
        let place = format!("file,id={name},path=/dev/fdset/{set},append=on");
        command.args(["-chardev", &place]);
    }
    command.args(["-device", "virtio-serial-pci"]);
    for (name, _pipe) in &ports[1..] {
        let port = format!("virtserialport,chardev={name},name={name}");
        command.args(["-device", &port]);
    }
    let mut inherited: Vec<RawFd> = ports.iter().map(|(_, pipe)| pipe.as_raw_fd()).collect();
    inherited.push(files.as_raw_fd());
    inherit(&mut command, inherited);

    let child = children::spawn(&mut command)?;
    // The guest alone holds the pipes' other ends, so that the pipes end with it.
    drop((command, out_guest, err_guest, report_guest, console_guest));

    let (reports, reported) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| pour(out_pipe, out));
        scope.spawn(|| pour(err_pipe, err));
        scope.spawn(|| read_reports(report_pipe, reports));
        let console = scope.spawn(|| {
            let mut console = Vec::new();
            pour(console_pipe, &mut |bytes| console.extend(bytes));
            last_lines(&String::from_utf8_lossy(&console))
        });

        let boot_max = match accelerator {
            Accelerator::Kvm => BOOT_KVM_MAX,
            Accelerator::None => BOOT_EMULATED_MAX,
        };
        let mut ready = false;
        let mut until = end.min(Instant::now() + boot_max);
        let last = loop {
            let left = until.saturating_duration_since(Instant::now());
            match reported.recv_timeout(left) {
                Ok(Report::Ready) => (ready, until) = (true, end),
                Ok(report) => break Some(report),
                Err(_) => break None,
            }
        };
        let timed_out = last.is_none() && Instant::now() >= end;
        let patience = if timed_out {
            Duration::ZERO
        } else {
            SHUTDOWN_MAX
        };
        children::wait_within(patience, child)?;
        let console = console.join().expect("collecting lines does not panic");
        match last {
            Some(Report::Exit(status)) => Ok(Boot::Ran(End::Exited(status))),
            None if timed_out => Ok(Boot::Ran(End::TimedOut)),
            None if ready => bail!("the machine died while the command ran:\n{console}"),
            None => Ok(Boot::Failed(console)),
            Some(_) => bail!("the machine could not make its RDMA devices, as said above"),
        }
    })
}

/// Returns the command of the machine, without its ports.
fn emulator(options: &Options, kernel: &Kernel, files: &File, accelerator: Accelerator) -> Command {
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-nodefaults", "-no-user-config", "-no-reboot"]);
    command.args(["-display", "none", "-nic", "none"]);
    command.args(match accelerator {
        Accelerator::Kvm => ["-accel", "kvm", "-cpu", "host"],
        // Page tables of five levels only cost time when software walks them.
        Accelerator::None => ["-accel", TCG, "-cpu", "max,la57=off"],
    });
    command.arg("-smp").arg(options.cpus.to_string());
    command.arg("-m").arg(options.memory_mib.to_string());
    command.arg("-kernel").arg(&kernel.image);
    let files = files.as_raw_fd();
    command.arg("-initrd").arg(format!("/proc/self/fd/{files}"));
    command.args([
        "-append",
        "console=ttyS0 quiet panic=-1 oops=panic mitigations=off tsc=reliable no_timer_check rcupdate.rcu_expedited=1",
    ]);
    command.args(["-virtfs", HOST]);
    command
}

/// Makes the guest's first file system, in memory: modules, scripts, and the command.
fn first_files(options: &Options, kernel: &Kernel, script: &[u8]) -> Result<File> {
    let read = |path: &std::path::Path| {
        fs::read(path).with_context(|| format!("cannot read {}", path.display()))
    };
    let mut archive = Archive::default();
    archive.directory("bin");
    archive.file("bin/busybox", true, &read("/bin/busybox".as_ref())?);
    archive.file("init", true, INIT.as_bytes());
    archive.directory("guest");
    archive.file("guest/run.sh", false, RUN.as_bytes());
    let settings = format!("HOSTS={}\n", options.hosts);
    archive.file("guest/settings", false, settings.as_bytes());
    archive.file("guest/command", false, script);

    // SAFETY: the name is a C string; the descriptor is checked below.
    let fd = unsafe { libc::memfd_create(c"vm".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error()).context("cannot create a file in memory");
    }
    // SAFETY: the descriptor was created above and is known to nobody else.
    let mut file = unsafe { File::from_raw_fd(fd) };
    file.write_all(&read(&kernel.modules)?)
        .and_then(|()| file.write_all(&archive.finish()))
        .context("cannot write a file in memory")?;
    Ok(file)
}

/// Lets the command have `descriptors` under their numbers, and end with `xtask`.
fn inherit(command: &mut Command, descriptors: Vec<RawFd>) {
    let inherit = move || {
        for &fd in &descriptors {
            // SAFETY: plain system call without pointers.
            if unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        // SAFETY: plain system call without pointers. A parent that is killed cannot end its
        // children itself.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    };
    // SAFETY: between fork and exec it makes system calls only and allocates nothing
    // (`last_os_error` reads errno).
    unsafe { command.pre_exec(inherit) };
}

fn pour(mut pipe: PipeReader, sink: Sink) {
    let mut buffer = [0; 1 << 16];
    while let Ok(length) = pipe.read(&mut buffer) {
        if length == 0 {
            break;
        }
        sink(&buffer[..length]);
    }
}

fn read_reports(pipe: PipeReader, reports: Sender<Report>) {
    let mut text = String::new();
    pour(pipe, &mut |bytes| {
        text.push_str(&String::from_utf8_lossy(bytes));
        while let Some((line, rest)) = text.split_once('\n') {
            let report = match line.strip_prefix("exit ") {
                Some(status) => status.parse().ok().map(Report::Exit),
                None if line == "ready" => Some(Report::Ready),
                None => Some(Report::SetupFailed),
            };
            // The receiver is gone once the machine is being ended.
            let _ = reports.send(report.unwrap_or(Report::SetupFailed));
            text = rest.to_owned();
        }
    });
}

/// Returns the last lines of a console, which show why the machine died.
fn last_lines(console: &str) -> String {
    let lines: Vec<&str> = console.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}
