//! [`Held`]: all memory that a process holds, mapped or not.
//!
//! The rule it keeps: page cache of the files that a process has open counts as the process's own,
//! and each open file counts once.

use std::{
    collections::HashSet,
    fs::{self, File},
    os::{fd::AsRawFd, unix::fs::MetadataExt},
};

use anyhow::{Context, Result};
use nix::errno::Errno;

/// Memory that a process holds, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held {
    /// Private pages, and the process's share of mapped files such as its program.
    pub own_bytes: u64,
    /// Pages of the process's memfds.
    pub memfd_bytes: u64,
    /// Page cache of the other files that the process has open.
    pub cached_bytes: u64,
}

impl Held {
    /// Measures the process `pid` of this machine.
    ///
    /// # Errors
    /// The process has ended, or the kernel does not tell: `cachestat` needs Linux 6.5.
    pub fn by(pid: u32) -> Result<Self> {
        let mut held = Self {
            own_bytes: mapped_bytes(pid, "Pss_Anon")? + mapped_bytes(pid, "Pss_File")?,
            ..Self::default()
        };
        let mut seen = HashSet::new();
        let files = format!("/proc/{pid}/fd");
        for entry in fs::read_dir(&files).with_context(|| format!("cannot list {files}"))? {
            let path = entry
                .with_context(|| format!("cannot list {files}"))?
                .path();
            // The file was closed meanwhile.
            let (Ok(meta), Ok(link)) = (fs::metadata(&path), fs::read_link(&path)) else {
                continue;
            };
            if !meta.is_file() || !seen.insert((meta.dev(), meta.ino())) {
                continue;
            }
            if link.to_string_lossy().starts_with("/memfd:") {
                held.memfd_bytes += meta.blocks() * 512;
            } else if let Ok(file) = File::open(&path) {
                held.cached_bytes += cached_bytes(&file)?;
            }
        }
        Ok(held)
    }

    /// Returns the sum of all three.
    pub fn bytes(&self) -> u64 {
        self.own_bytes + self.memfd_bytes + self.cached_bytes
    }
}

/// Returns the bytes of a kind of the process's mapped memory, such as `Anonymous`.
///
/// # Errors
/// The process has ended, or the kernel does not know the kind.
pub fn mapped_bytes(pid: u32, kind: &str) -> Result<u64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let mut kinds = text.lines().filter_map(|line| line.split_once(':'));
    let kib = kinds.find_map(|(name, kib)| (name == kind).then_some(kib));
    let kib = kib.and_then(|kib| kib.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Ok(kib.with_context(|| format!("{path} has no line `{kind}: ... kB`"))? << 10)
}

/// Returns the bytes of `file` in the page cache.
fn cached_bytes(file: &File) -> Result<u64> {
    /// Number of the call `cachestat` on all architectures. The C library has no name for it.
    const CACHESTAT: libc::c_long = 451;
    // Offset and length; a length of zero means all of the file.
    let range = [0u64; 2];
    // `struct cachestat`: its first word counts the pages in the cache.
    let mut found = [0u64; 5];
    // SAFETY: the kernel reads two words behind the first pointer and writes five behind the
    // second; both arrays are as long, and outlive the call.
    let done = unsafe {
        libc::syscall(
            CACHESTAT,
            file.as_raw_fd(),
            range.as_ptr(),
            found.as_mut_ptr(),
            0,
        )
    };
    Errno::result(done).context("cannot ask for what the page cache has of a file (cachestat)")?;
    Ok(found[0] * 4096)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn what_is_written_to_a_file_counts_until_it_is_closed() {
        let before = Held::by(std::process::id()).unwrap();
        let path = std::env::temp_dir().join(format!("farpage-held-{}", std::process::id()));
        let mut file = File::create(&path).unwrap();
        fs::remove_file(&path).unwrap();
        file.write_all(&vec![1; 4 << 20]).unwrap();
        let with = Held::by(std::process::id()).unwrap();
        assert_eq!(with.cached_bytes - before.cached_bytes, 4 << 20);
        drop(file);
        let after = Held::by(std::process::id()).unwrap();
        assert_eq!(after.cached_bytes, before.cached_bytes);
    }
}
