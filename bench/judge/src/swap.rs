//! Swap to compressed memory for one program: a zram device and a memory cgroup.
//!
//! The rule it keeps: whatever is set up is owned by a guard from that moment on, and taken down
//! when the guard is dropped: at the end, on an error, in a panic. What a killed run left behind
//! carries that run's process id, so that the next one finds and removes it. (A zram device is
//! anonymous for the milliseconds before `mkswap` labels it; only a kill just then leaves one that
//! nobody claims.)

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process::{self, Command},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, geteuid},
};

const ZRAM_CONTROL: &str = "/sys/class/zram-control";
const TOOLS: [&str; 3] = ["mkswap", "swapon", "swapoff"];
/// With the process id, the name of a cgroup and the label of a device; labels are cut after 15
/// bytes.
const NAME: &str = "farpage-";
/// How long the kernel, or udev, may take to let go of something.
const PATIENCE: Duration = Duration::from_secs(5);

/// A place for programs whose memory beyond a limit is swapped to compressed memory.
pub(crate) struct Swap {
    // Taken down first: what is still swapped out then needs no room when the device goes.
    cgroup: Cgroup,
    _device: Zram,
}

/// Where a cgroup of our own can be made, and by which of the two interfaces: a machine has its
/// memory controller in one of them.
#[derive(Debug, PartialEq)]
struct Parent {
    path: PathBuf,
    version: Version,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Version {
    V1,
    V2,
}

impl Swap {
    /// Sets up a cgroup with `memory_bytes`, and `swap_bytes` of swap, which all programs may use:
    /// only this one should need any.
    ///
    /// # Errors
    /// What this machine lacks, all of it at once; or what could not be done, with everything taken
    /// down again.
    pub(crate) fn set_up(memory_bytes: u64, swap_bytes: u64) -> Result<Self> {
        let parent = check()?;
        Zram::remove_leftovers()?;
        Cgroup::remove_leftovers(&parent)?;
        let device = Zram::set_up(swap_bytes)?;
        let cgroup = Cgroup::set_up(&parent, memory_bytes)?;
        Ok(Self {
            cgroup,
            _device: device,
        })
    }

    /// Runs this program inside, whatever arguments are added.
    pub(crate) fn command(&self) -> Result<Command> {
        let this_program = env::current_exe().context("cannot find this program's own file")?;
        // A shell moves itself before it becomes the program: not a byte of the program is
        // allocated outside.
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", r#"echo $$ >"$0" && exec "$@""#])
            .arg(self.cgroup.path.join("cgroup.procs"))
            .arg(this_program);
        Ok(command)
    }
}

/// What is needed; returns the cgroup below which one of our own can be made.
fn check() -> Result<Parent> {
    let mut missing = Vec::new();
    if !geteuid().is_root() {
        missing.push("root: only root may make swap devices (run it with sudo)".to_owned());
    }
    if !Path::new(ZRAM_CONTROL).exists() {
        // It may be a module that is not loaded; whether that worked is looked at below.
        let _ = Command::new("modprobe").arg("zram").output();
    }
    if !Path::new(ZRAM_CONTROL).exists() {
        missing.push(format!(
            "zram: there is no {ZRAM_CONTROL} (load the module: modprobe zram)"
        ));
    }
    for tool in TOOLS {
        if Command::new(tool).arg("--version").output().is_err() {
            missing.push(format!("the program `{tool}` (package util-linux)"));
        }
    }
    let parent = fs::read_to_string("/proc/self/mountinfo")
        .and_then(|mounts| Ok((mounts, fs::read_to_string("/proc/self/cgroup")?)))
        .context("cannot read which cgroups there are")
        .and_then(|(mounts, own)| parent_cgroup(&mounts, &own));
    match parent {
        Ok(parent) if missing.is_empty() => return Ok(parent),
        Ok(_) => {}
        Err(error) => missing.push(format!("{error:#}")),
    }
    bail!(
        "cannot compare with swap on this machine. It lacks:\n  {}",
        missing.join("\n  ")
    )
}

/// The cgroup below which one of our own is limited as we are, and may hold processes.
fn parent_cgroup(mounts: &str, own: &str) -> Result<Parent> {
    if let Some(path) = parent_v1(mounts, own) {
        return Ok(Parent {
            path,
            version: Version::V1,
        });
    }
    Ok(Parent {
        path: parent_v2(mounts, own)?,
        version: Version::V2,
    })
}

/// Our own cgroup, where cgroup v1 has the memory controller.
fn parent_v1(mounts: &str, own: &str) -> Option<PathBuf> {
    let (root, mount) = mounts.lines().find_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut file_system = file_system.split(' ');
        let is_memory = file_system.next() == Some("cgroup")
            && file_system
                .nth(1)?
                .split(',')
                .any(|option| option == "memory");
        let mut fields = mount.split(' ').skip(3);
        is_memory.then_some((fields.next()?, fields.next()?))
    })?;
    let own = own.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        controllers
            .split(',')
            .any(|name| name == "memory")
            .then_some(path)
    })?;
    // In a container the mount shows only what is below the container's root.
    let below = Path::new(own).strip_prefix(root).ok()?;
    Some(Path::new(mount).join(below))
}

