//! The guest's kernel: one of Debian's, downloaded and unpacked, never installed.
//!
//! The rule it keeps: apt's downloads are verified with Debian's keys, and a kernel in the cache is
//! complete; a kernel whose preparation was interrupted is made anew.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use super::archive::Archive;
use crate::children;

/// Modules that the guest needs and its kernel does not have built in. They are loaded at each
/// boot, with the modules that they need, so that none has to be found later.
const MODULES: [&str; 10] = [
    "virtio_pci",
    "virtio_console",
    "9pnet_virtio",
    "9p",
    "overlay",
    "rdma_rxe",
    "rdma_ucm",
    "dummy",
    "veth",
    "bridge",
];

/// Modules that `rdma_rxe` requests by name in older kernels, and that newer ones do not have.
const OLD_MODULES: [&str; 1] = ["crc32_generic"];

pub(crate) const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// A kernel that is ready to boot.
pub(crate) struct Kernel {
    pub(crate) image: PathBuf,
    /// [`MODULES`] as an archive for the first file system: files in `/modules`, in the order of
    /// `/modules/order`.
    pub(crate) modules: PathBuf,
}

/// Finds the kernel of a suite in the cache, or downloads it from `mirror`. Without a mirror, from
/// apt's source of Debian's packages.
///
/// # Errors
/// The reason why no kernel could be had.
pub(crate) fn prepare(suite: &str, mirror: Option<&str>, end: Instant) -> Result<Kernel> {
    let cache = cache()?;
    fs::create_dir_all(&cache).with_context(|| format!("cannot create {}", cache.display()))?;
    let mut recipe = DefaultHasher::new();
    (MODULES, OLD_MODULES).hash(&mut recipe);
    let dir = cache.join(format!("{suite}-{:08x}", recipe.finish() as u32));
    let kernel = Kernel {
        image: dir.join("vmlinuz"),
        modules: dir.join("modules.cpio"),
    };

    // Held until the kernel exists, by one of all processes that want it.
    let lock = File::create(cache.join("lock")).context("cannot create a lock in the cache")?;
    while lock.try_lock().is_err() {
        if Instant::now() > end {
            bail!("another `cargo xtask vm` is still getting a kernel");
        }
        thread::sleep(Duration::from_millis(50));
    }
    if !dir.is_dir() {
        eprintln!("vm: getting the kernel of Debian {suite}; the first time takes a minute ...");
        let making = Making {
            dir: cache.join(format!("{suite}.new")),
            suite,
            mirror: match mirror {
                Some(mirror) => mirror.to_owned(),
                None => mirror_of_apt()?,
            },
            end,
        };
        making
            .make()
            .with_context(|| format!("there is no kernel of Debian {suite} for the machine"))?;
        fs::rename(making.dir.join("ready"), &dir).context("cannot move the kernel")?;
        fs::remove_dir_all(&making.dir).context("cannot tidy up the cache")?;
    }
    Ok(kernel)
}

/// Returns `~/.cache/farpage/vm`, by the XDG base directory specification.
fn cache() -> Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME").filter(|it| !it.is_empty()) {
        Some(cache) => PathBuf::from(cache),
        None => {
            let home = std::env::var_os("HOME").context("HOME is not set: no cache folder")?;
            Path::new(&home).join(".cache")
        }
    };
    Ok(base.join("farpage/vm"))
}

/// A kernel that is being made ready.
struct Making<'a> {
    dir: PathBuf,
    suite: &'a str,
    mirror: String,
    end: Instant,
}

