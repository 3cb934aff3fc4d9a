//! Shared parts of all tests of the real address space: pages that come and go by moving, and the
//! events of a shard.

use farpage_vm::{
    AddressSpace, DetachError, Detached, EventScope, Events, Geometry, InstallError, KernelFrame,
    KernelSpace, PageIn, PageOut, Pages, Shard,
};

/// Returns the geometry of a region of one shard's stripes, each of one page.
pub(crate) fn geometry(bytes: usize, page_bytes: usize) -> Geometry {
    Geometry {
        bytes,
        page_bytes,
        stripe_bytes: page_bytes,
        first_shard: 0,
        address: None,
        read_only: false,
        no_direct_io: false,
        ordinary: false,
    }
}

/// Returns `count` pages of `page_bytes` from `address` on.
pub(crate) fn pages(shard: usize, address: usize, page_bytes: usize, count: usize) -> Pages {
    Pages::new(Shard(shard), address, page_bytes, count)
}

/// Moving of pages in and out.
pub(crate) trait Moves {
    /// Maps the pages of a frame from `address` on.
    fn move_in(
        &self,
        shard: usize,
        address: usize,
        page_bytes: usize,
        frame: KernelFrame,
    ) -> Result<(), InstallError<KernelFrame>>;

    /// Takes pages out, as many as possible.
    fn move_out(&self, pages: Pages) -> Result<KernelFrame, DetachError>;
}

impl Moves for KernelSpace {
    fn move_in(
        &self,
        shard: usize,
        address: usize,
        page_bytes: usize,
        frame: KernelFrame,
    ) -> Result<(), InstallError<KernelFrame>> {
        let count = frame.as_ref().len() / page_bytes;
        let moved = self.install(
            pages(shard, address, page_bytes, count),
            PageIn::Move(frame),
        )?;
        assert!(moved.is_none(), "a frame that moved does not come back");
        Ok(())
    }

    fn move_out(&self, pages: Pages) -> Result<KernelFrame, DetachError> {
        self.detach(PageOut::Move(pages)).map(Detached::into_frame)
    }
}

/// Returns the faults that wait in a shard, and the addresses that the program has unmapped.
pub(crate) fn events(space: &KernelSpace, shard: usize) -> Events {
    let mut events = Events::default();
    space
        .events(Shard(shard), EventScope::All, &mut events)
        .unwrap();
    events
}
