//! Actions of the simulated program: it loads and stores words, sleeps on faults, and drops and
//! unmaps pages.

use super::{Faulted, SimSpace, state::Content};

impl SimSpace {
    /// Reads 8 bytes at `address`, a multiple of 8, as program thread `thread`.
    ///
    /// # Errors
    /// See [`Faulted`].
    pub fn try_load(&self, thread: usize, address: usize) -> Result<u64, Faulted> {
        self.access(thread, address, false, |word| u64::from_ne_bytes(*word))
    }

    /// Writes 8 bytes at `address`, a multiple of 8, as program thread `thread`.
    ///
    /// # Errors
    /// See [`Faulted`].
    pub fn try_store(&self, thread: usize, address: usize, value: u64) -> Result<(), Faulted> {
        self.access(thread, address, true, |word| *word = value.to_ne_bytes())
    }

    /// True if `thread` sleeps on a fault.
    pub fn is_asleep(&self, thread: usize) -> bool {
        self.state.lock().asleep.contains_key(&thread)
    }

    /// Drops a page as the program's `madvise(MADV_DONTNEED)` does: its bytes are gone, and its
    /// next touch is a fault. True if there was a page.
    pub fn drop_page(&self, address: usize) -> bool {
        let mut state = self.state.lock();
        let Some((region, page)) = state.region(address) else {
            return false;
        };
        let is_there = matches!(
            region.pages.get(&page),
            Some(Content::Bytes(_) | Content::Poison)
        );
        if is_there {
            region.pages.remove(&page);
        }
        is_there
    }

    /// Unmaps a page as the program's `munmap` does: its bytes are gone, and so are its addresses,
    /// until the region's end.
    pub fn unmap_page(&self, address: usize) {
        let mut state = self.state.lock();
        let Some((region, page)) = state.region(address) else {
            return;
        };
        let page_bytes = region.geometry.page_bytes;
        region.pages.insert(page, Content::Gone);
        state.wake(page..page + page_bytes);
        for news in &mut state.news {
            news.push(page..page + page_bytes);
        }
    }

    fn access<T>(
        &self,
        thread: usize,
        address: usize,
        write: bool,
        with: impl FnOnce(&mut [u8; 8]) -> T,
    ) -> Result<T, Faulted> {
        assert!(address.is_multiple_of(8), "simulated accesses are aligned");
        let mut state = self.state.lock();
        assert!(
            !state.asleep.contains_key(&thread),
            "thread {thread} touches {address:#x} in its sleep"
        );
        let (region, page) = state.region(address).ok_or(Faulted::Sigsegv)?;
        if write && region.geometry.read_only {
            return Err(Faulted::Sigsegv);
        }
        if region.is_ordinary {
            let zeros = || Content::Bytes(vec![0; region.geometry.page_bytes].into());
            region.pages.entry(page).or_insert_with(zeros);
        }
        match region.pages.get_mut(&page) {
            Some(Content::Bytes(bytes) | Content::Own(bytes)) => {
                let word = bytes[address - page..][..8]
                    .as_mut_array()
                    .expect("8 bytes were cut out");
                Ok(with(word))
            }
            Some(Content::Poison) => Err(Faulted::Sigbus),
            Some(Content::Gone) => Err(Faulted::Sigsegv),
            None => {
                state.fault(thread, address, page, write);
                Err(Faulted::Asleep)
            }
        }
    }
}
