//! Swap to compressed memory for one program: a zram device and a memory cgroup.
//!
//! The rule it keeps: whatever is set up is owned by a guard from that moment on, and taken down
//! when the guard is dropped: at the end, on an error, in a panic. Leftovers of a killed run carry
//! its process id, so that the next run finds and removes them. (A zram device is anonymous for the
//! milliseconds before `mkswap` labels it; only a kill just then leaves one without a name.)

use std::{
    fs,
    path::{Path, PathBuf},
    process::{self, Command},
};

use crate::cgroup::{Cgroup, NAME, Parent, SwapUse, is_leftover, retry};
use anyhow::{Context, Result, bail, ensure};
use nix::unistd::geteuid;

const ZRAM_CONTROL: &str = "/sys/class/zram-control";
const TOOLS: [&str; 3] = ["mkswap", "swapon", "swapoff"];

/// Cgroup for programs whose memory beyond a limit is swapped to compressed memory.
pub struct Swap {
    // Dropped first: memory that is still swapped out then needs no room when the device goes.
    cgroup: Cgroup,
    _device: Zram,
}

impl Swap {
    /// Sets up a cgroup with `memory_bytes`, and `swap_bytes` of swap, which all programs may use;
    /// only those of the cgroup should need any.
    ///
    /// # Errors
    /// This machine lacks something, all of which the error names; or a step failed, with
    /// everything taken down again.
    pub fn set_up(memory_bytes: u64, swap_bytes: u64) -> Result<Self> {
        let parent = check()?;
        Zram::remove_leftovers()?;
        Cgroup::remove_leftovers(&parent)?;
        let device = Zram::set_up(swap_bytes)?;
        let cgroup = Cgroup::set_up(&parent, memory_bytes, SwapUse::Free)?;
        let _device = device;
        Ok(Self { cgroup, _device })
    }

    /// Returns the cgroup.
    pub fn cgroup(&self) -> &Cgroup {
        &self.cgroup
    }
}

/// Checks all that swap needs. Returns the place for a cgroup of our own.
fn check() -> Result<Parent> {
    let mut missing = Vec::new();
    if !geteuid().is_root() {
        missing.push("root: only root may make swap devices (run it with sudo)".to_owned());
    }
    if !Path::new(ZRAM_CONTROL).exists() {
        // zram may be a module that is not loaded; the check below sees if loading worked.
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
    match Parent::find() {
        Ok(parent) if missing.is_empty() => return Ok(parent),
        Ok(_) => {}
        Err(error) => missing.push(format!("{error:#}")),
    }
    bail!(
        "cannot compare with swap on this machine. It lacks:\n  {}",
        missing.join("\n  ")
    )
}

/// Zram device with swap on it, removed when dropped.
struct Zram {
    id: u32,
}

impl Zram {
    fn set_up(bytes: u64) -> Result<Self> {
        let path = format!("{ZRAM_CONTROL}/hot_add");
        let id = fs::read_to_string(&path)
            .with_context(|| format!("cannot add a zram device through {path}"))?;
        let number = id.trim().parse();
        let id = number.with_context(|| format!("{path} gave no number: {id:?}"))?;
        let device = Self { id };
        for (file, value) in [("comp_algorithm", "lz4"), ("disksize", &bytes.to_string())] {
            let path = device.sys(file);
            fs::write(&path, value)
                .with_context(|| format!("cannot write {value} to {}", path.display()))?;
        }
        let node = node(id);
        // udev makes the node where the kernel does not.
        retry(|| fs::metadata(&node))
            .with_context(|| format!("there is no {} for the new zram device", node.display()))?;
        // A label is cut after 15 bytes, the most that the name and a process id have.
        let label = format!("{NAME}{}", process::id());
        run(Command::new("mkswap").args(["-L", &label]).arg(&node))?;
        // This priority comes before all other swap that the machine has.
        run(Command::new("swapon").args(["-p", "32767"]).arg(&node))?;
        Ok(device)
    }

    fn sys(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/sys/block/zram{}/{file}", self.id))
    }

    fn is_on(&self) -> bool {
        let node = node(self.id);
        let is_it = |line: &str| line.split_whitespace().next().map(Path::new) == Some(&node);
        fs::read_to_string("/proc/swaps").is_ok_and(|swaps| swaps.lines().any(is_it))
    }

    fn remove_leftovers() -> Result<()> {
        for entry in fs::read_dir("/sys/block").context("cannot list /sys/block")? {
            let name = entry.context("cannot list /sys/block")?.file_name();
            let name = name.to_string_lossy();
            let Some(id) = name.strip_prefix("zram").and_then(|id| id.parse().ok()) else {
                continue;
            };
            let node = node(id);
            if let Some(label) = label(&node)
                && is_leftover(&label)?
            {
                let node = node.display();
                eprintln!("removing {node}, left behind by a run that was killed");
                drop(Self { id });
            }
        }
        Ok(())
    }

    fn take_down(&self) -> Result<()> {
        if self.is_on() {
            run(Command::new("swapoff").arg(node(self.id)))?;
        }
        // A program that looks at new devices, such as udev, may have this one open for a moment.
        retry(|| fs::write(format!("{ZRAM_CONTROL}/hot_remove"), self.id.to_string()))
            .context("the kernel does not remove it")
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        if let Err(error) = self.take_down() {
            let (id, node) = (self.id, node(self.id));
            let node = node.display();
            eprintln!("cannot take down {node}: {error:#}");
            eprintln!("by hand: swapoff {node}; echo {id} >{ZRAM_CONTROL}/hot_remove");
        }
    }
}

fn node(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/zram{id}"))
}

/// Returns the label of the swap area on a device, if there is one.
fn label(node: &Path) -> Option<String> {
    use std::os::unix::fs::FileExt;
    // `union swap_header` of the kernel: a page with its magic at the end, and the label at 1052.
    let mut page = [0; 4096];
    let device = fs::File::open(node).ok()?;
    device.read_exact_at(&mut page, 0).ok()?;
    let label = page[1052..1068].split(|byte| *byte == 0).next()?;
    page.ends_with(b"SWAPSPACE2")
        .then(|| String::from_utf8_lossy(label).into_owned())
}

/// Runs a tool, whose standard error becomes the error.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "needs root, and changes this machine's swap for a moment"]
    fn a_device_that_was_left_behind_is_removed() {
        let device = Zram::set_up(16 << 20).unwrap();
        let (id, node) = (device.id, node(device.id));
        assert!(device.is_on());
        assert_eq!(label(&node), Some(format!("{NAME}{}", process::id())));
        // A killed process leaves its device behind like this.
        std::mem::forget(device);
        Zram::remove_leftovers().unwrap();
        assert!(!Path::new(&format!("/sys/block/zram{id}")).exists());
        assert!(!fs::read_to_string("/proc/swaps").unwrap().contains("zram"));
    }
}
