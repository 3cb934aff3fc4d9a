//! [`PageTable`]: one entry of 32 bytes per page that says where its bytes are and what they hash
//! to.
//!
//! The rule it keeps: **only the page's owner writes its entry** (page protocol), so an entry needs
//! no lock. The next owner sees the entry whole: the word `form` is stored last with Release and
//! loaded first with Acquire. Entries are zero pages of the system until they are first written, so
//! a table costs memory only for pages in use.
//!
//! | word | bits | |
//! |---|---|---|
//! | place | 0..32 | offset in the extent, in units of 64 bytes |
//! | | 32..56 | extent group, as an index into the pool's table: its members have the bytes |
//! | | 56..64 | server that the slot was carved by, which may not have the bytes any more |
//! | form | 0..32 | stored length in bytes |
//! | | 32..40 | form: raw, or the codec that the page was encoded by |
//! | | 40..48 | kind; 0 is a page that was never written |
//! | | 48 | the last published map refers to the slot |
//! | | 49 | a write to the user's store failed: its bytes there are unknown |
//! | | 50..64 | time when the entry was stored ([`snapshots`](crate::snapshots)) |
//! | low, high | all | 128-bit hash of the bytes that come back; or a repeated value and zero |

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{
    PageIndex,
    codec::Form,
    error::TableError,
    place::{SlotPlace, SlotSpan},
    snapshots::OLDEST,
};

pub(crate) const PUBLISHED: u64 = 1 << 48;
const UNSURE: u64 = 1 << 49;
const TIME_SHIFT: u32 = 50;
const TIME: u64 = !((1 << TIME_SHIFT) - 1);
const FLAGS: u64 = !((1 << 48) - 1);

/// Place and hash of one page's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageEntry {
    /// Unwritten page: zeros in remote memory, unknown in a user's store.
    Never,
    /// Page of one repeated 8-byte value, stored nowhere else.
    Repeated { value: u64 },
    /// Page in a slot.
    Stored {
        place: SlotPlace,
        stored_bytes: u32,
        form: Form,
        hash: u128,
        /// True if the last published map refers to the slot: it must not be reused before the next
        /// publication.
        published: bool,
    },
    /// Page in a user's store.
    Kept {
        hash: u128,
        /// True if we wrote the page, so that it must come back the same. Otherwise `hash` is of
        /// the bytes that the store had when we read the page.
        written: bool,
        /// True if the last write failed, so that the bytes in the store are unknown.
        unsure: bool,
    },
}

impl PageEntry {
    /// True if the entry says that the page repeats `value`. A page of remote memory that was never
    /// written repeats zero.
    pub(crate) fn repeats(self, value: u64) -> bool {
        self == Self::Repeated { value } || (self == Self::Never && value == 0)
    }

    /// Returns the slot that the page is in.
    pub(crate) fn slot(self) -> Option<SlotSpan> {
        match self {
            Self::Stored {
                place,
                stored_bytes: bytes,
                ..
            } => Some(SlotSpan { place, bytes }),
            _ => None,
        }
    }
}

const KIND_NEVER: u64 = 0;
const KIND_REPEATED: u64 = 1;
const KIND_STORED: u64 = 2;
const KIND_READ: u64 = 3;
const KIND_WRITTEN: u64 = 4;

/// The words of an entry: place, form, low and high half of the hash.
pub type EntryWords = [u64; 4];

impl PageEntry {
    pub(crate) fn encode(self) -> EntryWords {
        let flag = |on: bool, bit: u64| if on { bit } else { 0 };
        let kind = |kind: u64| kind << 40;
        match self {
            Self::Never => [0; 4],
            Self::Repeated { value } => [0, kind(KIND_REPEATED), value, 0],
            Self::Stored {
                place,
                stored_bytes,
                form,
                hash,
                published,
            } => [
                place.pack(),
                u64::from(stored_bytes)
                    | (u64::from(form.id()) << 32)
                    | kind(KIND_STORED)
                    | flag(published, PUBLISHED),
                hash as u64,
                (hash >> 64) as u64,
            ],
            Self::Kept {
                hash,
                written,
                unsure,
            } => [
                0,
                kind(if written { KIND_WRITTEN } else { KIND_READ }) | flag(unsure, UNSURE),
                hash as u64,
                (hash >> 64) as u64,
            ],
        }
    }

