//! [`Stored`]: the names that a start finds in the directory.
//!
//! The rule it keeps: a name whose files are damaged is told with its reason, and keeps all its
//! files. Only files that nothing can refer to are removed: those of publications that were not
//! finished.

use std::{
    collections::{BTreeMap, HashSet},
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use farpage_fabric::memory::ExtentMemory;
use farpage_wire::{ExtentId, Persistence, PublicKey};
use tracing::info;

use super::{
    folder::{DiskFolder, Folder, FolderFile},
    format::{
        Binding, FORMAT, FORMAT_FILE, UNFINISHED, decode, extent_file, extent_of, format_text,
        name_file, owner_of,
    },
    writer::{BROUGHT, DurableNames, Piece},
};

/// The longest file of a name that is read: a manifest and a list of extents are far shorter.
const NAME_BYTES_MAX: u64 = 1 << 26;

/// Files that some file systems make by themselves.
const FOREIGN: [&str; 1] = ["lost+found"];

farpage_wire::debug_as_display!(PersistError);

/// Reason why a server cannot keep names in a directory.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PersistError {
    /// The directory cannot be used.
    #[error(
        "cannot use the directory of --persist {directory}: {source}; it has to exist, and to belong to the server's user"
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
    #[error("no memory for the names in {directory}: {reason}")]
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
            let (name, binding) = read_name(&*folder, owner, file);
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
        let has_unknown = names.iter().any(|it| it.binding.is_err());
        // 2. Their extents.
        let present: HashSet<&String> = files.iter().collect();
        for stored in &mut names {
            let Ok(binding) = &stored.binding else {
                continue;
            };
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
                        Err(error) => Some(format!("{}: {error}", at.display())),
                    },
                }
            });
            if let Some(reason) = wrong {
                stored.damage(&reason);
            }
        }
        // 3. Leftovers. Extents may belong to a name whose file cannot be read.
        let extents: Vec<ExtentId> = files.iter().filter_map(|file| extent_of(file)).collect();
        let unused = |file: &str| match extent_of(file) {
            Some(id) => !has_unknown && !users.contains_key(&id),
            None => file.starts_with(UNFINISHED),
        };
        for file in files.iter().filter(|file| unused(file)) {
            folder.remove(file).map_err(failed)?;
            info!(
                file,
                "removed a file of a publication that was not finished"
            );
        }
        let used = extents.iter().copied().filter(|id| users.contains_key(id));
        let extents_ever = (users.keys().chain(&extents)).map(|id| id.0).max();
        let directory = path.display().to_string();
        Ok(Self {
            durable: DurableNames::new(folder, directory, when, used.collect::<Vec<_>>()),
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
    /// The reason, for people.
    pub(crate) fn load(&self, memory: &ExtentMemory) -> Result<(), String> {
        let name = extent_file(memory.id());
        let load = || {
            let file = self.folder().open(&name)?;
            let (mut at, mut piece) = (0, Piece::new());
            while let Some(data) = file.next_data(at)? {
                at = data.start;
                while at < data.end.min(memory.bytes()) {
                    let bytes = piece.at(at, data.end.min(memory.bytes()) - at);
                    file.read(at, bytes)?;
                    memory.write_own(at, bytes, Instant::now() + BROUGHT)?;
                    at += bytes.len() as u64;
                }
                at = data.end;
            }
            Ok(())
        };
        load()
            .map_err(|error: io::Error| format!("reading {name} in {}: {error}", self.directory()))
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
        return match found == ours.as_bytes() {
            true => Ok(()),
            false => Err(PersistError::Format {
                directory: path.to_owned(),
                found: String::from_utf8_lossy(&found).trim_end().to_owned(),
                ours: ours.trim_end().to_owned(),
            }),
        };
    }
    let is_known = |file: &&String| FOREIGN.contains(&file.as_str()) || **file == unfinished;
    if let Some(other) = files.iter().find(|file| !is_known(file)) {
        return Err(PersistError::NotNames {
            directory: path.to_owned(),
            file: other.clone(),
        });
    }
    let write = || {
        let file = folder.create(&unfinished, 0)?;
        file.write(0, ours.as_bytes())?;
        file.sync()?;
        folder.rename(&unfinished, FORMAT_FILE)?;
        folder.sync()
    };
    write().map_err(failed)
}

/// Reads a name's file. Returns the name if it is known, and the binding or what is wrong with it.
fn read_name(
    folder: &dyn Folder,
    owner: PublicKey,
    file: &str,
) -> (Option<String>, Result<Binding, String>) {
    let bytes = folder
        .open(file)
        .and_then(|file| read_all(&*file, NAME_BYTES_MAX));
    let bytes = match bytes {
        Ok(bytes) => bytes,
        Err(error) => return (None, Err(format!("the system does not read all ({error})"))),
    };
    let (name, binding) = decode(&bytes);
    let name = name.filter(|name| name_file(owner, name) == file);
    let binding = binding.filter(|_| name.is_some());
    (
        name,
        binding.ok_or_else(|| "the checksum is wrong".to_owned()),
    )
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
