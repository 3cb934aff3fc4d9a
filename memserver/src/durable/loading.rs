//! [`Stored`]: the names that a start finds in the directory.
//!
//! The rule it keeps: a name whose files are damaged is told with its reason, and keeps all its
//! files. Only files that nothing can refer to are removed: those of publications that were not
//! finished.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use farpage_fabric::memory::ExtentMemory;
use farpage_wire::{ExtentId, Persistence, PublicKey};
use nix::errno::Errno;
use tracing::{info, warn};

use super::{
    folder::{DiskFolder, Folder, FolderFile, LOST},
    format::{
        Binding, FORMAT, FORMAT_BEFORE, FORMAT_FILE, UNFINISHED, decode, extent_file, extent_of,
        format_text, name_file, owner_of,
    },
    writer::{BROUGHT, DurableNames, Piece},
};

/// The longest file of a name that is read: a manifest and a list of extents are far shorter.
const NAME_BYTES_MAX: u64 = 1 << 26;

farpage_wire::debug_as_display!(PersistError);

/// Reason why a server cannot keep names in a directory.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PersistError {
    /// The directory cannot be used.
    #[error(
        "cannot use the directory of --persist {directory}: {source}{}",
        advice(source)
    )]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// The system's error.
        r#source: io::Error,
    },
    /// Another server uses the directory.
    #[error(
        "another server uses the directory of --persist {directory}: stop it, or give another directory"
    )]
    InUse {
        /// The directory.
        directory: PathBuf,
    },
    /// The directory holds something else.
    #[error(
        "the directory of --persist {directory} holds other files ({file}) and no names: give an empty directory"
    )]
    NotNames {
        /// The directory.
        directory: PathBuf,
        /// One of the files.
        file: String,
    },
    /// The directory was written by another version.
    #[error(
        "the directory of --persist {directory} says {found:?}, and this version writes {ours:?}: start the version that wrote it, or give another directory"
    )]
    Format {
        /// The directory.
        directory: PathBuf,
        /// First line of the directory's format file.
        found: String,
        /// The line of this version.
        ours: String,
    },
    /// The names need more than the server may lend.
    #[error(
        "the names in {directory} need {needed} bytes, more than --capacity {capacity}: give --capacity {needed} or more"
    )]
    Capacity {
        /// The directory.
        directory: PathBuf,
        /// Bytes that the names take.
        needed: u64,
        /// Bytes that the server may lend.
        capacity: u64,
    },
    /// The names have more extents than the server can hold.
    #[error(
        "the names in {directory} have {extents} extents, and this server may hold {most}: raise its limit of open files (`ulimit -n`)"
    )]
    Extents {
        /// The directory.
        directory: PathBuf,
        /// Extents of the names.
        extents: usize,
        /// The most extents of the server.
        most: usize,
    },
    /// Memory for the names is lacking.
    #[error(
        "the names in {directory} are not loaded, for want of memory, room or descriptors, and none is damaged by that: {reason}; give the server more, and start it anew"
    )]
    Memory {
        /// The directory.
        directory: PathBuf,
        /// The cause.
        reason: String,
    },
}

/// Names of a directory, as a start finds them.
pub(crate) struct Stored {
    pub(crate) durable: DurableNames,
    pub(crate) names: Vec<StoredName>,
    /// The highest id of an extent that has a file, or had one that was removed just now.
    pub(crate) extents_ever: u64,
}

/// A name of a directory.
pub(crate) struct StoredName {
    pub(crate) owner: PublicKey,
    pub(crate) name: String,
    pub(crate) binding: Result<Binding, Damage>,
}

/// Damage of a name's files.
#[derive(Clone, Debug)]
pub(crate) struct Damage {
    pub(crate) reason: Arc<str>,
    /// File of the name's binding.
    pub(crate) file: String,
    /// Extents that are known to be the name's.
    pub(crate) extents: Vec<ExtentId>,
}

impl Stored {
    /// Locks the directory at `path`, and finds its names.
    ///
    /// # Errors
    /// [`PersistError`]
    pub(crate) fn find(path: &Path, when: Persistence) -> Result<Self, PersistError> {
        let folder = DiskFolder::lock(path).map_err(|source| match source.kind() {
            io::ErrorKind::WouldBlock => PersistError::InUse {
                directory: path.to_owned(),
            },
            _ => unusable(path, source),
        })?;
        Self::find_in(Box::new(folder), path, when)
    }

