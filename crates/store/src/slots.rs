//! [`Arena`]: slots of many sizes carved out of the extents that one server granted.
//!
//! The rule it keeps: no two live slots overlap, and a slot belongs to the block that it was carved from until it is
//! freed. Which server, when to ask it for more, and what is in the slots is left to the [`Pool`](crate::cluster::Pool).
//!
//! An extent is cut into *blocks* by the buddy method (a power of two of [`GRANULE_BYTES`], aligned to its own size). A
//! block serves slots of one size class and goes back, merging with its neighbours, when the last of them is freed. Size
//! classes are multiples of 64 bytes up to 1 KiB and then 16 per power of two, so that at most a 17th of a slot beyond
//! 1 KiB is padding. Allocation looks at one block that is partly used; where there is none it makes one, in a smaller
//! size if space is tight, and in the end takes a slot of a larger class rather than none.
//!
//! One lock per arena is enough: it is held for some tens of nanoseconds per page, against microseconds of hashing
//! and moving it.

use std::collections::BTreeSet;

use crate::entry::PLACE_UNIT;

/// The smallest block.
pub(crate) const GRANULE_BYTES: u64 = 64 << 10;
/// Blocks are at most 1 GiB.
const ORDERS: usize = 15;
/// Up to 2 MiB.
const CLASSES: usize = 192;
/// 64 KiB of 64 bytes.
const BLOCK_SLOTS_MAX: usize = 1024;
const NONE: u32 = u32::MAX;

/// The smallest class whose slots hold `bytes`.
pub(crate) fn class_of(bytes: u32) -> usize {
    let units = u64::from(bytes).div_ceil(PLACE_UNIT).max(1) as usize;
    if units <= 16 {
        return units - 1;
    }
    let octave = (units - 1).ilog2() as usize - 4;
    16 + octave * 16 + (units.div_ceil(1 << octave) - 17)
}

/// How long the slots of a class are.
pub(crate) fn class_bytes(class: usize) -> u64 {
    let units = match class.checked_sub(16) {
        None => class as u64 + 1,
        Some(above) => (above as u64 % 16 + 17) << (above / 16),
    };
    units * PLACE_UNIT
}

/// A slot's extent (index) and offset in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Slot {
    pub(crate) extent: u32,
    pub(crate) offset: u64,
}

/// A block as a page map describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockShape {
    pub(crate) extent: u32,
    pub(crate) granule: u32,
    pub(crate) order: u8,
    pub(crate) class: u8,
}

struct Block {
    shape: BlockShape,
    slots: u16,
    free: u16,
    /// The list of partly used blocks of the class.
    next: u32,
    previous: u32,
    /// A set bit is a free slot.
    bitmap: [u64; BLOCK_SLOTS_MAX / 64],
}

struct Extent {
    bytes: u64,
    granules_used: u32,
    /// The block that each granule belongs to.
    blocks: Vec<u32>,
}

/// The extents of one server.
pub(crate) struct Arena {
    /// By the pool's index; most are other servers'.
    extents: Vec<Option<Extent>>,
    free: [BTreeSet<(u32, u32)>; ORDERS],
    blocks: Vec<Option<Box<Block>>>,
    blocks_vacant: Vec<u32>,
    /// Heads of the lists of partly used blocks.
    partial: [u32; CLASSES],
    /// Bytes of all extents.
    pub(crate) granted_bytes: u64,
    /// Bytes promised to regions.
    pub(crate) reserved_bytes: u64,
}

impl Arena {
    pub(crate) fn new() -> Self {
        Self {
            extents: Vec::new(),
            free: Default::default(),
            blocks: Vec::new(),
            blocks_vacant: Vec::new(),
            partial: [NONE; CLASSES],
            granted_bytes: 0,
            reserved_bytes: 0,
        }
    }

    /// Adds an extent; a tail that is no whole granule stays unused.
    pub(crate) fn add(&mut self, index: u32, bytes: u64) {
        let granules = (bytes / GRANULE_BYTES) as u32;
        if self.extents.len() <= index as usize {
            self.extents.resize_with(index as usize + 1, || None);
        }
        let blocks = vec![NONE; granules as usize];
        self.extents[index as usize] = Some(Extent {
            bytes,
            granules_used: 0,
            blocks,
        });
        self.granted_bytes += bytes;
        let mut at = 0;
        while at < granules {
            let order = (at.trailing_zeros())
                .min((granules - at).ilog2())
                .min(ORDERS as u32 - 1);
            self.free[order as usize].insert((index, at));
            at += 1 << order;
        }
    }

