//! [`Allowance`]: the memory that this process may have. That is the machine's memory, within the
//! limits of the process's control groups (v1 and v2).
//!
//! The rule it keeps: the lowest limit counts, among the process's own group and every visible
//! group above it. A limit that cannot be read limits nothing.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use bytesize::ByteSize;

/// Value of [`Allowance::available_bytes`] if the kernel does not tell.
const UNKNOWN_AVAILABLE_BYTES: u64 = 1 << 30;

/// Memory that this process may have.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Allowance {
    /// Memory that this process may have in total.
    pub bytes: u64,
    /// Memory that this process can get now without swapping.
    pub available_bytes: u64,
    /// The control group that limits [`bytes`](Self::bytes). `None`: the machine's memory is the
    /// limit.
    pub group: Option<PathBuf>,
}

/// Names of a control group's files, and of the line in `memory.stat` that counts the memory that
/// the kernel can drop.
struct CgroupVersion {
    limit: &'static str,
    usage: &'static str,
    droppable: &'static str,
}

const V1: CgroupVersion = CgroupVersion {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    droppable: "total_inactive_file",
};
const V2: CgroupVersion = CgroupVersion {
    limit: "memory.max",
    usage: "memory.current",
    droppable: "inactive_file",
};

impl Allowance {
    /// Reads the allowance of this process.
    pub fn of_this_process() -> Self {
        Self::below(Path::new("/"))
    }

    /// Reads the allowance from `/proc` and the control groups below `root`.
    fn below(root: &Path) -> Self {
        let meminfo = read(&root.join("proc/meminfo"));
        let kib = |name| value(&meminfo, name).map(|kib| kib << 10);
        let mut allowance = Self {
            bytes: kib("MemTotal:").unwrap_or(u64::MAX),
            available_bytes: kib("MemAvailable:").unwrap_or(UNKNOWN_AVAILABLE_BYTES),
            group: None,
        };
        for (version, folder) in groups(root) {
            // The word "max" is no limit.
            let Ok(limit) = read(&folder.join(version.limit)).trim().parse::<u64>() else {
                continue;
            };
            let usage = read(&folder.join(version.usage)).trim().parse();
            let stat = read(&folder.join("memory.stat"));
            let droppable = value(&stat, version.droppable).unwrap_or(0);
            let used = usage.unwrap_or(0u64).saturating_sub(droppable);
            allowance.available_bytes = allowance.available_bytes.min(limit.saturating_sub(used));
            if limit < allowance.bytes {
                (allowance.bytes, allowance.group) = (limit, Some(folder));
            }
        }
        allowance
    }
}

/// Tells the amount and its limit.
impl fmt::Display for Allowance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = ByteSize(self.bytes);
        match &self.group {
            None => write!(f, "this machine has {bytes} of memory"),
            Some(group) => write!(
                f,
                "the control group {} allows {bytes} of memory",
                group.display()
            ),
        }
    }
}

/// Returns the folders of the control groups of this process, and of the groups above them.
fn groups(root: &Path) -> Vec<(&'static CgroupVersion, PathBuf)> {
    let memberships = read(&root.join("proc/self/cgroup"));
    let mounts = read(&root.join("proc/self/mountinfo"));
    let mut folders = Vec::new();
    for mount in mounts.lines() {
        let Some((place, kind)) = mount.split_once(" - ") else {
            continue;
        };
        let mut place = place.split(' ').skip(3);
        let mut kind = kind.split(' ');
        let (Some(mounted), Some(point), Some(kind), options) =
            (place.next(), place.next(), kind.next(), kind.nth(1))
        else {
            continue;
        };
        let options = options.unwrap_or_default();
        let version = match kind {
            "cgroup2" => &V2,
            "cgroup" if options.split(',').any(|option| option == "memory") => &V1,
            _ => continue,
        };
        // Lines such as `0::/user.slice` and `4:memory:/jobs/7`.
        let membership = memberships.lines().find_map(|line| {
            let (_, line) = line.split_once(':')?;
            let (controllers, path) = line.split_once(':')?;
            match kind {
                "cgroup2" => controllers.is_empty(),
                _ => controllers.split(',').any(|name| name == "memory"),
            }
            .then_some(path)
        });
        // A container may see its own group as the root of the mounted hierarchy.
        let inside = membership.and_then(|path| Path::new(path).strip_prefix(mounted).ok());
        let point = root.join(point.trim_start_matches('/'));
        let own = point.join(inside.unwrap_or(Path::new("")));
        let all = own
            .ancestors()
            .take_while(|folder| folder.starts_with(&point));
        folders.extend(all.map(|folder| (version, folder.to_path_buf())));
    }
    folders
}