/// The cgroup that our own one is in, where cgroup v2 has the memory controller: there, one with
/// processes has none below it.
fn parent_v2(mounts: &str, own: &str) -> Result<PathBuf> {
    let root = mounts
        .lines()
        .find_map(|line| {
            let (mount, file_system) = line.split_once(" - ")?;
            file_system
                .starts_with("cgroup2 ")
                .then(|| mount.split(' ').nth(4))?
        })
        .context("cgroups: neither v1's memory controller nor v2 is mounted (mount -t cgroup2 none /sys/fs/cgroup)")?;
    let own = own
        .lines()
        .find_map(|line| line.strip_prefix("0::/"))
        .context("cgroup v2: this process is in none")?;
    let parent = Path::new(root).join(Path::new(own).parent().unwrap_or(Path::new("")));
    let path = parent.join("cgroup.subtree_control");
    let controllers = fs::read_to_string(&path).unwrap_or_default();
    ensure!(
        controllers.split_whitespace().any(|name| name == "memory"),
        "cgroup v2's memory controller: it is not enabled in {} (echo +memory there)",
        path.display()
    );
    Ok(parent)
}

/// A memory cgroup, which is empty and gone when this is dropped.
struct Cgroup {
    path: PathBuf,
    version: Version,
}

impl Cgroup {
    fn set_up(parent: &Parent, memory_bytes: u64) -> Result<Self> {
        let path = parent.path.join(format!("{NAME}{}", process::id()));
        fs::create_dir(&path)
            .with_context(|| format!("cannot make the cgroup {}", path.display()))?;
        let cgroup = Self {
            path,
            version: parent.version,
        };
        match cgroup.version {
            // Swap has no limit of its own there unless somebody sets one.
            Version::V1 => cgroup.write("memory.limit_in_bytes", &memory_bytes.to_string())?,
            Version::V2 => {
                cgroup.write("memory.max", &memory_bytes.to_string())?;
                cgroup.write("memory.swap.max", "max")?;
            }
        }
        // Where zswap is on, it would stand before the device.
        if cgroup.path.join("memory.zswap.max").exists() {
            cgroup.write("memory.zswap.max", "0")?;
        }
        Ok(cgroup)
    }

    fn write(&self, file: &str, value: &str) -> Result<()> {
        let path = self.path.join(file);
        fs::write(&path, value)
            .with_context(|| format!("cannot write {value} to {}", path.display()))
    }

    /// Ends whoever is left inside.
    fn kill(&self) {
        match self.version {
            Version::V1 => {
                let inside = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
                for process in inside.lines().filter_map(|line| line.parse().ok()) {
                    let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
                }
            }
            Version::V2 => {
                let _ = self.write("cgroup.kill", "1");
            }
        }
    }