    /// Takes out extents that nothing uses, as long as what was promised stays covered. Their indices and lengths.
    pub(crate) fn take_surplus(&mut self) -> Vec<u32> {
        let mut taken = Vec::new();
        for (index, place) in self.extents.iter_mut().enumerate() {
            if let Some(extent) = place
                && extent.granules_used == 0
                && self.granted_bytes - extent.bytes >= self.reserved_bytes
            {
                self.granted_bytes -= extent.bytes;
                *place = None;
                taken.push(index as u32);
            }
        }
        if !taken.is_empty() {
            for free in &mut self.free {
                free.retain(|(extent, _)| taken.binary_search(extent).is_err());
            }
        }
        taken
    }

    /// A slot for `bytes`, or `None` if no extent has room.
    pub(crate) fn alloc(&mut self, bytes: u32) -> Option<Slot> {
        let class = class_of(bytes);
        if self.partial[class] == NONE && !self.carve(class) {
            // Room in a block of larger slots is better than none.
            let larger = (class + 1..CLASSES).find(|&class| self.partial[class] != NONE)?;
            return Some(self.alloc_in(larger));
        }
        Some(self.alloc_in(class))
    }

    pub(crate) fn free(&mut self, slot: Slot) {
        let (id, bit) = self
            .find(slot)
            .expect("a slot is freed to the arena that it came from");
        let block = self.block(id);
        assert!(
            block.bitmap[bit / 64] & (1 << (bit % 64)) == 0,
            "{slot:?} is freed twice"
        );
        block.bitmap[bit / 64] |= 1 << (bit % 64);
        block.free += 1;
        match block.free {
            free if free == block.slots => {
                // The only slot of a block was taken until now, so the block was not listed.
                if block.slots > 1 {
                    self.unlink(id);
                }
                self.dissolve(id);
            }
            1 => self.link(id),
            _ => {}
        }
    }

    /// A whole block of at least `bytes`, for a page map. It has one slot, so [`free`](Self::free) gives it back.
    pub(crate) fn alloc_block(&mut self, bytes: u32) -> Option<Slot> {
        let order = block_order(bytes);
        let (extent, granule) = self.take(order)?;
        let class = class_of((GRANULE_BYTES << order) as u32) as u8;
        Some(self.whole_block(BlockShape {
            extent,
            granule,
            order,
            class,
        }))
    }

    /// Takes the block that [`alloc_block`](Self::alloc_block) made in another process; false if it is not free.
    pub(crate) fn claim_block(&mut self, slot: Slot, bytes: u32) -> bool {
        let order = block_order(bytes);
        let granule = (slot.offset / GRANULE_BYTES) as u32;
        let class = class_of((GRANULE_BYTES << order) as u32) as u8;
        let shape = BlockShape {
            extent: slot.extent,
            granule,
            order,
            class,
        };
        let claimed = slot.offset.is_multiple_of(GRANULE_BYTES << order) && self.claim(shape);
        if claimed {
            self.whole_block(shape);
        }
        claimed
    }

    /// Makes the block again that another process had, with all its slots free; false if it does not fit.
    pub(crate) fn claim_carved(&mut self, shape: BlockShape) -> bool {
        let fits = (shape.order as usize) < ORDERS
            && (shape.class as usize) < CLASSES
            && class_bytes(shape.class as usize) <= GRANULE_BYTES << shape.order
            && slots_in(shape) <= BLOCK_SLOTS_MAX
            && shape.granule.is_multiple_of(1 << shape.order)
            && self.claim(shape);
        if fits {
            let id = self.insert(shape);
            self.link(id);
        }
        fits
    }

