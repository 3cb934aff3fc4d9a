//! [`Cgroup`]: a memory cgroup for one program, by either of the kernel's two interfaces.
//!
//! The rule it keeps: a cgroup is owned by a guard, and gone when the guard is dropped: at the end,
//! on an error, in a panic. Leftovers of a killed run carry its process id, so that the next run
//! finds and [removes](Cgroup::remove_leftovers) them.

use std::{
    env,
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
    process::{self, Command},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// Prefix of the name of whatever a run sets up on a machine; the process id follows.
pub const NAME: &str = "farpage-";
/// Time that the kernel, or udev, may take to let go of something.
const PATIENCE: Duration = Duration::from_secs(5);

/// Place for a cgroup of our own, and the interface that makes it: a machine has its memory
/// controller in one of two.
#[derive(Debug)]
pub struct Parent {
    path: PathBuf,
    version: Version,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Version {
    V1,
    V2,
}

/// Returns the cgroup below which one of our own is limited as we are, and may hold processes.
fn parent_cgroup(mounts: &str, own: &str) -> Result<Parent> {
    let (path, version) = match parent_v1(mounts, own) {
        Some(path) => (path, Version::V1),
        None => (parent_v2(mounts, own)?, Version::V2),
    };
    Ok(Parent { path, version })
}

fn has_memory(controllers: &str) -> bool {
    controllers.split(',').any(|name| name == "memory")
}

/// Returns our own cgroup if cgroup v1 has the memory controller.
fn parent_v1(mounts: &str, own: &str) -> Option<PathBuf> {
    let (root, mount) = mounts.lines().find_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let options = file_system.strip_prefix("cgroup ")?.split(' ').nth(1)?;
        let mut fields = mount.split(' ').skip(3);
        has_memory(options).then_some((fields.next()?, fields.next()?))
    })?;
    let own = own.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        has_memory(controllers).then_some(path)
    })?;
    // In a container the mount shows only what is below the container's root.
    let below = Path::new(own).strip_prefix(root).ok()?;
    Some(Path::new(mount).join(below))
}

/// Returns the parent of our own cgroup if cgroup v2 has the memory controller. In v2, a cgroup
/// with processes has none below it.
fn parent_v2(mounts: &str, own: &str) -> Result<PathBuf> {
    let root = mounts.lines().find_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let is_v2 = file_system.starts_with("cgroup2 ");
        is_v2.then(|| mount.split(' ').nth(4))?
    });
    let root = root.context("cgroups: neither v1's memory controller nor v2 is mounted (mount -t cgroup2 none /sys/fs/cgroup)")?;
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
    let own = own.context("cgroup v2: this process is in none")?;
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

impl Parent {
    /// Finds the place for cgroups of this process.
    ///
    /// # Errors
    /// This process has no memory controller to use.
    pub fn find() -> Result<Self> {
        let read = |path| fs::read_to_string(path).with_context(|| format!("cannot read {path}"));
        parent_cgroup(&read("/proc/self/mountinfo")?, &read("/proc/self/cgroup")?)
    }
}

/// Memory cgroup, emptied and removed when dropped.
pub struct Cgroup {
    path: PathBuf,
    version: Version,
}

/// Permission to swap out memory beyond a cgroup's limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwapUse {
    /// Swap is used as far as the machine has any.
    Free,
    /// Swap is never used.
    Never,
}

impl Cgroup {
    /// Makes a cgroup with `memory_bytes`.
    pub fn set_up(parent: &Parent, memory_bytes: u64, swap: SwapUse) -> Result<Self> {
        let path = parent.path.join(format!("{NAME}{}", process::id()));
        fs::create_dir(&path)
            .with_context(|| format!("cannot make the cgroup {}", path.display()))?;
        let version = parent.version;
        let cgroup = Self { path, version };
        let (limit, swap_limit) = match cgroup.version {
            // Cgroup v1 has no separate limit of swap by default.
            Version::V1 => ("memory.limit_in_bytes", "memory.swappiness"),
            Version::V2 => ("memory.max", "memory.swap.max"),
        };
        cgroup.write(limit, &memory_bytes.to_string())?;
        match (swap, cgroup.version) {
            (SwapUse::Never, _) => cgroup.write(swap_limit, "0")?,
            (SwapUse::Free, Version::V2) => cgroup.write(swap_limit, "max")?,
            (SwapUse::Free, Version::V1) => {}
        }
        // Where zswap is on, zswap would stand before the swap device.
        if cgroup.path.join("memory.zswap.max").exists() {
            cgroup.write("memory.zswap.max", "0")?;
        }
        Ok(cgroup)
    }

    /// Returns a command that runs this program inside, with arguments still to be added.
    pub fn command(&self) -> Result<Command> {
        let this_program = env::current_exe().context("cannot find this program's own file")?;
        let [shell, words @ ..] = self.words();
        let mut command = Command::new(shell);
        command.args(words).arg(this_program);
        Ok(command)
    }