    fn remove_leftovers(parent: &Parent) -> Result<()> {
        let context = || format!("cannot list the cgroups in {}", parent.path.display());
        for entry in fs::read_dir(&parent.path).with_context(context)? {
            let entry = entry.with_context(context)?;
            if is_leftover(&entry.file_name().to_string_lossy())? {
                eprintln!(
                    "removing {}, left behind by a run that was killed",
                    entry.path().display()
                );
                drop(Self {
                    path: entry.path(),
                    version: parent.version,
                });
            }
        }
        Ok(())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Whoever is left inside, if anybody, is a child of ours that outlived us.
        self.kill();
        if let Err(error) = retry(|| fs::remove_dir(&self.path)) {
            eprintln!(
                "cannot remove the cgroup {}: {error}; rmdir it by hand",
                self.path.display()
            );
        }
    }
}

/// A zram device with swap on it, which is gone when this is dropped.
struct Zram {
    id: u32,
}

impl Zram {
    fn set_up(bytes: u64) -> Result<Self> {
        let path = format!("{ZRAM_CONTROL}/hot_add");
        let id = fs::read_to_string(&path)
            .with_context(|| format!("cannot add a zram device through {path}"))?;
        let id = id
            .trim()
            .parse()
            .with_context(|| format!("{path} gave no number: {id:?}"))?;
        let device = Self { id };
        for (file, value) in [("comp_algorithm", "lz4"), ("disksize", &bytes.to_string())] {
            let path = device.sys(file);
            fs::write(&path, value)
                .with_context(|| format!("cannot write {value} to {}", path.display()))?;
        }
        let node = node(id);
        // udev makes it where the kernel does not.
        retry(|| fs::metadata(&node))
            .with_context(|| format!("there is no {} for the new zram device", node.display()))?;
        let label = format!("{NAME}{}", process::id());
        run(Command::new("mkswap").args(["-L", &label]).arg(&node))?;
        // Before all other swap that this machine has.
        run(Command::new("swapon").args(["-p", "32767"]).arg(&node))?;
        Ok(device)
    }

    fn sys(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/sys/block/zram{}/{file}", self.id))
    }

    fn is_on(&self) -> bool {
        let node = node(self.id);
        fs::read_to_string("/proc/swaps").is_ok_and(|swaps| {
            swaps
                .lines()
                .any(|line| line.split_whitespace().next().map(Path::new) == Some(&node))
        })
    }

    fn remove_leftovers() -> Result<()> {
        for entry in fs::read_dir("/sys/block").context("cannot list /sys/block")? {
            let name = entry.context("cannot list /sys/block")?.file_name();
            let Some(id) = name
                .to_str()
                .and_then(|name| name.strip_prefix("zram")?.parse().ok())
            else {
                continue;
            };
            let node = node(id);
            if let Some(label) = label(&node)
                && is_leftover(&label)?
            {
                eprintln!(
                    "removing {}, left behind by a run that was killed",
                    node.display()
                );
                drop(Self { id });
            }
        }
        Ok(())
    }

    fn take_down(&self) -> Result<()> {
        if self.is_on() {
            run(Command::new("swapoff").arg(node(self.id)))?;
        }
        // Something that looks at new devices, such as udev, may have it open for a moment.
        retry(|| fs::write(format!("{ZRAM_CONTROL}/hot_remove"), self.id.to_string()))
            .context("the kernel does not remove it")
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        if let Err(error) = self.take_down() {
            let (id, node) = (self.id, node(self.id));
            eprintln!(
                "cannot take down {0}: {error:#}; by hand: swapoff {0}; echo {id} >{ZRAM_CONTROL}/hot_remove",
                node.display()
            );
        }
    }
}

fn node(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/zram{id}"))
}

/// The label of the swap area on a device, if there is one.
fn label(node: &Path) -> Option<String> {
    use std::os::unix::fs::FileExt;
    // `union swap_header` of the kernel: a page with its magic at the end, and the label at 1052.
    let mut page = [0; 4096];
    fs::File::open(node)
        .ok()?
        .read_exact_at(&mut page, 0)
        .ok()?;
    let label = page[1052..1068].split(|byte| *byte == 0).next()?;
    page.ends_with(b"SWAPSPACE2")
        .then(|| String::from_utf8_lossy(label).into_owned())
}