    /// Takes a slot that another process had; false if it is none of the blocks', too short or taken.
    pub(crate) fn claim_slot(&mut self, slot: Slot, bytes: u32) -> bool {
        let Some((id, bit)) = self.find(slot) else {
            return false;
        };
        let block = self.block(id);
        let mask = 1 << (bit % 64);
        let good = block.bitmap[bit / 64] & mask != 0
            && class_bytes(block.shape.class as usize) >= u64::from(bytes);
        if good {
            block.bitmap[bit / 64] &= !mask;
            block.free -= 1;
            if block.free == 0 {
                self.unlink(id);
            }
        }
        good
    }

    /// Gives back the blocks that were claimed and that no slot was claimed in.
    pub(crate) fn dissolve_unused(&mut self) {
        for id in 0..self.blocks.len() {
            if let Some(block) = &self.blocks[id]
                && block.free == block.slots
            {
                self.unlink(id as u32);
                self.dissolve(id as u32);
            }
        }
    }

    /// All blocks.
    pub(crate) fn shapes(&self) -> impl Iterator<Item = BlockShape> {
        self.blocks.iter().flatten().map(|block| block.shape)
    }

    fn alloc_in(&mut self, class: usize) -> Slot {
        let id = self.partial[class];
        let block = self.block(id);
        let word = block
            .bitmap
            .iter()
            .position(|&word| word != 0)
            .expect("a listed block has a free slot");
        let bit = block.bitmap[word].trailing_zeros() as usize;
        block.bitmap[word] &= block.bitmap[word] - 1;
        block.free -= 1;
        let slot = Slot {
            extent: block.shape.extent,
            offset: u64::from(block.shape.granule) * GRANULE_BYTES
                + (word * 64 + bit) as u64 * class_bytes(class),
        };
        if block.free == 0 {
            self.unlink(id);
        }
        slot
    }

    /// Makes a block of free slots: eight to sixteen of them, fewer if space is tight.
    fn carve(&mut self, class: usize) -> bool {
        let bytes = class_bytes(class);
        let least = block_order(bytes as u32);
        let wished = block_order(
            (bytes + 1)
                .next_power_of_two()
                .saturating_mul(8)
                .min(GRANULE_BYTES << (ORDERS - 1)) as u32,
        );
        let Some((order, (extent, granule))) = (least..=wished.max(least))
            .rev()
            .find_map(|order| Some((order, self.take(order)?)))
        else {
            return false;
        };
        let id = self.insert(BlockShape {
            extent,
            granule,
            order,
            class: class as u8,
        });
        self.link(id);
        true
    }

    fn whole_block(&mut self, shape: BlockShape) -> Slot {
        let id = self.insert(shape);
        let block = self.block(id);
        block.bitmap[0] = 0;
        block.free = 0;
        block.slots = 1;
        Slot {
            extent: shape.extent,
            offset: u64::from(shape.granule) * GRANULE_BYTES,
        }
    }

    fn insert(&mut self, shape: BlockShape) -> u32 {
        let slots = slots_in(shape);
        let mut bitmap = [0; BLOCK_SLOTS_MAX / 64];
        for (i, word) in bitmap.iter_mut().enumerate() {
            *word = match slots.saturating_sub(i * 64) {
                0 => 0,
                left if left >= 64 => u64::MAX,
                left => (1 << left) - 1,
            };
        }
        let block = Box::new(Block {
            shape,
            slots: slots as u16,
            free: slots as u16,
            next: NONE,
            previous: NONE,
            bitmap,
        });
        let id = self.blocks_vacant.pop().unwrap_or_else(|| {
            self.blocks.push(None);
            self.blocks.len() as u32 - 1
        });
        self.blocks[id as usize] = Some(block);
        let extent = self.extent(shape.extent);
        extent.granules_used += 1 << shape.order;
        extent.blocks[shape.granule as usize..][..1 << shape.order].fill(id);
        id
    }

    /// Returns a block without live slots, in no list, to the common space.
    fn dissolve(&mut self, id: u32) {
        let shape = self.block(id).shape;
        self.blocks[id as usize] = None;
        self.blocks_vacant.push(id);
        let extent = self.extent(shape.extent);
        extent.granules_used -= 1 << shape.order;
        extent.blocks[shape.granule as usize..][..1 << shape.order].fill(NONE);
        let (mut granule, mut order) = (shape.granule, shape.order as usize);
        while order + 1 < ORDERS && self.free[order].remove(&(shape.extent, granule ^ (1 << order)))
        {
            granule &= !(1 << order);
            order += 1;
        }
        self.free[order].insert((shape.extent, granule));
    }