    /// Finds the names of `folder`, whose path for people is `path`.
    pub(crate) fn find_in(
        folder: Box<dyn Folder>,
        path: &Path,
        when: Persistence,
    ) -> Result<Self, PersistError> {
        let failed = |source| unusable(path, source);
        // A rename that this process sees may not be on the disk yet.
        folder.sync().map_err(failed)?;
        let files = folder.list().map_err(failed)?;
        check_format(&*folder, &files, path)?;
        // 1. The names.
        let mut names: Vec<StoredName> = Vec::new();
        let mut users: BTreeMap<ExtentId, usize> = BTreeMap::new();
        for file in &files {
            let Some(owner) = owner_of(file) else {
                continue;
            };
            let (name, binding) = read_name(&*folder, owner, file)
                .map_err(|error| lacking(path, format!("reading {file}: {error}")))?;
            let extents = binding.as_ref().map_or(&[][..], |it| &it.extents);
            extents
                .iter()
                .for_each(|it| *users.entry(it.id).or_default() += 1);
            let binding = binding.map_err(|reason| Damage {
                reason: format!("{} of {}", reason, path.join(file).display()).into(),
                file: file.clone(),
                extents: Vec::new(),
            });
            names.push(StoredName {
                owner,
                name: name.unwrap_or_else(|| format!("unreadable {file}")),
                binding,
            });
        }
        let is_unknown = |file: &&String| file.starts_with("name-") && owner_of(file).is_none();
        let unknown = files.iter().find(is_unknown);
        let has_unknown = names.iter().any(|it| it.binding.is_err());
        // 2. Their extents.
        let present: HashSet<&String> = files.iter().collect();
        for stored in &mut names {
            let Ok(binding) = &stored.binding else {
                continue;
            };
            let mut shortage = None;
            let wrong = binding.extents.iter().find_map(|extent| {
                let file = extent_file(extent.id);
                let at = path.join(&file);
                let bytes = || folder.open(&file)?.bytes();
                match (present.contains(&file), users[&extent.id]) {
                    (false, _) => Some(format!("{} is missing", at.display())),
                    (_, 2..) => Some(format!("two names claim {}", at.display())),
                    _ => match bytes() {
                        Ok(bytes) if bytes == extent.bytes => None,
                        Ok(bytes) => Some(format!("{} has {bytes} bytes", at.display())),
                        Err(error) => {
                            let reason = format!("{}: {error}", at.display());
                            if is_shortage(&error) {
                                shortage = Some(reason.clone());
                            }
                            Some(reason)
                        }
                    },
                }
            });
            if let Some(reason) = shortage {
                return Err(lacking(path, reason));
            }
            if let Some(reason) = wrong {
                stored.damage(&reason);
            }
        }
        // 3. Leftovers. Extents may belong to a name whose file cannot be read, or has lost its
        //    name.
        let extents: Vec<ExtentId> = files.iter().filter_map(|file| extent_of(file)).collect();
        let is_left = |file: &&String| extent_of(file).is_some_and(|id| !users.contains_key(&id));
        let stays = match (files.iter().any(|file| is_left(&file)), unknown) {
            (true, Some(file)) => Some(format!(
                "{file} may be a name's file: remove it, or mend its name"
            )),
            (true, None) => lost_files(&*folder),
            (false, _) => None,
        };
        if let Some(why) = &stays {
            warn!(directory = %path.display(), "files of extents that no name refers to are kept: {why}, and start this server anew");
        }
        let unused = |file: &&String| match extent_of(file) {
            Some(_) => stays.is_none() && !has_unknown && is_left(file),
            None => file.starts_with(UNFINISHED),
        };
        for file in files.iter().filter(unused) {
            folder.remove(file).map_err(failed)?;
            info!(
                file,
                "removed a file of a publication that was not finished"
            );
        }
        let mut sizes = HashMap::new();
        for file in folder.list().map_err(failed)? {
            // A file that cannot be opened is told above, if it is a name's.
            if let Ok(bytes) = folder.open(&file).and_then(|file| file.disk_bytes()) {
                sizes.insert(file, bytes);
            }
        }
        let used = extents.iter().copied().filter(|id| users.contains_key(id));
        let extents_ever = (users.keys().chain(&extents)).map(|id| id.0).max();
        let directory = path.display().to_string();
        Ok(Self {
            durable: DurableNames::new(folder, directory, when, used.collect::<Vec<_>>(), sizes),
            names,
            extents_ever: extents_ever.unwrap_or(0),
        })
    }
}

impl StoredName {
    /// Notes that the name cannot be used.
    pub(crate) fn damage(&mut self, reason: &str) {
        if let Ok(binding) = &self.binding {
            self.binding = Err(Damage {
                reason: reason.into(),
                file: name_file(self.owner, &self.name),
                extents: binding.extents.iter().map(|it| it.id).collect(),
            });
        }
    }
}

impl DurableNames {
    /// Fills `memory` with the bytes of its extent's file. The rest stays zero.
    ///
    /// # Errors
    /// [`LoadError`]
    pub(crate) fn load(&self, memory: &ExtentMemory) -> Result<(), LoadError> {
        let name = extent_file(memory.id());
        let says = |error| format!("reading {name} in {}: {error}", self.directory());
        let unread = |error: io::Error| match is_shortage(&error) {
            true => LoadError::Shortage(says(error)),
            false => LoadError::Damage(says(error)),
        };
        let file = self.folder().open(&name).map_err(unread)?;
        let (mut at, mut piece) = (0, Piece::new());
        while let Some(data) = file.next_data(at).map_err(unread)? {
            at = data.start;
            while at < data.end.min(memory.bytes()) {
                let bytes = piece.at(at, data.end.min(memory.bytes()) - at);
                file.read(at, bytes).map_err(unread)?;
                let taken = memory.write_own(at, bytes, Instant::now() + BROUGHT);
                taken.map_err(|error| LoadError::Shortage(says(error)))?;
                at += bytes.len() as u64;
            }
            at = data.end;
        }
        Ok(())
    }
}

