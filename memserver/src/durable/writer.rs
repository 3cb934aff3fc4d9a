//! [`DurableNames`]: writes extents and bindings to the directory.
//!
//! The rule it keeps: a binding is written when all that it refers to is durable, and an extent's
//! file is removed when no durable binding refers to it. After a `sync` that failed nobody knows
//! what the disk has: nothing is written, bound or removed any more until the next start, so that
//! the last bindings stay whole.

use std::{
    collections::HashMap,
    fmt::Display,
    io,
    os::fd::OwnedFd,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use farpage_fabric::{log::later, memory::ExtentMemory};
use farpage_wire::{ExtentId, Persistence, PublicKey};
use parking_lot::Mutex;

use super::{
    folder::{DiskFolder, Folder, FolderFile},
    format::{Binding, BoundExtent, UNFINISHED, encode, extent_file, name_file},
};
use crate::{
    handover::HandedDurable,
    tier::{Aligned, BLOCK_BYTES},
};

/// Bytes that are moved at once: enough for a disk to work on several parts, and few in memory.
const PIECE_BYTES: usize = 4 << 20;

/// Buffer of one piece. A piece lies in it as in its file, so that whole blocks are aligned.
pub(super) struct Piece(Aligned);

impl Piece {
    pub(super) fn new() -> Self {
        Self(Aligned::new(PIECE_BYTES + BLOCK_BYTES))
    }

    /// Returns the part of the buffer for the first of `left` bytes at offset `at` of a file.
    pub(super) fn at(&mut self, at: u64, left: u64) -> &mut [u8] {
        let start = (at % BLOCK_BYTES as u64) as usize;
        let len = left.min(PIECE_BYTES as u64) as usize;
        &mut self.0[start..][..len]
    }
}

/// The longest wait for bytes that a tier has moved out of memory.
pub(super) const BROUGHT: Duration = Duration::from_secs(10);

/// The names of one directory, to be written.
pub(crate) struct DurableNames {
    folder: Box<dyn Folder>,
    directory: String,
    when: Persistence,
    /// Extents, and whether each has a file.
    files: Mutex<HashMap<ExtentId, Arc<Turn>>>,
    /// True if files were made since the folder's last `sync`.
    has_new_files: Mutex<bool>,
    /// Reason why nothing is written any more.
    broken: Mutex<Option<String>>,
    written_bytes: AtomicU64,
    /// Bytes that each file takes on the disk, as of its last write: looking at all files takes as
    /// many system calls, and each client asks for the sum every few seconds.
    sizes: Mutex<HashMap<String, u64>>,
}

/// The right to write to an extent's file, and true if there is one. Locked from the reading of
/// the extent's memory to the writing of its file, so that a late writer never puts old bytes over
/// new ones.
type Turn = Mutex<bool>;

/// Bytes of an extent to write: offsets and lengths.
pub(crate) struct Written {
    pub(crate) memory: Arc<ExtentMemory>,
    pub(crate) ranges: Vec<(u64, u64)>,
}

impl DurableNames {
    /// Makes the writer of `folder`, whose path for people is `directory`, and which has files of
    /// `extents`. `sizes` are the bytes that its files take on the disk.
    pub(super) fn new(
        folder: Box<dyn Folder>,
        directory: String,
        when: Persistence,
        extents: impl IntoIterator<Item = ExtentId>,
        sizes: HashMap<String, u64>,
    ) -> Self {
        let files = extents
            .into_iter()
            .map(|id| (id, Arc::new(Turn::new(true))));
        Self {
            folder,
            directory,
            when,
            files: Mutex::new(files.collect()),
            has_new_files: Mutex::new(false),
            broken: Mutex::default(),
            written_bytes: AtomicU64::new(0),
            sizes: Mutex::new(sizes),
        }
    }

    /// Writes what the next process needs. Nobody writes to the directory meanwhile. `lock` is the
    /// place of the folder's lock.
    pub(crate) fn hand_over(&self, lock: u32) -> HandedDurable {
        let files = self.files.lock();
        let has_file = files.iter().filter(|(_, turn)| *turn.lock());
        HandedDurable {
            directory: self.directory.clone(),
            lock,
            files: has_file.map(|(id, _)| *id).collect(),
            has_new_files: *self.has_new_files.lock(),
            sizes: self.sizes.lock().clone().into_iter().collect(),
            written_bytes: self.written_bytes(),
            broken: self.broken(),
        }
    }

    /// Returns the lock of the directory, if it has one.
    pub(crate) fn locked(&self) -> Option<OwnedFd> {
        let lock = self.folder.locked()?;
        lock.try_clone_to_owned().ok()
    }

    /// Takes over the directory at `path`, whose lock is `lock`.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn take_over(
        path: &Path,
        when: Persistence,
        handed: HandedDurable,
        lock: OwnedFd,
    ) -> io::Result<Self> {
        let folder = DiskFolder::inherit(path, lock)?;
        let sizes = handed.sizes.into_iter().collect();
        let durable = Self::new(
            Box::new(folder),
            handed.directory,
            when,
            handed.files,
            sizes,
        );
        *durable.has_new_files.lock() = handed.has_new_files;
        *durable.broken.lock() = handed.broken;
        durable
            .written_bytes
            .store(handed.written_bytes, Ordering::Relaxed);
        Ok(durable)
    }

    pub(super) fn folder(&self) -> &dyn Folder {
        &*self.folder
    }

    /// Returns the path of the directory, for people.
    pub(crate) fn directory(&self) -> &str {
        &self.directory
    }

    /// Returns the time at which published names are on the disk.
    pub(crate) fn when(&self) -> Persistence {
        self.when
    }

    /// Returns the reason why nothing is written any more, if there is one.
    pub(crate) fn broken(&self) -> Option<String> {
        self.broken.lock().clone()
    }

    /// Returns the bytes written since the start.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.written_bytes.load(Ordering::Relaxed)
    }

    /// Returns the bytes that the directory's files take on the disk.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.sizes.lock().values().sum()
    }

    /// Writes bytes of extents to their files, and makes them durable.
    ///
    /// # Errors
    /// The reason, for people. The bytes are not durable then.
    pub(crate) fn write(&self, all: &[Written]) -> Result<(), String> {
        self.check()?;
        let mut piece = Piece::new();
        for Written { memory, ranges } in all {
            let id = memory.id();
            let turn = self.turn(id);
            let mut has_file = turn.lock();
            let name = extent_file(id);
            let file = match *has_file {
                true => self.folder.open(&name),
                false => self.make(&name, memory.bytes(), &mut has_file),
            };
            let file = file.map_err(|error| self.says("opening", &name, error))?;
            for &(mut at, mut left) in ranges {
                while left > 0 {
                    let written = move_out(memory, &*file, (at, left), &mut piece);
                    let len = written.map_err(|error| self.says("writing", &name, error))?;
                    self.written_bytes.fetch_add(len, Ordering::Relaxed);
                    (at, left) = (at + len, left - len);
                }
            }
            self.settle(&name, file.sync())?;
            self.measure(&name, &*file);
        }
        Ok(())
    }

    /// Binds a name durably. All bytes that the binding refers to were [written](Self::write).
    ///
    /// # Errors
    /// The reason, for people. The former binding stays; or after a `sync` that failed, the next
    /// start finds one of the two, which are whole.
    pub(crate) fn bind(
        &self,
        owner: PublicKey,
        name: &str,
        binding: &Binding,
    ) -> Result<(), String> {
        self.check()?;
        // 1. A file for each extent, also for one without bytes: a missing file is damage.
        for &BoundExtent { id, bytes, .. } in &binding.extents {
            let turn = self.turn(id);
            let mut has_file = turn.lock();
            if !*has_file {
                let name = extent_file(id);
                let file = self.make(&name, bytes, &mut has_file);
                let file = file.map_err(|error| self.says("making", &name, error))?;
                self.settle(&name, file.sync())?;
                self.measure(&name, &*file);
            }
        }
        // 2. Entries of new files before the name that refers to them. Locked throughout, since
        //    another publication may wait for the same entries.
        let mut has_new_files = self.has_new_files.lock();
        if *has_new_files {
            self.settle("the directory", self.folder.sync())?;
            *has_new_files = false;
        }
        drop(has_new_files);
        // 3. The name.
        let whole = name_file(owner, name);
        let unfinished = format!("{UNFINISHED}{whole}");
        let bytes = encode(owner, name, binding);
        let file = self.folder.create(&unfinished, 0);
        let file = file.map_err(|error| self.says("making", &unfinished, error))?;
        let written = file.write(0, &bytes);
        written.map_err(|error| self.says("writing", &unfinished, error))?;
        self.settle(&unfinished, file.sync())?;
        match self.folder.rename(&unfinished, &whole) {
            // A directory without room has not changed.
            Err(error) if lacks_room(&error) => return Err(self.says("making", &whole, error)),
            renamed => self.settle(&whole, renamed)?,
        }
        self.settle("the directory", self.folder.sync())?;
        self.measure(&whole, &*file);
        let bytes = bytes.len() as u64;
        self.written_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Removes a name durably.
    ///
    /// # Errors
    /// The reason, for people.
    pub(crate) fn unbind(&self, owner: PublicKey, name: &str) -> Result<(), String> {
        self.unbind_file(&name_file(owner, name))
    }

    /// Removes a name's file durably.
    ///
    /// # Errors
    /// The reason, for people.
    pub(crate) fn unbind_file(&self, file: &str) -> Result<(), String> {
        self.check()?;
        match self.folder.remove(file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(self.says("removing", file, error));
            }
            _ => self.sizes.lock().remove(file),
        };
        self.settle("the directory", self.folder.sync())
    }

    /// Removes the files of extents that no durable binding refers to.
    pub(crate) fn forget(&self, extents: impl IntoIterator<Item = ExtentId>) {
        if self.check().is_err() {
            // The binding that was to be the last may not be.
            return;
        }
        for id in extents {
            if self.files.lock().remove(&id).is_none() {
                continue;
            }
            let file = extent_file(id);
            match self.folder.remove(&file) {
                Ok(()) => drop(self.sizes.lock().remove(&file)),
                Err(error) => {
                    let reason = self.says("removing", &file, error);
                    later(move || tracing::warn!("{reason}; the next start removes it"));
                }
            }
        }
    }

    /// Ends all writing until the next start, for `reason`.
    pub(crate) fn give_up(&self, reason: &str) {
        let mut broken = self.broken.lock();
        if broken.is_none() {
            *broken = Some(reason.to_owned());
            let reason = reason.to_owned();
            later(move || {
                tracing::error!(
                    "{reason}: no name is written to the disk any more until this server is started anew"
                );
            });
        }
    }

    /// Notes what a file takes on the disk. A file system that does not tell leaves the last
    /// figure.
    fn measure(&self, name: &str, file: &dyn FolderFile) {
        if let Ok(bytes) = file.disk_bytes() {
            self.sizes.lock().insert(name.to_owned(), bytes);
        }
    }

    fn turn(&self, id: ExtentId) -> Arc<Turn> {
        Arc::clone(self.files.lock().entry(id).or_default())
    }

    /// Makes the file of an extent.
    fn make(&self, name: &str, bytes: u64, has_file: &mut bool) -> io::Result<Box<dyn FolderFile>> {
        let made = self.folder.create(name, bytes)?;
        *has_file = true;
        *self.has_new_files.lock() = true;
        Ok(made)
    }

    /// Returns the error of a step after which nobody knows what the disk has.
    fn settle(&self, what: &str, synced: io::Result<()>) -> Result<(), String> {
        synced.map_err(|error| {
            let reason = self.says("making durable", what, error);
            self.give_up(&reason);
            reason
        })
    }

    /// Checks that the directory may be written.
    ///
    /// # Errors
    /// The reason why nothing is written any more, for people.
    pub(crate) fn check(&self) -> Result<(), String> {
        match &*self.broken.lock() {
            None => Ok(()),
            Some(reason) => Err(format!(
                "{reason}; nothing is written there until the server is started anew"
            )),
        }
    }

    fn says(&self, doing: &str, what: &str, error: impl Display) -> String {
        format!("{doing} {what} in {}: {error}", self.directory)
    }
}

/// True if the disk, or the quota of the server's user, is full.
fn lacks_room(error: &io::Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded)
}

/// Writes the first of `left` bytes at offset `at` of `memory` to its file. Returns their number.
fn move_out(
    memory: &ExtentMemory,
    file: &dyn FolderFile,
    (at, left): (u64, u64),
    piece: &mut Piece,
) -> io::Result<u64> {
    // Bytes that a tier may move stay in memory only while they are copied.
    if !memory.is_paged() {
        let written = file.write_memory(&memory.file(), at, left)?;
        if written > 0 {
            return Ok(written);
        }
    }
    let bytes = piece.at(at, left);
    memory.read_own(at, bytes, Instant::now() + BROUGHT)?;
    file.write(at, bytes)?;
    Ok(bytes.len() as u64)
}