    /// The lowest free range of an order, split off a larger one if need be.
    fn take(&mut self, order: u8) -> Option<(u32, u32)> {
        let from = (order as usize..ORDERS).find(|&order| !self.free[order].is_empty())?;
        let (extent, granule) = self.free[from].pop_first().expect("the set is not empty");
        for half in (order as usize..from).rev() {
            self.free[half].insert((extent, granule + (1 << half)));
        }
        Some((extent, granule))
    }

    /// Takes exactly this range out of the free space.
    fn claim(&mut self, shape: BlockShape) -> bool {
        let order = shape.order as usize;
        for from in order..ORDERS {
            let base = shape.granule & !((1u32 << from) - 1);
            if self.free[from].remove(&(shape.extent, base)) {
                for half in (order..from).rev() {
                    let base = shape.granule & !((1u32 << half) - 1);
                    self.free[half].insert((shape.extent, base ^ (1 << half)));
                }
                return true;
            }
        }
        false
    }

    /// The block and the number of the slot in it.
    fn find(&self, slot: Slot) -> Option<(u32, usize)> {
        let extent = self.extents.get(slot.extent as usize)?.as_ref()?;
        let id = *extent.blocks.get((slot.offset / GRANULE_BYTES) as usize)?;
        let block = self.blocks.get(id as usize)?.as_ref()?;
        let within = slot.offset - u64::from(block.shape.granule) * GRANULE_BYTES;
        let bytes = class_bytes(block.shape.class as usize);
        let number = (within / bytes) as usize;
        (within.is_multiple_of(bytes) && number < block.slots as usize).then_some((id, number))
    }

    fn block(&mut self, id: u32) -> &mut Block {
        self.blocks[id as usize]
            .as_mut()
            .expect("ids of live blocks are the only ones kept")
    }

    fn extent(&mut self, index: u32) -> &mut Extent {
        self.extents[index as usize]
            .as_mut()
            .expect("an extent with blocks is not given back")
    }

    fn link(&mut self, id: u32) {
        let class = self.block(id).shape.class as usize;
        let head = std::mem::replace(&mut self.partial[class], id);
        let block = self.block(id);
        (block.next, block.previous) = (head, NONE);
        if head != NONE {
            self.block(head).previous = id;
        }
    }

    fn unlink(&mut self, id: u32) {
        let block = self.block(id);
        let class = block.shape.class as usize;
        let (next, previous) = (
            std::mem::replace(&mut block.next, NONE),
            std::mem::replace(&mut block.previous, NONE),
        );
        if next != NONE {
            self.block(next).previous = previous;
        }
        match previous {
            NONE => self.partial[class] = next,
            previous => self.block(previous).next = next,
        }
    }
}

fn slots_in(shape: BlockShape) -> usize {
    ((GRANULE_BYTES << shape.order) / class_bytes(shape.class as usize)) as usize
}