    /// Returns the words that stand before a command's own so that the command runs inside.
    pub fn words(&self) -> [OsString; 4] {
        // A shell moves itself inside before it becomes the program: not a byte of the program is
        // allocated outside.
        let moves = r#"echo $$ >"$0" && exec "$@""#;
        let processes = self.path.join("cgroup.procs");
        let [shell, option, moves] = ["/bin/sh", "-c", moves].map(OsString::from);
        [shell, option, moves, processes.into()]
    }

    /// Returns the cgroup's peak memory in bytes, and the number of kills for lack of memory.
    pub fn peak_and_kills(&self) -> Result<(u64, u64)> {
        let (peak, events) = match self.version {
            Version::V1 => ("memory.max_usage_in_bytes", "memory.oom_control"),
            Version::V2 => ("memory.peak", "memory.events"),
        };
        let kills = self.counted(events, "oom_kill ")?;
        Ok((self.read(peak)?.trim().parse()?, kills))
    }

    /// Returns the anonymous memory that the cgroup holds now, in bytes, without pages of files.
    pub fn anonymous_bytes(&self) -> Result<u64> {
        let name = match self.version {
            Version::V1 => "total_rss ",
            Version::V2 => "anon ",
        };
        self.counted("memory.stat", name)
    }

    /// Returns the number behind `name` in a file.
    fn counted(&self, file: &str, name: &str) -> Result<u64> {
        let text = self.read(file)?;
        let number = text.lines().find_map(|line| line.strip_prefix(name));
        let number = number.with_context(|| format!("{file} does not count `{name}`"))?;
        Ok(number.trim().parse()?)
    }

    fn read(&self, file: &str) -> Result<String> {
        let path = self.path.join(file);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    fn write(&self, file: &str, value: &str) -> Result<()> {
        let path = self.path.join(file);
        fs::write(&path, value)
            .with_context(|| format!("cannot write {value} to {}", path.display()))
    }

    /// Ends all processes inside.
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

    /// Removes the cgroups that killed runs left behind.
    ///
    /// # Errors
    /// Another run is under way, or the cgroups cannot be listed.
    pub fn remove_leftovers(parent: &Parent) -> Result<()> {
        let context = || format!("cannot list the cgroups in {}", parent.path.display());
        for entry in fs::read_dir(&parent.path).with_context(context)? {
            let entry = entry.with_context(context)?;
            if is_leftover(&entry.file_name().to_string_lossy())? {
                let (path, version) = (entry.path(), parent.version);
                let shown = path.display();
                eprintln!("removing {shown}, left behind by a run that was killed");
                drop(Self { path, version });
            }
        }
        Ok(())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that is still inside is a child of ours that outlived us.
        self.kill();
        if let Err(error) = retry(|| fs::remove_dir(&self.path)) {
            let path = self.path.display();
            eprintln!("cannot remove the cgroup {path}: {error}; rmdir it by hand");
        }
    }
}

/// True if `name` is one of ours whose run has ended. One that is still under way is an error.
pub fn is_leftover(name: &str) -> Result<bool> {
    let Some(pid) = name
        .strip_prefix(NAME)
        .and_then(|pid| pid.parse::<u32>().ok())
    else {
        return Ok(false);
    };
    // Ids are used again, but hardly by this very program.
    let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    ensure!(
        !comm.starts_with("farpage") || pid == process::id(),
        "process {pid} has set up a cgroup or swap of its own; wait for its end"
    );
    Ok(true)
}

/// Repeats `attempt` until success or the end of `PATIENCE`.
pub fn retry<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
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

    /// Makes a directory with the files of a cgroup.
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
        for (own, path) in [
            ("0::/user.slice/shell.scope\n", "user.slice"),
            ("4:memory:/x\n0::/\n", ""),
        ] {
            let parent = parent_cgroup(&mounts, own).unwrap();
            assert_eq!(parent.version, Version::V2);
            assert_eq!(parent.path, root.join(path));
        }
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn where_v1_has_the_controller_the_cgroup_is_made_below_our_own() {
        let mounts = "31 24 0:27 / /v2 rw - cgroup2 cgroup2 rw\n\
                      35 31 0:32 ROOT /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n";
        for (root, own, path) in [
            ("/", "8:pids:/\n4:memory:/x/y\n0::/\n", "x/y"),
            ("/x", "4:cpu,memory:/x/y\n", "y"),
        ] {
            let parent = parent_cgroup(&mounts.replace("ROOT", root), own).unwrap();
            assert_eq!(parent.version, Version::V1);
            assert_eq!(parent.path, Path::new("/sys/fs/cgroup/memory").join(path));
        }
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
    fn only_what_ended_runs_left_is_left_over() {
        // Beyond the largest process id that Linux gives.
        assert!(is_leftover("farpage-4194999").unwrap());
        for other in ["farpage-x", "swap", "", "farpage-"] {
            assert!(!is_leftover(other).unwrap(), "{other}");
        }
    }
}
