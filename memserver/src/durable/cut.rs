//! [`CutFolder`]: a simulated directory whose power can be cut.
//!
//! The rule it keeps: a cut keeps what was synced, and any subset of the rest: each sector of each
//! write, each change of a file's length, and each entry of the directory for itself.

use std::{collections::BTreeMap, io, ops::Range, sync::Arc};

use parking_lot::Mutex;
use rand::{Rng, RngExt};

use super::folder::{Folder, FolderFile};

/// Bytes that a disk writes all or none of.
const SECTOR_BYTES: usize = 512;

/// A simulated directory. Clones are handles of the same one.
#[derive(Clone, Default)]
pub(crate) struct CutFolder(Arc<Mutex<CutDisk>>);

/// Steps of a [`CutFolder`] that claim success and do nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lies {
    /// Beginning of the names of the files whose `sync` is none.
    pub(crate) files: Option<&'static str>,
    /// True if `sync` of the folder is none.
    pub(crate) folder: bool,
}

/// Steps that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Write,
    Rename,
    SyncFile,
    SyncFolder,
    Read,
}

#[derive(Default)]
struct CutDisk {
    files: Vec<Inode>,
    entries: BTreeMap<String, usize>,
    /// True if a check of the file system left files without a name.
    has_lost: bool,
    durable_entries: BTreeMap<String, usize>,
    changes: Vec<Change>,
    lies: Lies,
    /// Steps until the power is cut.
    left: Option<u64>,
    /// Step that fails, and the beginning of the names of its files.
    faults: Option<(Step, String, io::ErrorKind)>,
    written_bytes: u64,
}

#[derive(Clone, Default)]
struct Inode {
    bytes: Vec<u8>,
    durable: Vec<u8>,
    unsynced: Vec<Unsynced>,
}

#[derive(Clone)]
enum Unsynced {
    Write(usize, Vec<u8>),
    Length(usize),
}

/// A change of the directory: entries that go, and one that comes.
#[derive(Clone)]
struct Change {
    goes: Option<String>,
    comes: Option<(String, usize)>,
}

struct CutFile {
    folder: CutFolder,
    name: String,
    number: usize,
}

impl Change {
    fn apply(&self, entries: &mut BTreeMap<String, usize>) {
        if let Some(name) = &self.goes {
            entries.remove(name);
        }
        if let Some((name, number)) = &self.comes {
            entries.insert(name.clone(), *number);
        }
    }
}

impl Unsynced {
    fn apply(&self, bytes: &mut Vec<u8>) {
        match self {
            Self::Length(len) => bytes.resize(*len, 0),
            Self::Write(at, from) => {
                let end = at + from.len();
                if bytes.len() < end {
                    bytes.resize(end, 0);
                }
                bytes[*at..end].copy_from_slice(from);
            }
        }
    }
}

impl CutDisk {
    /// Counts a step. Fails once the power is cut, and where a fault is due.
    fn step(&mut self, step: Step, name: &str) -> io::Result<()> {
        match &mut self.left {
            Some(0) => return Err(io::Error::other("the power is cut")),
            Some(left) => *left -= 1,
            None => {}
        }
        match &self.faults {
            Some((fault, prefix, kind)) if *fault == step && name.starts_with(prefix.as_str()) => {
                Err((*kind).into())
            }
            _ => Ok(()),
        }
    }

    fn change(&mut self, change: Change) {
        change.apply(&mut self.entries);
        self.changes.push(change);
    }

    fn number(&self, name: &str) -> io::Result<usize> {
        let number = self.entries.get(name).copied();
        number.ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl CutFolder {
    /// Makes some steps do nothing from now on, also after cuts.
    pub(crate) fn lie(&self, lies: Lies) {
        self.0.lock().lies = lies;
    }

    /// Cuts the power after `steps` more steps.
    pub(crate) fn cut_after(&self, steps: u64) {
        self.0.lock().left = Some(steps);
    }

    /// Makes `step` fail from now on, on files whose names begin with `prefix`.
    pub(crate) fn fail(&self, fault: Option<(Step, &str, io::ErrorKind)>) {
        self.0.lock().faults = fault.map(|(step, prefix, kind)| (step, prefix.to_owned(), kind));
    }

    /// Returns the directory as it is after a cut.
    pub(crate) fn cut(&self, random: &mut impl Rng) -> Self {
        let disk = self.0.lock();
        let mut entries = disk.durable_entries.clone();
        for change in &disk.changes {
            if random.random_bool(0.5) {
                change.apply(&mut entries);
            }
        }
        let mut after = CutDisk {
            lies: disk.lies,
            ..CutDisk::default()
        };
        for (name, number) in entries {
            let file = &disk.files[number];
            let mut bytes = file.durable.clone();
            for unsynced in &file.unsynced {
                if random.random_bool(0.5) {
                    unsynced.apply(&mut bytes);
                }
            }
            after.durable_entries.insert(name, after.files.len());
            after.files.push(Inode {
                durable: bytes.clone(),
                bytes,
                unsynced: Vec::new(),
            });
        }
        after.entries.clone_from(&after.durable_entries);
        Self(Arc::new(Mutex::new(after)))
    }

    /// Returns the directory as the next process finds it if only this process ends.
    pub(crate) fn reopen(&self) -> Self {
        let mut disk = self.0.lock();
        (disk.left, disk.faults) = (None, None);
        self.clone()
    }

    /// Changes the bytes of a file, as a disk that forgets does.
    pub(crate) fn tamper(&self, file: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut disk = self.0.lock();
        let number = disk.number(file).expect("the file is there");
        let file = &mut disk.files[number];
        change(&mut file.bytes);
        file.durable.clone_from(&file.bytes);
    }

    /// Leaves files without a name, as a check of the file system does; or removes them.
    pub(crate) fn find_lost(&self, has_lost: bool) {
        self.0.lock().has_lost = has_lost;
    }

    /// Makes all steps wait until the result is dropped.
    pub(crate) fn hang(&self) -> impl Sized + '_ {
        self.0.lock()
    }

    /// Makes an empty file, durably.
    pub(crate) fn put(&self, file: &str) {
        let mut disk = self.0.lock();
        let number = disk.files.len();
        disk.files.push(Inode::default());
        disk.entries.insert(file.to_owned(), number);
        disk.durable_entries.insert(file.to_owned(), number);
    }

    /// Returns the bytes of all files.
    pub(crate) fn bytes(&self) -> u64 {
        let disk = self.0.lock();
        let numbers = disk.entries.values();
        numbers
            .map(|number| disk.files[*number].bytes.len() as u64)
            .sum()
    }

    /// Removes a file durably.
    pub(crate) fn lose(&self, file: &str) {
        let mut disk = self.0.lock();
        disk.entries.remove(file).expect("the file is there");
        disk.durable_entries.remove(file);
    }

    /// Returns the number of bytes that were written to files.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.0.lock().written_bytes
    }