/// Reason why an extent's bytes are not in memory, for people.
pub(crate) enum LoadError {
    /// The file is not as it was written.
    Damage(String),
    /// The system lacks memory, room or descriptors. The file may be whole.
    Shortage(String),
}

/// True if the system lacks memory or descriptors: the error says nothing about a file.
fn is_shortage(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    error.kind() == io::ErrorKind::OutOfMemory
        || matches!(errno, Some(Errno::EMFILE | Errno::ENFILE))
}

fn lacking(path: &Path, reason: String) -> PersistError {
    PersistError::Memory {
        directory: path.to_owned(),
        reason,
    }
}

/// Returns the reason for which a file of `folder` may have lost its name, with advice.
fn lost_files(folder: &dyn Folder) -> Option<String> {
    match folder.has_lost_files() {
        Ok(false) => None,
        Ok(true) => Some(format!(
            "{LOST} has files, perhaps those of names: empty it"
        )),
        Err(error) => Some(format!(
            "{LOST} cannot be read ({error}), and may have files of names: let the server's user read it, or remove it"
        )),
    }
}

/// Returns advice for an error of the directory.
fn advice(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => "; the directory has to exist",
        io::ErrorKind::PermissionDenied => "; it has to belong to the server's user",
        _ => "",
    }
}

fn unusable(path: &Path, source: io::Error) -> PersistError {
    PersistError::Directory {
        directory: path.to_owned(),
        source,
    }
}

/// Checks the directory's format. Writes it to an empty directory.
fn check_format(folder: &dyn Folder, files: &[String], path: &Path) -> Result<(), PersistError> {
    let failed = |source| unusable(path, source);
    let ours = format_text(FORMAT);
    let unfinished = format!("{UNFINISHED}{FORMAT_FILE}");
    if files.iter().any(|file| file == FORMAT_FILE) {
        let file = folder.open(FORMAT_FILE).map_err(failed)?;
        let found = read_all(&*file, 100).map_err(failed)?;
        if found == ours.as_bytes() {
            return Ok(());
        }
        if found == format_text(FORMAT_BEFORE).as_bytes() {
            // New files will be of this format.
            return write_format(folder).map_err(failed);
        }
        return Err(PersistError::Format {
            directory: path.to_owned(),
            found: String::from_utf8_lossy(&found).trim_end().to_owned(),
            ours: ours.trim_end().to_owned(),
        });
    }
    let is_known = |file: &&String| *file == LOST || **file == unfinished;
    if let Some(other) = files.iter().find(|file| !is_known(file)) {
        return Err(PersistError::NotNames {
            directory: path.to_owned(),
            file: other.clone(),
        });
    }
    write_format(folder).map_err(failed)
}

fn write_format(folder: &dyn Folder) -> io::Result<()> {
    let unfinished = format!("{UNFINISHED}{FORMAT_FILE}");
    let file = folder.create(&unfinished, 0)?;
    file.write(0, format_text(FORMAT).as_bytes())?;
    file.sync()?;
    folder.rename(&unfinished, FORMAT_FILE)?;
    folder.sync()
}

/// Reads a name's file. Returns the name if it is known, and the binding or what is wrong with it.
///
/// # Errors
/// The system lacks memory or descriptors.
fn read_name(
    folder: &dyn Folder,
    owner: PublicKey,
    file: &str,
) -> io::Result<(Option<String>, Result<Binding, String>)> {
    let bytes = folder
        .open(file)
        .and_then(|file| read_all(&*file, NAME_BYTES_MAX));
    let bytes = match bytes {
        Ok(bytes) => bytes,
        Err(error) if is_shortage(&error) => return Err(error),
        Err(error) => {
            let reason = format!("the system does not read all ({error})");
            return Ok((None, Err(reason)));
        }
    };
    let (name, binding) = decode(&bytes);
    let name = name.filter(|name| name_file(owner, name) == file);
    let binding = binding.filter(|_| name.is_some());
    Ok((
        name,
        binding.ok_or_else(|| "the checksum is wrong".to_owned()),
    ))
}

/// Reads a file of at most `most` bytes.
fn read_all(file: &dyn FolderFile, most: u64) -> io::Result<Vec<u8>> {
    let bytes = file.bytes()?;
    if bytes > most {
        return Err(io::Error::other(format!("{bytes} bytes are too many")));
    }
    let mut all = vec![0; bytes as usize];
    file.read(0, &mut all)?;
    Ok(all)
}
