//! Bits that flip in a server's memory, in bytes of a page that a fill will read.
//!
//! The rule it keeps: no damage stays behind. A copy that no fill reads first is put right again:
//! it would count as damaged, and be missing, only when the others have died.

use std::{
    collections::HashSet,
    fs::{self, File},
    ops::Range,
    os::unix::fs::{FileExt, MetadataExt},
    path::PathBuf,
};

use anyhow::{Context, Result, ensure};
use farpage::{Advice, RemoteArray, Runtime};
use farpage_bench_kit::pick::{Random, mix};

use super::{servers::Servers, work::Work};

/// Bytes between the places of memory that a page may begin at.
const ALIGNED: usize = 4 << 10;
const READ_BYTES: usize = 1 << 20;

/// Words that are written once, so that it is known what a server has of them.
pub(super) struct Fixed {
    words: RemoteArray<u64>,
    page_words: usize,
    seed: u64,
}

/// Place of a page's bytes in a server's memory.
struct Found {
    url: String,
    file: File,
    offset: u64,
}

impl Fixed {
    /// Fills `words`, and writes them to the servers.
    pub(super) fn new(mut words: RemoteArray<u64>, page_words: usize, seed: u64) -> Result<Self> {
        for (word, at) in words.iter_mut().zip(0..) {
            *word = mix(seed ^ at);
        }
        words.flush().context("cannot write the array back")?;
        Ok(Self {
            words,
            page_words,
            seed,
        })
    }

    /// Returns the number of words that are not what was written.
    pub(super) fn wrong(&self) -> u64 {
        self.wrong_of(0..self.words.len())
    }

    fn wrong_of(&self, range: Range<usize>) -> u64 {
        let words = self.words[range.clone()].iter().zip(range);
        let wrong = words.filter(|(word, at)| **word != mix(self.seed ^ *at as u64));
        wrong.count() as u64
    }

    /// Flips a bit of a page in the memory of the server that the page is read from, and reads the
    /// page. Returns the server, or `None` if no server has the bytes of the pages that were looked
    /// at in one place alone, where that is asked for.
    ///
    /// # Errors
    /// The damage was not counted once, or the page cannot be read.
    pub(super) fn flip(
        &self,
        servers: &Servers,
        runtime: &Runtime,
        work: &Work,
        is_alone: bool,
        random: &mut Random,
    ) -> Result<Option<String>> {
        let pages = self.words.len() / self.page_words;
        for _ in 0..pages {
            let first = random.below(pages as u64) as usize * self.page_words;
            let range = first..first + self.page_words;
            let words = range.clone().map(|at| mix(self.seed ^ at as u64));
            let bytes: Vec<u8> = words.flat_map(u64::to_ne_bytes).collect();
            let mut places = Vec::new();
            for server in servers.all() {
                let pid = server.pid()?.as_raw();
                let found = find(pid, &bytes)?.into_iter();
                places.extend(found.map(|(file, offset)| Found {
                    url: server.url.clone(),
                    file,
                    offset,
                }));
            }
            if is_alone && places.len() != 1 {
                continue;
            }
            for place in places {
                self.words.advise(range.clone(), Advice::DontNeed)?;
                let (at, bit) = (random.below(bytes.len() as u64), random.below(8));
                let (right, at) = ([bytes[at as usize]], place.offset + at);
                let flipped = [right[0] ^ 1 << bit];
                let before = runtime.stats().store.corrupt;
                work.measure();
                place.file.write_all_at(&flipped, at)?;
                self.words.prefetch_now(range.clone())?;
                work.add_wrong(self.wrong_of(range.clone()));
                let counted = runtime.stats().store.corrupt - before;
                ensure!(
                    counted <= 1,
                    "a bit that flipped at {} is counted as {counted} damaged pages",
                    place.url
                );
                if counted == 1 {
                    return Ok(Some(place.url));
                }
                let mut now = [0];
                place.file.read_exact_at(&mut now, at)?;
                if now == flipped {
                    place.file.write_all_at(&right, at)?;
                }
            }
        }
        Ok(None)
    }
}

/// Returns the places in the extents of a process that hold `page`.
fn find(pid: i32, page: &[u8]) -> Result<Vec<(File, u64)>> {
    let directory = PathBuf::from(format!("/proc/{pid}/fd"));
    let entries = fs::read_dir(&directory);
    let entries = entries.with_context(|| format!("cannot read {}", directory.display()))?;
    let mut found = Vec::new();
    let mut buf = vec![0; READ_BYTES];
    let mut seen = HashSet::new();
    for entry in entries {
        let path = entry.context("cannot list a server's files")?.path();
        // A descriptor that was closed just now has no name any more.
        let Ok(name) = fs::read_link(&path) else {
            continue;
        };
        if !name.to_string_lossy().starts_with("/memfd:farpage-extent") {
            continue;
        }
        let Ok(file) = File::options().read(true).write(true).open(&path) else {
            continue;
        };
        // Several descriptors may be of the same memory.
        let inode = file.metadata()?.ino();
        if !seen.insert(inode) {
            continue;
        }
        let mut offset = 0;
        loop {
            let bytes = file
                .read_at(&mut buf, offset)
                .context("cannot read memory")?;
            if bytes == 0 {
                break;
            }
            for at in (0..bytes).step_by(ALIGNED) {
                let here = offset + at as u64;
                if buf[at..bytes].starts_with(&page[..8]) && is_at(&file, here, page)? {
                    found.push((file.try_clone()?, here));
                }
            }
            offset += bytes as u64;
        }
    }
    Ok(found)
}

/// True if `page` lies at `offset`.
fn is_at(file: &File, offset: u64, page: &[u8]) -> Result<bool> {
    let mut bytes = vec![0; page.len()];
    let read = file
        .read_at(&mut bytes, offset)
        .context("cannot read memory")?;
    Ok(read == page.len() && bytes == page)
}
