//! Abilities of this machine: kernel, userfaultfd, limits, and for each missing one the command
//! that mends it.
//!
//! The rule it keeps: the probe tries things and believes no version numbers, and changes nothing.

use std::{fmt, fs, io};

use nix::errno::Errno;

use crate::{
    pagemap::{self, Pagemap},
    sys,
    uffd::{Features, Uffd, UserfaultfdError},
};

/// Verdict on one ability of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Present.
    Yes,
    /// Missing, which costs speed or a feature.
    Limited,
    /// Missing, and nothing works without it.
    No,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Yes => "ok",
            Self::Limited => "limited",
            Self::No => "MISSING",
        })
    }
}

/// One line of a [`Probe`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Check {
    /// The ability that was looked at.
    pub name: &'static str,
    /// The verdict on the ability.
    pub verdict: Verdict,
    /// The finding, in words.
    pub found: String,
    /// The command that mends a missing ability.
    pub mend: Option<&'static str>,
}

impl Check {
    fn new(
        name: &'static str,
        fine: bool,
        otherwise: Verdict,
        found: impl Into<String>,
        mend: &'static str,
    ) -> Self {
        let verdict = if fine { Verdict::Yes } else { otherwise };
        Self {
            name,
            verdict,
            found: found.into(),
            mend: (!fine).then_some(mend),
        }
    }
}

/// Abilities of this machine; the `Display` is a table.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Probe {
    /// The kernel's release, as `uname -r` prints it.
    pub kernel: String,
    /// The features of userfaultfd that were found; none when it can not be opened.
    pub features: Features,
    /// All checks that were made.
    pub checks: Vec<Check>,
}

impl Probe {
    /// True if a program that asks for no more than the probe did can map regions.
    pub fn usable(&self) -> bool {
        self.checks.iter().all(|check| check.verdict != Verdict::No)
    }
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "kernel {}", self.kernel)?;
        for Check {
            name,
            verdict,
            found,
            mend,
        } in &self.checks
        {
            writeln!(f, "  {verdict:<8} {name:<28} {found}")?;
            if let Some(mend) = mend {
                writeln!(f, "  {:8} {:28} -> {mend}", "", "")?;
            }
        }
        Ok(())
    }
}

const NEWER_KERNEL: &str = "boot a newer kernel (Debian: `sudo apt install linux-image-amd64/bookworm-backports`; Ubuntu: \
                            `sudo apt install linux-generic-hwe-24.04`)";
const PERMIT_SYSCALL: &str = "sudo sysctl -w vm.unprivileged_userfaultfd=1";
const PERMIT_DEVICE: &str = "sudo setfacl -m u:$USER:rw /dev/userfaultfd";
const PERMIT_OR_DO_WITHOUT: &str = "sudo sysctl -w vm.unprivileged_userfaultfd=1; or do without, for one program: \
                                    FARPAGE_USER_MODE_ONLY=1 in its environment";

/// Looks at this machine, for a program that is content with its own instructions' faults
/// (`user_mode_only`), or wants those of system calls, too, as programs do by default.
pub fn probe(user_mode_only: bool) -> Probe {
    let mut checks = Vec::new();
    let by_syscall = sys::open_by_syscall(false).map(drop);
    let by_device = sys::open_by_device(false).map(drop);
    let user_mode = Uffd::supported(true);
    let full = by_syscall.is_ok() || by_device.is_ok();

    let opened = |result: &nix::Result<()>| match result {
        Ok(()) => "can be opened".to_owned(),
        Err(errno) => format!("can not be opened: {errno}"),
    };
    let one_is_enough = if full { Verdict::Limited } else { Verdict::No };
    let syscall_verdict = if user_mode.is_ok() {
        Verdict::Limited
    } else {
        one_is_enough
    };
    checks.push(Check::new(
        "userfaultfd system call",
        by_syscall.is_ok(),
        syscall_verdict,
        opened(&by_syscall),
        PERMIT_SYSCALL,
    ));
    let absent = matches!(by_device, Err(Errno::ENOENT));
    let mend = if absent { NEWER_KERNEL } else { PERMIT_DEVICE };
    checks.push(Check::new(
        "/dev/userfaultfd",
        by_device.is_ok(),
        Verdict::Limited,
        opened(&by_device),
        mend,
    ));
    checks.push(Check::new(
        "faults in system calls",
        full,
        if user_mode_only {
            Verdict::Limited
        } else {
            Verdict::No
        },
        if full {
            "caught"
        } else {
            "not caught: system calls on absent pages fail with EFAULT"
        },
        PERMIT_OR_DO_WITHOUT,
    ));
    let unprivileged = read_trimmed("/proc/sys/vm/unprivileged_userfaultfd");
    checks.push(Check::new(
        "unprivileged userfaultfd",
        unprivileged.as_deref().is_ok_and(|value| value == "1"),
        Verdict::Limited,
        match unprivileged.as_deref() {
            Ok("1") => "for everyone".to_owned(),
            Ok(_) => "for root, or in user mode only".to_owned(),
            Err(error) => format!("unknown: {error}"),
        },
        PERMIT_SYSCALL,
    ));

    let supported = if full {
        Uffd::supported(false)
    } else {
        user_mode
    };
    checks.push(feature(
        "MISSING",
        &supported,
        Features::MISSING,
        Verdict::No,
        "4.11",
    ));
    for (wanted, name, since) in Features::NAMED {
        // The frame pool lives by SIGBUS mode; all else has a substitute.
        let otherwise = if wanted == Features::SIGBUS {
            Verdict::No
        } else {
            Verdict::Limited
        };
        checks.push(feature(name, &supported, wanted, otherwise, since));
    }
    checks.push(pagemap_scan());
    checks.extend(settings());
    let kernel = nix::sys::utsname::uname().map_or_else(
        |errno| errno.to_string(),
        |name| name.release().to_string_lossy().into_owned(),
    );
    Probe {
        kernel,
        features: supported.unwrap_or_default(),
        checks,
    }
}