    /// Decodes words. `None` for words that [`encode`](Self::encode) never makes: a damaged map.
    pub(crate) fn decode([place, word, low, high]: EntryWords) -> Option<Self> {
        let hash = u128::from(low) | (u128::from(high) << 64);
        let entry = match (word >> 40) & 0xff {
            KIND_NEVER => Self::Never,
            KIND_REPEATED => Self::Repeated { value: low },
            KIND_STORED => Self::Stored {
                place: SlotPlace::unpack(place),
                stored_bytes: word as u32,
                form: Form::from_id((word >> 32) as u8)?,
                hash,
                published: word & PUBLISHED != 0,
            },
            kind @ (KIND_READ | KIND_WRITTEN) => Self::Kept {
                hash,
                written: kind == KIND_WRITTEN,
                unsure: word & UNSURE != 0,
            },
            _ => return None,
        };
        (entry.encode() == [place, word, low, high]).then_some(entry)
    }

    /// Decodes words of a table, or of a copy of one that another process may have damaged.
    pub(crate) fn decode_timed([place, word, low, high]: EntryWords) -> Option<Self> {
        Self::decode([place, word & !TIME, low, high])
    }
}

/// The entries of all pages of a region.
pub(crate) struct PageTable {
    words: Vec<AtomicU64>,
}

impl PageTable {
    /// Makes the entries of a region's pages. Entries take memory only once they are written, but
    /// the system may refuse to promise it.
    pub(crate) fn new(bytes: u64, page_bytes: usize) -> Result<Self, TableError> {
        let words = bytes.div_ceil(page_bytes as u64) * 4;
        let words_here =
            usize::try_from(words).expect("a region fits the address space, so do its entries");
        match bytemuck::try_zeroed_vec(words_here) {
            Ok(words) => Ok(Self { words }),
            Err(()) => Err(TableError {
                bytes,
                page_bytes,
                table_bytes: words * 8,
            }),
        }
    }

    fn words(&self, page: PageIndex) -> &[AtomicU64] {
        &self.words[page.0 * 4..][..4]
    }

    /// Returns the address of the entry of a page.
    pub(crate) fn address(&self, page: PageIndex) -> usize {
        self.words(page).as_ptr().addr()
    }

    /// Returns the entry of a page that the caller owns (or that no one can write now).
    pub(crate) fn load(&self, page: PageIndex) -> PageEntry {
        self.load_timed(page).0
    }

    /// Returns the entry of a page that the caller owns, and the time when the entry was stored.
    pub(crate) fn load_timed(&self, page: PageIndex) -> (PageEntry, u16) {
        let words = self.load_words(page);
        let entry = PageEntry::decode_timed(words).expect("entries are only stored encoded");
        (entry, (words[1] >> TIME_SHIFT) as u16)
    }

    pub(crate) fn load_words(&self, page: PageIndex) -> EntryWords {
        let words = self.words(page);
        let form = words[1].load(Ordering::Acquire);
        let rest = |i: usize| words[i].load(Ordering::Relaxed);
        [rest(0), form, rest(2), rest(3)]
    }

    /// Stores the entry of a page that the caller owns, as old as any. For entries that no snapshot
    /// needs, and for those of a region that has just been opened.
    pub(crate) fn store(&self, page: PageIndex, entry: PageEntry) {
        self.store_timed(page, entry, OLDEST);
    }

    /// Stores the entry of a page that the caller owns. `time` is the present, or the time when the
    /// entry was stored elsewhere.
    pub(crate) fn store_timed(&self, page: PageIndex, entry: PageEntry, time: u16) {
        let mut new = entry.encode();
        new[1] |= u64::from(time) << TIME_SHIFT;
        let words = self.words(page);
        for i in [0, 2, 3] {
            words[i].store(new[i], Ordering::Relaxed);
        }
        words[1].store(new[1], Ordering::Release);
    }

    /// Notes that the last published map refers to the page's slot. Call only while no owner can
    /// store entries.
    pub(crate) fn mark_published(&self, page: PageIndex) {
        self.words(page)[1].fetch_or(PUBLISHED, Ordering::Relaxed);
    }

    /// True if the page has no entry: a hint for threads that do not own the page.
    pub(crate) fn is_never(&self, page: PageIndex) -> bool {
        (self.words(page)[1].load(Ordering::Acquire) >> 40) & 0xff == KIND_NEVER
    }

    /// True if the page has bytes anywhere: a hint for threads that do not own the page.
    pub(crate) fn is_stored(&self, page: PageIndex) -> bool {
        (self.words(page)[1].load(Ordering::Relaxed) >> 40) & 0xff >= KIND_STORED
    }
}