impl Making<'_> {
    fn make(&self) -> Result<()> {
        if self.dir.exists() {
            fs::remove_dir_all(&self.dir).context("cannot remove what was left unfinished")?;
        }
        let apt = ["apt/lists/partial", "apt/archives/partial"];
        for folder in apt.iter().chain(&["root/usr/lib", "ready"]) {
            fs::create_dir_all(self.dir.join(folder)).context("cannot create a folder")?;
        }
        let root = self.dir.join("root");
        std::os::unix::fs::symlink("usr/lib", root.join("lib")).context("cannot make a link")?;

        self.download()?;
        let release = only_entry(&root.join("lib/modules"))?;
        let release = release.to_string_lossy();
        // Debian moved the image from the first place to the second with 7.x.
        let images = [
            root.join(format!("boot/vmlinuz-{release}")),
            root.join(format!("lib/modules/{release}/vmlinuz")),
        ];
        let image = images.iter().find(|path| path.is_file());
        let image = image.context("the packages have no kernel image")?;
        fs::copy(image, self.dir.join("ready/vmlinuz")).context("cannot copy the kernel")?;
        let modules = self.modules(&root, &release)?;
        fs::write(self.dir.join("ready/modules.cpio"), modules).context("cannot write modules")
    }

    /// Downloads the packages of the kernel and unpacks them.
    fn download(&self) -> Result<()> {
        let apt = self.dir.join("apt");
        let source = format!(
            "deb [arch=amd64 signed-by={KEYS}] {} {} main\n",
            self.mirror, self.suite
        );
        fs::write(apt.join("sources"), source).context("cannot write apt's sources")?;
        fs::write(apt.join("config"), self.apt_config()).context("cannot write apt's settings")?;
        self.step(self.apt("apt-get").arg("update"))?;

        // The meta package names the newest kernel, which from 7.x on is several packages of one
        // version.
        let mut packages = BTreeSet::new();
        let mut unseen = vec!["linux-image-amd64".to_owned()];
        while let Some(package) = unseen.pop() {
            let depends = output(self.apt("apt-cache").args(["depends", &package]))?;
            for package in parts_of_kernel(&depends) {
                if packages.insert(package.to_owned()) {
                    unseen.push(package.to_owned());
                }
            }
        }
        if packages.is_empty() {
            bail!("linux-image-amd64 names no kernel");
        }
        let mut download = self.apt("apt-get");
        download.arg("download").args(&packages);
        self.step(download.current_dir(apt.join("archives")))?;
        for entry in fs::read_dir(apt.join("archives")).context("cannot read apt's folder")? {
            let file = entry.context("cannot read apt's folder")?.path();
            if file.extension() == Some(OsStr::new("deb")) {
                let mut unpack = Command::new("dpkg");
                self.step(unpack.arg("-x").arg(file).arg(self.dir.join("root")))?;
            }
        }
        Ok(())
    }

    /// Returns an apt command with sources, lists and downloads of its own, which needs no root and
    /// changes nothing of the machine's.
    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.args(["-qq", "-c"]).arg(self.dir.join("apt/config"));
        command
    }

    fn apt_config(&self) -> String {
        let apt = self.dir.join("apt");
        let apt = apt.display();
        format!(
            "\
Dir::Etc::sourcelist \"{apt}/sources\";
Dir::Etc::sourceparts \"/dev/null\";
Dir::State::lists \"{apt}/lists\";
Dir::Cache \"{apt}\";
// As the user that we are: the user that apt would become cannot write into the cache.
APT::Sandbox::User \"root\";
APT::Architecture \"amd64\";
// The machine's own would tidy up the machine's own caches.
#clear APT::Update::Post-Invoke;
Acquire::Retries \"3\";
Acquire::http::Timeout \"30\";
Acquire::Languages \"none\";
"
        )
    }

    /// Archives [`MODULES`] with the modules that they need, in a loadable order.
    fn modules(&self, root: &Path, release: &str) -> Result<Vec<u8>> {
        let mut index = system_command("depmod");
        self.step(index.arg("-b").arg(root).arg(release))?;
        let mut archive = Archive::default();
        let mut order = String::new();
        archive.directory("modules");
        for module in OLD_MODULES.into_iter().chain(MODULES) {
            let mut query = system_command("modprobe");
            query.arg("-d").arg(root).args(["-S", release]);
            let answer = match output(query.args(["--show-depends", module])) {
                Ok(answer) => answer,
                Err(_) if OLD_MODULES.contains(&module) => continue,
                Err(error) => return Err(error),
            };
            let paths = answer.lines();
            for path in paths.filter_map(|line| line.strip_prefix("insmod ")) {
                let path = Path::new(path.split(' ').next().unwrap_or(path));
                let name = path.file_name().unwrap_or(path.as_os_str());
                let name = name.to_string_lossy();
                let name = name.trim_end_matches(".xz");
                if order.lines().any(|known| known == name) {
                    continue;
                }
                archive.file(&format!("modules/{name}"), false, &contents(path)?);
                order.push_str(name);
                order.push('\n');
            }
        }
        archive.file("modules/order", false, order.as_bytes());
        Ok(archive.finish())
    }

    fn step(&self, command: &mut Command) -> Result<()> {
        let left = self.end.saturating_duration_since(Instant::now());
        let name = command.get_program().to_string_lossy().into_owned();
        match children::status_within(left, command.stdout(io::stderr()))? {
            Some(status) if status.success() => Ok(()),
            Some(status) => bail!("{name} failed ({status}); it says why above"),
            None => bail!("{name} was not done when the time limit ended"),
        }
    }
}