fn feature(
    name: &'static str,
    supported: &Result<Features, UserfaultfdError>,
    wanted: Features,
    otherwise: Verdict,
    since: &str,
) -> Check {
    match supported {
        Ok(features) => {
            let fine = features.contains(wanted);
            let found = if fine {
                "supported".to_owned()
            } else {
                format!("since kernel {since}")
            };
            Check::new(name, fine, otherwise, found, NEWER_KERNEL)
        }
        Err(error) => Check::new(
            name,
            false,
            otherwise,
            format!("unknown: {error}"),
            PERMIT_SYSCALL,
        ),
    }
}

fn pagemap_scan() -> Check {
    let name = "PAGEMAP_SCAN";
    match Pagemap::open().map(|pagemap| pagemap.can_scan()) {
        Ok(Ok(())) => Check::new(name, true, Verdict::Limited, "supported", NEWER_KERNEL),
        Ok(Err(error)) => Check::new(
            name,
            false,
            Verdict::Limited,
            format!("since kernel 6.7 ({error})"),
            NEWER_KERNEL,
        ),
        Err(error) => Check::new(
            name,
            false,
            Verdict::No,
            format!("/proc/self/pagemap: {error}"),
            pagemap::remedy(&error),
        ),
    }
}

fn settings() -> Vec<Check> {
    let huge = read_trimmed("/sys/kernel/mm/transparent_hugepage/enabled");
    let maps = read_trimmed("/proc/sys/vm/max_map_count");
    let overcommit = read_trimmed("/proc/sys/vm/overcommit_memory");
    let memlock = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_MEMLOCK);
    let text = |value: &io::Result<String>| match value {
        Ok(value) => value.clone(),
        Err(error) => format!("unknown: {error}"),
    };
    vec![
        Check::new(
            "transparent huge pages",
            huge.as_deref()
                .is_ok_and(|value| !value.contains("[never]")),
            Verdict::Limited,
            text(&huge),
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        Check::new(
            "vm.max_map_count",
            // A mapping per stripe: the kernel's default is enough for tens of thousands.
            maps.as_deref()
                .is_ok_and(|value| value.parse().is_ok_and(|count: u64| count >= 65_530)),
            Verdict::Limited,
            text(&maps),
            "sudo sysctl -w vm.max_map_count=1000000",
        ),
        Check::new(
            "vm.overcommit_memory",
            overcommit.as_deref().is_ok_and(|value| value != "2"),
            Verdict::Limited,
            text(&overcommit),
            "sudo sysctl -w vm.overcommit_memory=0",
        ),
        Check::new(
            "locked memory (for RDMA)",
            memlock.is_ok_and(|(soft, _)| soft >= 64 << 20),
            Verdict::Limited,
            match memlock {
                Ok((nix::libc::RLIM_INFINITY, _)) => "unlimited".to_owned(),
                Ok((soft, _)) => format!("{} KiB", soft >> 10),
                Err(errno) => format!("unknown: {errno}"),
            },
            "ulimit -l unlimited (for good: `echo '* - memlock unlimited' | sudo tee -a /etc/security/limits.conf`)",
        ),
    ]
}

fn read_trimmed(path: &str) -> io::Result<String> {
    fs::read_to_string(path).map(|text| text.trim().to_owned())
}
