//! [`Held`]: all memory that a process holds, mapped or not.
//!
//! The rule it keeps: what the process has put into the page cache through files that it has open
//! counts as its own, and each page counts once.

use std::{
    collections::HashSet,
    fs::{self, File},
    os::{fd::AsRawFd, unix::fs::MetadataExt},
};

use anyhow::{Context, Result};
use nix::errno::Errno;

/// In bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held {
    /// Its private pages, and its part of the files that are mapped, such as its program.
    pub own_bytes: u64,
    /// Pages of its memfds.
    pub memfd_bytes: u64,
    /// What the page cache has of other files that it has open.
    pub cached_bytes: u64,
}

impl Held {
    /// What a process of this machine holds now.
    ///
    /// # Errors
    /// It has ended, or the kernel does not say: `cachestat` is there from Linux 6.5 on.
    pub fn by(pid: u32) -> Result<Self> {
        let rollup = format!("/proc/{pid}/smaps_rollup");
        let rollup =
            fs::read_to_string(&rollup).with_context(|| format!("cannot read {rollup}"))?;
        let bytes_of = |name: &str| -> Result<u64> {
            let line = rollup.lines().find_map(|line| line.strip_prefix(name));
            let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
            Ok(kib.with_context(|| format!("the kernel does not say {name}"))? << 10)
        };
        let mut held = Self {
            own_bytes: bytes_of("Pss_Anon:")? + bytes_of("Pss_File:")?,
            ..Self::default()
        };
        let mut seen = HashSet::new();
        let files = format!("/proc/{pid}/fd");
        for entry in fs::read_dir(&files).with_context(|| format!("cannot list {files}"))? {
            let path = entry
                .with_context(|| format!("cannot list {files}"))?
                .path();
            // Closed meanwhile.
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

    /// All of it.
    pub fn bytes(&self) -> u64 {
        self.own_bytes + self.memfd_bytes + self.cached_bytes
    }
}

/// What the page cache has of a file.
fn cached_bytes(file: &File) -> Result<u64> {
    /// The same on all architectures; the C library has no name for it.
    const CACHESTAT: libc::c_long = 451;
    // Offset and length; a length of zero means all of the file.
    let range = [0u64; 2];
    // Pages in the cache come first.
    let mut found = [0u64; 5];
    // SAFETY: the kernel reads two words behind the first pointer and writes five behind the
    // second, which is what lies there; both live longer than the call.
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