/// Returns the words without the bits that only hold in this process.
pub(crate) fn portable(mut words: EntryWords) -> EntryWords {
    words[1] &= !FLAGS;
    words
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::snapshots::TIME_MAX;

    fn edges() -> Vec<PageEntry> {
        let mut entries = vec![PageEntry::Never];
        for value in [0, 1, u64::MAX] {
            entries.push(PageEntry::Repeated { value });
        }
        for hash in [0, 1, u128::from(u64::MAX), u128::MAX, 1 << 64] {
            for flags in 0..4 {
                let (a, b) = (flags & 1 != 0, flags & 2 != 0);
                entries.push(PageEntry::Kept {
                    hash,
                    written: a,
                    unsure: b,
                });
                // Each of the others is made once.
                if b {
                    continue;
                }
                for server in [0, 1, 255] {
                    for extent in [0, 1, SlotPlace::EXTENTS_MAX - 1] {
                        for offset in [0, 64, SlotPlace::OFFSET_MAX] {
                            for stored_bytes in [0, 1, 2 << 20, u32::MAX] {
                                for form in Form::ALL {
                                    entries.push(PageEntry::Stored {
                                        place: SlotPlace {
                                            server,
                                            extent,
                                            offset,
                                        },
                                        stored_bytes,
                                        form,
                                        hash,
                                        published: a,
                                    });
                                }
                            }
                        }
                    }
                }
            }
        }
        entries
    }

    #[test]
    fn entries_come_back_as_stored_at_every_edge() {
        let table = PageTable::new(3 * 4096, 4096).unwrap();
        for entry in edges() {
            assert_eq!(PageEntry::decode(entry.encode()), Some(entry));
            table.store(PageIndex(1), entry);
            assert_eq!(table.load(PageIndex(1)), entry);
            assert_eq!(
                table.is_stored(PageIndex(1)),
                matches!(entry, PageEntry::Stored { .. } | PageEntry::Kept { .. })
            );
        }
        assert_eq!(
            (table.load(PageIndex(0)), table.load(PageIndex(2))),
            (PageEntry::Never, PageEntry::Never)
        );
    }

    #[test]
    fn the_time_of_an_entry_is_no_part_of_it() {
        let table = PageTable::new(3 * 4096, 4096).unwrap();
        for (time, entry) in (0..).zip(edges()) {
            let time = time % (TIME_MAX + 1);
            table.store_timed(PageIndex(1), entry, time);
            assert_eq!(table.load_timed(PageIndex(1)), (entry, time));
            table.mark_published(PageIndex(1));
            let words = table.load_words(PageIndex(1));
            assert_eq!(words[1] >> TIME_SHIFT, u64::from(time));
            assert_eq!(portable(words)[1] & FLAGS, 0);
        }
    }

    #[test]
    fn the_address_of_an_entry_is_that_of_its_words() {
        let table = PageTable::new(3 * 4096, 4096).unwrap();
        let first = table.address(PageIndex(0));
        assert_eq!(first, table.words.as_ptr().addr());
        assert_eq!(
            table.address(PageIndex(2)) - first,
            2 * size_of::<EntryWords>()
        );
    }

    /// Words of all kinds: at random, and entries with some bits changed.
    #[test]
    fn words_from_elsewhere_are_decoded_or_refused() {
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let edges = edges();
        for _ in 0..200_000 {
            let mut words: EntryWords = random.random();
            if random.random_bool(0.8) {
                words = edges[random.random_range(0..edges.len())].encode();
                for _ in 0..random.random_range(0..4) {
                    words[random.random_range(0..4)] ^= 1 << random.random_range(0..64);
                }
            }
            let entry = PageEntry::decode_timed(words);
            if let Some(entry) = entry {
                assert_eq!(entry.encode()[0], words[0]);
                assert_eq!(entry.encode()[1], words[1] & !TIME);
            }
        }
    }

    #[test]
    fn distinct_entries_have_distinct_words() {
        let all: std::collections::HashSet<_> =
            edges().into_iter().map(PageEntry::encode).collect();
        assert_eq!(all.len(), edges().len());
    }

    #[test]
    fn words_that_are_no_entry_are_refused() {
        for words in [
            [1, 0, 0, 0],
            [0, 9 << 40, 0, 0],
            [0, (2 << 40) | (7 << 32), 0, 0],
            [0, 1 << 63, 0, 0],
        ] {
            assert_eq!(PageEntry::decode(words), None, "{words:x?}");
        }
    }

    #[test]
    #[should_panic(expected = "has no encoding")]
    fn a_place_beyond_the_encoding_is_our_own_mistake() {
        SlotPlace {
            server: 0,
            extent: SlotPlace::EXTENTS_MAX,
            offset: 0,
        }
        .pack();
    }

    #[test]
    fn marking_and_stripping_change_flags_only() {
        let table = PageTable::new(1, 4096).unwrap();
        let place = SlotPlace {
            server: 3,
            extent: 4,
            offset: 128,
        };
        let entry = |published| PageEntry::Stored {
            place,
            stored_bytes: 100,
            form: Form::Raw,
            hash: 5,
            published,
        };
        table.store(PageIndex(0), entry(false));
        table.mark_published(PageIndex(0));
        assert_eq!(table.load(PageIndex(0)), entry(true));
        assert_eq!(
            portable(table.load_words(PageIndex(0))),
            entry(false).encode()
        );
    }
}