/// Whether a name is one of ours whose run has ended.
///
/// # Errors
/// That run goes on.
fn is_leftover(name: &str) -> Result<bool> {
    let Some(pid) = name
        .strip_prefix(NAME)
        .and_then(|pid| pid.parse::<u32>().ok())
    else {
        return Ok(false);
    };
    // Ids are used again, but hardly by this very program.
    let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    ensure!(
        !comm.starts_with("farpage-bench") || pid == process::id(),
        "process {pid} is comparing with swap already; wait for its end"
    );
    Ok(true)
}

/// Runs a tool; what it says on standard error becomes the error.
fn run(command: &mut Command) -> Result<()> {
    let output = command
        .output()
        .with_context(|| format!("cannot start {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?} failed ({}): {}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}

/// Until it works, or patience ends.
fn retry<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let end = Instant::now() + PATIENCE;
    loop {
        match attempt() {
            Err(_) if Instant::now() < end => thread::sleep(Duration::from_millis(20)),
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNT: &str = "30 24 0:26 / ROOT rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";

    /// A directory with the files of a cgroup.
    fn cgroup(name: &str, controllers: &str) -> PathBuf {
        let root = env::temp_dir().join(format!("farpage-bench-{name}-{}", process::id()));
        fs::create_dir_all(root.join("user.slice/shell.scope")).unwrap();
        for group in ["", "user.slice"] {
            fs::write(root.join(group).join("cgroup.subtree_control"), controllers).unwrap();
        }
        root
    }

    #[test]
    fn the_cgroup_is_made_beside_our_own() {
        let root = cgroup("beside", "cpu memory pids\n");
        let mounts = MOUNT.replace("ROOT", root.to_str().unwrap());
        let parent = |own| {
            let parent = parent_cgroup(&mounts, own).unwrap();
            assert_eq!(parent.version, Version::V2);
            parent.path
        };
        assert_eq!(
            parent("0::/user.slice/shell.scope\n"),
            root.join("user.slice")
        );
        assert_eq!(parent("4:memory:/x\n0::/\n"), root.join(""));
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn where_v1_has_the_controller_the_cgroup_is_made_below_our_own() {
        let mounts = "31 24 0:27 / /v2 rw - cgroup2 cgroup2 rw\n\
                      35 31 0:32 ROOT /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n";
        let parent = |root, own| parent_cgroup(&mounts.replace("ROOT", root), own).unwrap();
        let expected = |path: &str| Parent {
            path: PathBuf::from(path),
            version: Version::V1,
        };
        assert_eq!(
            parent("/", "8:pids:/\n4:memory:/x/y\n0::/\n"),
            expected("/sys/fs/cgroup/memory/x/y")
        );
        assert_eq!(
            parent("/x", "4:cpu,memory:/x/y\n"),
            expected("/sys/fs/cgroup/memory/y")
        );
    }

    #[test]
    fn without_a_memory_controller_the_error_says_so() {
        let root = cgroup("without", "cpu pids\n");
        let mounts = MOUNT.replace("ROOT", root.to_str().unwrap());
        let error = parent_cgroup(&mounts, "0::/\n").unwrap_err().to_string();
        assert!(error.contains("memory controller"), "{error}");
        assert!(parent_cgroup("", "0::/\n").is_err());
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    #[ignore = "needs root, and changes this machine's swap for a moment"]
    fn a_device_that_was_left_behind_is_removed() {
        let device = Zram::set_up(16 << 20).unwrap();
        let (id, node) = (device.id, node(device.id));
        assert!(device.is_on());
        assert_eq!(label(&node), Some(format!("{NAME}{}", process::id())));
        // As if this process had been killed.
        std::mem::forget(device);
        Zram::remove_leftovers().unwrap();
        assert!(!Path::new(&format!("/sys/block/zram{id}")).exists());
        assert!(!fs::read_to_string("/proc/swaps").unwrap().contains("zram"));
    }

    #[test]
    fn only_what_ended_runs_left_is_left_over() {
        // Beyond the largest process id that Linux gives.
        assert!(is_leftover("farpage-4194999").unwrap());
        for other in ["farpage-x", "swap", "", "farpage-"] {
            assert!(!is_leftover(other).unwrap(), "{other}");
        }
    }
}