/// Returns the number behind `name` at the start of a line of `text`.
fn value(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(name)).then(|| words.next()?.parse().ok())?
    })
}

/// Returns the text of the file at `path`, or nothing if it cannot be read.
fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: &str =
        "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n";

    /// Makes a machine of 16 GiB with the further `files`, and reads its allowance.
    fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Allowance) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in [("proc/meminfo", MACHINE)].iter().chain(files) {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let memory = Allowance::below(root.path());
        (root, memory)
    }

    #[test]
    fn without_groups_it_is_the_machines() {
        let (_root, memory) = machine(&[]);
        assert_eq!((memory.bytes, memory.available_bytes), (16 << 30, 8 << 30));
        assert_eq!(memory.to_string(), "this machine has 16.0 GiB of memory");
        // The kernel's numbers and words for "no limit", in v1 and v2.
        for (kind, file, text) in [
            (
                "cgroup cgroup rw,memory",
                "memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
            ("cgroup2 cgroup rw", "memory.max", "max\n"),
        ] {
            let mount = format!("30 23 0:26 / /sys/fs/cgroup rw - {kind}\n");
            let file = format!("sys/fs/cgroup/{file}");
            let (_root, limited) = machine(&[
                ("proc/self/cgroup", "4:memory:/\n0::/\n"),
                ("proc/self/mountinfo", &mount),
                (&file, text),
            ]);
            assert_eq!(limited, memory);
        }
    }

    #[test]
    fn lowest_limit_above_a_group_counts_in_v2() {
        let (root, memory) = machine(&[
            ("proc/self/cgroup", "0::/jobs/7/step\n"),
            (
                "proc/self/mountinfo",
                "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 23 0:26 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw\n",
            ),
            ("sys/fs/cgroup/jobs/7/step/memory.max", "6442450944\n"),
            ("sys/fs/cgroup/jobs/7/step/memory.current", "1024\n"),
            ("sys/fs/cgroup/jobs/7/memory.max", "4294967296\n"),
            ("sys/fs/cgroup/jobs/7/memory.current", "2147483648\n"),
            (
                "sys/fs/cgroup/jobs/7/memory.stat",
                "anon 5\ninactive_file 1073741824\n",
            ),
            ("sys/fs/cgroup/jobs/memory.max", "max\n"),
            // A group that this process is not in.
            ("sys/fs/cgroup/other/memory.max", "1\n"),
        ]);
        assert_eq!((memory.bytes, memory.available_bytes), (4 << 30, 3 << 30));
        assert_eq!(memory.group, Some(root.path().join("sys/fs/cgroup/jobs/7")));
    }

    #[test]
    fn group_of_v1_counts_beside_a_v2_that_has_no_memory() {
        let (root, memory) = machine(&[
            (
                "proc/self/cgroup",
                "5:cpu,cpuacct:/a\n4:memory:/jobs/7\n0::/b\n",
            ),
            (
                "proc/self/mountinfo",
                "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                 36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
                 41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
            ),
            (
                "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes",
                "2147483648\n",
            ),
            (
                "sys/fs/cgroup/memory/jobs/7/memory.usage_in_bytes",
                "1073741824\n",
            ),
            (
                "sys/fs/cgroup/memory/jobs/7/memory.stat",
                "total_inactive_file 536870912\n",
            ),
            (
                "sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
        ]);
        assert_eq!((memory.bytes, memory.available_bytes), (2 << 30, 3 << 29));
        let group = root.path().join("sys/fs/cgroup/memory/jobs/7");
        assert_eq!(memory.group, Some(group));
        assert!(
            memory
                .to_string()
                .ends_with("jobs/7 allows 2.0 GiB of memory")
        );
    }

    #[test]
    fn container_that_sees_its_own_group_as_the_root_is_limited_by_it() {
        for membership in ["0::/docker/abc\n", "0::/\n", "0::/../elsewhere\n"] {
            let (root, memory) = machine(&[
                ("proc/self/cgroup", membership),
                (
                    "proc/self/mountinfo",
                    "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
                ),
                ("sys/fs/cgroup/memory.max", "1073741824\n"),
            ]);
            assert_eq!(memory.bytes, 1 << 30, "{membership}");
            assert_eq!(memory.group, Some(root.path().join("sys/fs/cgroup")));
        }
    }
}