/// The order of the smallest block that holds `bytes`.
fn block_order(bytes: u32) -> u8 {
    u64::from(bytes)
        .div_ceil(GRANULE_BYTES)
        .next_power_of_two()
        .trailing_zeros() as u8
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn classes_hold_what_they_are_for_and_waste_little() {
        for bytes in 1..=2 << 20 {
            let class = class_of(bytes);
            let slot = class_bytes(class);
            assert!(class < CLASSES && slot >= u64::from(bytes), "{bytes}");
            assert!(
                class == 0 || class_bytes(class - 1) < u64::from(bytes),
                "{bytes} fits the class below"
            );
            assert!(
                bytes <= 1024 || slot - u64::from(bytes) <= u64::from(bytes) / 16,
                "{bytes} in {slot}"
            );
        }
        assert_eq!(
            class_bytes(class_of(65536)),
            65536,
            "raw pages waste nothing"
        );
    }

    #[test]
    fn raw_pages_fill_an_extent_to_its_last_granule() {
        for page_bytes in [4096u32, 65536, 2 << 20] {
            let mut arena = Arena::new();
            let bytes = 7 * (2 << 20) + GRANULE_BYTES;
            arena.add(3, bytes);
            let slots = std::iter::from_fn(|| arena.alloc(page_bytes)).count() as u64;
            assert_eq!(slots, bytes / u64::from(page_bytes));
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Alloc(u32),
        AllocBlock(u32),
        Free(prop::sample::Index),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (1u32..70_000).prop_map(Step::Alloc),
            1 => (1u32..1 << 20).prop_map(Step::AllocBlock),
            5 => any::<prop::sample::Index>().prop_map(Step::Free),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn live_slots_never_overlap_and_everything_returns(steps in prop::collection::vec(step(), 1..400)) {
            let mut arena = Arena::new();
            let extents = [(0, 3 << 20), (2, (1 << 20) + 3 * GRANULE_BYTES), (5, GRANULE_BYTES + 100)];
            for (index, bytes) in extents {
                arena.add(index, bytes);
            }
            // Slot -> length.
            let mut live: BTreeMap<Slot, u32> = BTreeMap::new();
            for step in steps {
                match step {
                    Step::Alloc(bytes) | Step::AllocBlock(bytes) => {
                        let slot = match step {
                            Step::Alloc(_) => arena.alloc(bytes),
                            _ => arena.alloc_block(bytes),
                        };
                        let Some(slot) = slot else { continue };
                        let end = slot.offset + u64::from(bytes);
                        let extent = extents.iter().find(|(index, _)| *index == slot.extent).expect("a granted extent").1;
                        prop_assert!(end <= extent && slot.offset.is_multiple_of(PLACE_UNIT));
                        if let Some((below, len)) = live.range(..=slot).next_back() {
                            prop_assert!(below.extent != slot.extent || below.offset + u64::from(*len) <= slot.offset);
                        }
                        if let Some((above, _)) = live.range(slot..).next() {
                            prop_assert!(above.extent != slot.extent || end <= above.offset);
                        }
                        live.insert(slot, bytes);
                    }
                    Step::Free(_) if live.is_empty() => {}
                    Step::Free(index) => {
                        let slot = *index.get(&live.keys().copied().collect::<Vec<_>>());
                        live.remove(&slot);
                        arena.free(slot);
                    }
                }
            }
            prop_assert_eq!(arena.take_surplus().len() < 3, arena.shapes().next().is_some());
            for slot in live.into_keys() {
                arena.free(slot);
            }
            arena.take_surplus();
            prop_assert_eq!((arena.granted_bytes, arena.shapes().count()), (0, 0));
            prop_assert!(arena.free.iter().all(BTreeSet::is_empty));
        }
    }

    /// Pages that are rewritten with other lengths again and again: blocks held against bytes stored.
    #[test]
    fn rewriting_pages_with_changing_lengths_keeps_the_space_compact() {
        for page_bytes in [4096u64, 65536] {
            let mut arena = Arena::new();
            arena.add(0, 1 << 30);
            let mut random = page_bytes;
            let mut slots: Vec<(Slot, u64)> = Vec::new();
            let pages = 4000;
            let mut worst = 0.0f64;
            for i in 0..pages * 10 {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                let bytes = page_bytes / 4 + (random >> 33) % (page_bytes / 2);
                let slot = arena.alloc(bytes as u32).expect("there is room");
                match slots.get_mut(i % pages) {
                    None => slots.push((slot, bytes)),
                    Some(old) => arena.free(std::mem::replace(old, (slot, bytes)).0),
                }
                if (i + 1).is_multiple_of(pages) {
                    let held: u64 = arena
                        .shapes()
                        .map(|shape| GRANULE_BYTES << shape.order)
                        .sum();
                    let stored: u64 = slots.iter().map(|(_, bytes)| bytes).sum();
                    worst = worst.max(held as f64 / stored as f64);
                }
            }
            println!("{page_bytes}-byte pages: blocks hold {worst:.3} times what is stored");
            assert!(worst < 1.25, "{worst}");
        }
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn freeing_twice_is_our_own_mistake() {
        let mut arena = Arena::new();
        arena.add(0, 1 << 20);
        let slot = arena.alloc(4096).expect("there is room");
        arena.alloc(4096);
        arena.free(slot);
        arena.free(slot);
    }
}