/// Returns the output of a command that takes no time.
fn output(command: &mut Command) -> Result<String> {
    Ok(String::from_utf8_lossy(&output_bytes(command)?).into_owned())
}

fn output_bytes(command: &mut Command) -> Result<Vec<u8>> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot start `{name}`"))?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        bail!("{name} failed ({}): {}", output.status, why.trim());
    }
    Ok(output.stdout)
}

/// Returns the packages with a number in the name that a kernel consists of, from the output of
/// `apt-cache depends`.
fn parts_of_kernel(depends: &str) -> impl Iterator<Item = &str> {
    let depends = depends.lines().filter_map(|line| {
        let package = line.trim_start().strip_prefix("Depends: ")?;
        Some(package.trim_end())
    });
    depends.filter(|package| {
        let mut words = package.splitn(3, '-');
        let (first, _part, version) = (words.next(), words.next(), words.next());
        first == Some("linux")
            && version.is_some_and(|it| it.starts_with(|c: char| c.is_ascii_digit()))
    })
}

/// Returns the first mirror of Debian in apt's own sources.
///
/// # Errors
/// No mirror: on Ubuntu, or before the first `apt-get update`.
fn mirror_of_apt() -> Result<String> {
    let mut targets = Command::new("apt-get");
    targets.args(["indextargets", "--format"]);
    targets.arg("$(CREATED_BY) $(LABEL) $(REPO_URI)");
    let targets = output(&mut targets)?;
    let mirror = mirror_in(&targets).context(
        "apt's sources name no mirror of Debian. On Debian, run `apt-get update` first. Elsewhere, name one that this \
         machine can reach, with `--mirror URL` or FARPAGE_VM_MIRROR=URL",
    )?;
    Ok(mirror.to_owned())
}

/// Returns the first mirror of Debian's own packages in lines of creator, label and URI. Debian's
/// security updates have another label.
fn mirror_in(targets: &str) -> Option<&str> {
    targets
        .lines()
        .find_map(|line| line.strip_prefix("Packages Debian "))
}

/// Returns the command of a program that a user's PATH may not have.
fn system_command(program: &str) -> Command {
    let dirs = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(Path::new);
    let paths = dirs.map(|dir| dir.join(program));
    let found = paths.iter().find(|path| path.is_file());
    Command::new(found.map_or(Path::new(program), PathBuf::as_path))
}

/// Returns the bytes of a module, unpacked.
fn contents(path: &Path) -> Result<Vec<u8>> {
    if path.extension() != Some(OsStr::new("xz")) {
        return fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    }
    let unpacked = output_bytes(Command::new("xz").arg("-dc").arg(path));
    unpacked.with_context(|| format!("{} cannot be unpacked", path.display()))
}

fn only_entry(dir: &Path) -> Result<std::ffi::OsString> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let names: io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.file_name())).collect();
    match names.context("cannot read a folder")?.as_slice() {
        [name] => Ok(name.clone()),
        names => bail!("{} has {} entries, not one", dir.display(), names.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_one_of_debian_in_the_sources_of_apt() {
        let debian = "\
DEP-11 Debian http://icons.example/debian/
Packages Debian-Security http://mirror.example/debian-security/
Packages Debian http://mirror.example/debian/
Packages Debian http://second.example/debian/";
        assert_eq!(mirror_in(debian), Some("http://mirror.example/debian/"));
        let ubuntu = "Packages Ubuntu http://mirror.example/ubuntu/";
        assert_eq!(mirror_in(ubuntu), None);
        assert_eq!(mirror_in(""), None);
    }

    #[test]
    fn the_packages_of_a_kernel_are_those_with_its_version() {
        let depends = "\
linux-image-7.2.12+deb13-amd64
  PreDepends: linux-base
 |Depends: <dracut>
  Depends: linux-base-amd64
  Depends: linux-base-7.2.12+deb13-amd64
  Depends: linux-modules-7.2.12+deb13-amd64
  Suggests: linux-doc-7.2";
        let parts: Vec<&str> = parts_of_kernel(depends).collect();
        let expected = ["base", "modules"].map(|part| format!("linux-{part}-7.2.12+deb13-amd64"));
        assert_eq!(parts, expected);
    }
}