    /// Lists the files whose names begin with `prefix`.
    pub(crate) fn files(&self, prefix: &str) -> Vec<String> {
        let disk = self.0.lock();
        let names = disk.entries.keys();
        names.filter(|it| it.starts_with(prefix)).cloned().collect()
    }
}

impl Folder for CutFolder {
    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.files(""))
    }

    fn has_lost_files(&self) -> io::Result<bool> {
        Ok(self.0.lock().has_lost)
    }

    fn open(&self, file: &str) -> io::Result<Box<dyn FolderFile>> {
        let number = self.0.lock().number(file)?;
        Ok(Box::new(CutFile {
            folder: self.clone(),
            name: file.to_owned(),
            number,
        }))
    }

    fn create(&self, file: &str, bytes: u64) -> io::Result<Box<dyn FolderFile>> {
        let mut disk = self.0.lock();
        disk.step(Step::Write, file)?;
        let number = disk.files.len();
        disk.files.push(Inode {
            bytes: vec![0; bytes as usize],
            durable: Vec::new(),
            unsynced: vec![Unsynced::Length(bytes as usize)],
        });
        disk.change(Change {
            goes: None,
            comes: Some((file.to_owned(), number)),
        });
        drop(disk);
        self.open(file)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut disk = self.0.lock();
        disk.step(Step::Rename, from)?;
        let number = disk.number(from)?;
        disk.change(Change {
            goes: Some(from.to_owned()),
            comes: Some((to.to_owned(), number)),
        });
        Ok(())
    }

    fn remove(&self, file: &str) -> io::Result<()> {
        let mut disk = self.0.lock();
        disk.step(Step::Write, file)?;
        disk.number(file)?;
        disk.change(Change {
            goes: Some(file.to_owned()),
            comes: None,
        });
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut disk = self.0.lock();
        disk.step(Step::SyncFolder, "")?;
        if !disk.lies.folder {
            disk.changes.clear();
            disk.durable_entries = disk.entries.clone();
        }
        Ok(())
    }
}

impl FolderFile for CutFile {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.folder.0.lock().files[self.number].bytes.len() as u64)
    }

    fn disk_bytes(&self) -> io::Result<u64> {
        self.bytes()
    }

    fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        let mut disk = self.folder.0.lock();
        disk.step(Step::Read, &self.name)?;
        let from = disk.files[self.number].bytes.get(at as usize..);
        let from = from.and_then(|from| from.get(..to.len()));
        to.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn next_data(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let end = self.bytes()?;
        Ok((from < end).then_some(from..end))
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        let mut disk = self.folder.0.lock();
        disk.step(Step::Write, &self.name)?;
        disk.written_bytes += from.len() as u64;
        let file = &mut disk.files[self.number];
        let (mut at, mut rest) = (at as usize, from);
        while !rest.is_empty() {
            let len = rest.len().min(SECTOR_BYTES - at % SECTOR_BYTES);
            let (sector, others) = rest.split_at(len);
            let write = Unsynced::Write(at, sector.to_vec());
            write.apply(&mut file.bytes);
            file.unsynced.push(write);
            (at, rest) = (at + len, others);
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut disk = self.folder.0.lock();
        disk.step(Step::SyncFile, &self.name)?;
        let lie = disk.lies.files;
        if !lie.is_some_and(|prefix| self.name.starts_with(prefix)) {
            let file = &mut disk.files[self.number];
            file.durable.clone_from(&file.bytes);
            file.unsynced.clear();
        }
        Ok(())
    }
}
