//! State of the simulated space: [`State`], its regions, sleeping threads, and news to be told.
//!
//! The rule it keeps: at most one page lies at an address, and a fault that is ended before it is
//! read is not reported.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    ops::Range,
};

use super::options::SimOptions;
use crate::{
    pages::{Pages, Shard},
    space::{Geometry, InstallErrorKind, PageFault},
};

pub(super) struct State {
    pub(super) options: SimOptions,
    pub(super) random: u64,
    pub(super) next_address: usize,
    pub(super) regions: BTreeMap<usize, SimRegion>,
    pub(super) queues: Vec<VecDeque<Message>>,
    /// Addresses that the program has unmapped, by shard, until they are told.
    pub(super) news: Vec<Vec<Range<usize>>>,
    /// Page on whose fault a thread sleeps, by thread.
    pub(super) asleep: BTreeMap<usize, usize>,
    /// Addresses at which no page can be mapped.
    pub(super) refused: Option<Range<usize>>,
    /// True if no address can be ceded.
    pub(super) refuses_to_cede: bool,
}

pub(super) struct SimRegion {
    pub(super) geometry: Geometry,
    /// True if a touch of an absent page is no fault, and makes it a page of zeros.
    pub(super) is_ordinary: bool,
    pub(super) pages: BTreeMap<usize, Content>,
}

pub(super) enum Content {
    Bytes(Box<[u8]>),
    Poison,
    /// A page that the program has unmapped.
    Gone,
    /// Memory of the program's own, at ceded addresses.
    Own(Box<[u8]>),
}

#[derive(Clone, Copy)]
pub(super) struct Message {
    /// The sleeping thread; `None` for an injected duplicate, which no waking takes back.
    pub(super) thread: Option<usize>,
    pub(super) fault: PageFault,
}

impl SimRegion {
    /// True if nothing of the region can be mapped at `page`.
    pub(super) fn is_gone(&self, page: usize) -> bool {
        matches!(self.pages.get(&page), Some(Content::Gone | Content::Own(_)))
    }
}

impl State {
    /// Makes a state without regions and sleeping threads.
    pub(super) fn new(options: SimOptions) -> Self {
        let shards = options.shards;
        Self {
            random: options.seed,
            // Any address that is not 0 and is aligned to the largest page.
            next_address: 1 << 40,
            regions: BTreeMap::new(),
            queues: vec![VecDeque::new(); shards],
            news: vec![Vec::new(); shards],
            asleep: BTreeMap::new(),
            refused: None,
            refuses_to_cede: false,
            options,
        }
    }

    /// Returns the region that `address` lies in, and the first address of its page.
    pub(super) fn region(&mut self, address: usize) -> Option<(&mut SimRegion, usize)> {
        let (start, region) = self.regions.range_mut(..=address).next_back()?;
        let offset = address - start;
        let page = address - offset % region.geometry.page_bytes;
        (offset < region.geometry.bytes).then_some((region, page))
    }

    /// Returns the region in which `pages` lie.
    ///
    /// # Panics
    /// If `pages` are no pages of the region, or not in one stripe of their shard.
    pub(super) fn region_of(&mut self, pages: Pages) -> Option<&mut SimRegion> {
        let shards = self.queues.len();
        let (address, page_bytes) = (pages.address(), pages.page_bytes());
        let (&start, region) = self.regions.range_mut(..=address).next_back()?;
        let Geometry {
            bytes,
            page_bytes: its_page_bytes,
            stripe_bytes,
            ..
        } = region.geometry;
        let offset = address - start;
        if offset >= bytes {
            return None;
        }
        assert!(
            page_bytes == its_page_bytes && offset.is_multiple_of(page_bytes),
            "{address:#x} is no page of {page_bytes} bytes"
        );
        let last = offset + pages.bytes() - page_bytes;
        assert!(
            last < bytes && offset / stripe_bytes == last / stripe_bytes,
            "{pages:x?} leave their stripe"
        );
        assert_eq!(
            pages.shard(),
            region.geometry.shard_of(offset, shards),
            "{pages:x?} are another shard's"
        );
        Some(region)
    }

    pub(super) fn fault(&mut self, thread: usize, address: usize, page: usize, write: bool) {
        let shards = self.queues.len();
        let (start, region) = self
            .regions
            .range(..=address)
            .next_back()
            .expect("the caller has found the region");
        let Shard(shard) = region.geometry.shard_of(address - start, shards);
        let fault = PageFault {
            address,
            write,
            protected: false,
            thread: 0,
        };
        self.queues[shard].push_back(Message {
            thread: Some(thread),
            fault,
        });
        if self.chance(self.options.duplicate_probability) {
            self.queues[shard].push_back(Message {
                thread: None,
                fault,
            });
        }
        self.asleep.insert(thread, page);
    }

    /// Puts bytes at one page, if it is absent.
    pub(super) fn put(&mut self, page: Pages, bytes: &[u8]) -> Result<(), InstallErrorKind> {
        let address = page.address();
        let is_refused = self
            .refused
            .as_ref()
            .is_some_and(|at| at.contains(&address));
        let region = self.region_of(page).ok_or(InstallErrorKind::Gone)?;
        match region.pages.get(&address) {
            Some(Content::Bytes(_)) => Err(InstallErrorKind::Exists),
            Some(Content::Gone | Content::Own(_)) => Err(InstallErrorKind::Gone),
            Some(Content::Poison) | None if is_refused => Err(InstallErrorKind::Os(
                io::Error::from_raw_os_error(libc::ENOMEM),
            )),
            Some(Content::Poison) | None => {
                region.pages.insert(address, Content::Bytes(bytes.into()));
                Ok(())
            }
        }
    }

    /// Drops pages that were put at these addresses of one region a moment ago.
    pub(super) fn take_back(&mut self, addresses: Range<usize>) {
        if let Some((region, _)) = self.region(addresses.start) {
            region.pages.retain(|page, _| !addresses.contains(page));
        }
    }

    pub(super) fn wake(&mut self, addresses: Range<usize>) {
        let woken: Vec<_> = self
            .asleep
            .iter()
            .filter(|(_, page)| addresses.contains(page))
            .map(|(&thread, _)| thread)
            .collect();
        for thread in woken {
            self.asleep.remove(&thread);
            for queue in &mut self.queues {
                queue.retain(|message| message.thread != Some(thread));
            }
        }
    }

    /// Returns true with this probability, by SplitMix64 (Steele, Lea and Flood, 2014).
    pub(super) fn chance(&mut self, probability: f64) -> bool {
        if probability <= 0.0 {
            return false;
        }
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        ((z >> 11) as f64) < probability * (1u64 << 53) as f64
    }
}
