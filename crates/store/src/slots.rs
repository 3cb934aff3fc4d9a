//! [`Arena`]: slots of many sizes carved out of the extents that one server granted.
//!
//! The rule it keeps: no two live slots overlap, and a slot belongs to the block that it was carved from until it is
//! freed. Which server, when to ask it for more, and what is in the slots is left to the [`Pool`](crate::cluster::Pool).
//!
//! An extent is cut into *blocks* by the buddy method (a power of two of [`GRANULE_BYTES`], aligned to its own size). A
//! block serves slots of one size class and goes back, merging with its neighbours, when the last of them is freed. Size
//! classes are multiples of 64 bytes up to 1 KiB and then 16 per power of two, so that at most a 17th of a slot beyond
//! 1 KiB is padding. Allocation fills up a block that is nearly full; where none is partly used it makes one, in a smaller
//! size if space is tight, and in the end takes a slot of a larger class rather than none.
//!
//! Pages that are written together get slots next to each other ([`Arena::alloc_run`]): in a block with just enough of them in
//! a row if one is seen soon, else in space that no block has, over several blocks if need be, else in pieces. They
//! are slots of ordinary blocks and freed one by one, so that runs fragment the space no more than single pages do.
//! Nothing is moved to make rows: a run that is rewritten in part is in pieces until it is written as a whole.
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
/// Blocks with free slots are listed apart: with one, two or three, four to seven, eight to fifteen, more. The blocks that are
/// nearly full are filled up first, so that others run empty and rows stay long.
const LISTS: usize = 5;
/// Blocks of each list that are looked at for slots in a row: lists are long, and a lock is held.
const LOOK: usize = 4;
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
    /// Which list of its class's blocks it is in, if it is in one.
    listed: Option<usize>,
    next: u32,
    previous: u32,
    /// A set bit is a free slot.
    bitmap: [u64; BLOCK_SLOTS_MAX / 64],
}

impl Block {
    /// The list that it belongs in.
    fn list(&self) -> Option<usize> {
        (self.free > 0).then(|| (self.free.ilog2() as usize).min(LISTS - 1))
    }

    fn slot(&self, number: usize) -> Slot {
        Slot {
            extent: self.shape.extent,
            offset: u64::from(self.shape.granule) * GRANULE_BYTES
                + number as u64 * class_bytes(self.shape.class as usize),
        }
    }

    /// The longest row of free slots: the first one's number, and how many.
    fn longest_row(&self) -> (usize, usize) {
        let (mut best, mut at) = ((0, 0), 0);
        while at < self.slots as usize {
            let word = self.bitmap[at / 64] >> (at % 64);
            if word & 1 == 0 {
                at += (word.trailing_zeros() as usize).min(64 - at % 64);
                continue;
            }
            let from = at;
            while at < self.slots as usize && self.bitmap[at / 64] & (1 << (at % 64)) != 0 {
                at += 1;
            }
            if at - from > best.1 {
                best = (from, at - from);
            }
        }
        best
    }
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
    /// Heads of the lists of blocks with free slots, by how many those are: see [`Block::list`].
    partial: [[u32; LISTS]; CLASSES],
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
            partial: [[NONE; LISTS]; CLASSES],
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
        self.give(index, 0, granules);
    }

    /// Adds granules `from..to` of an extent to the free space. None of them has a free buddy outside.
    fn give(&mut self, extent: u32, from: u32, to: u32) {
        let mut at = from;
        while at < to {
            let order = (at.trailing_zeros())
                .min((to - at).ilog2())
                .min(ORDERS as u32 - 1);
            self.free[order as usize].insert((extent, at));
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
        let mut fullest = self.fullest(class);
        if fullest.is_none() && self.carve(class) {
            fullest = self.fullest(class);
        }
        // Room in a block of larger slots is better than none.
        let id = fullest.or_else(|| (class + 1..CLASSES).find_map(|class| self.fullest(class)))?;
        Some(self.alloc_in(id))
    }

    /// Hands out up to `count` slots for pages of `bytes`, a power of two, as many in a row as possible: fewer if no extent
    /// has room for more.
    pub(crate) fn alloc_run(&mut self, bytes: u32, count: usize, mut each: impl FnMut(Slot)) {
        let class = class_of(bytes);
        let mut wanted = count;
        while wanted > 0 {
            let (id, from, len) = match wanted {
                // One page fills a hole.
                1 => (NONE, 0, 0),
                _ => self.look_for_row(class, wanted),
            };
            let carved = match wanted > len.max(1) {
                true => self.carve_row(class, wanted, len, &mut each),
                false => 0,
            };
            wanted -= match (carved, len) {
                (0, 0) => match self.alloc(bytes) {
                    Some(slot) => {
                        each(slot);
                        1
                    }
                    None => return,
                },
                (0, len) => self.take_row(id, from, len.min(wanted), &mut each),
                _ => carved,
            };
        }
    }

    /// The shortest row of at least `wanted` free slots among those that are looked at, or the longest: the block, where
    /// and how many.
    fn look_for_row(&mut self, class: usize, wanted: usize) -> (u32, usize, usize) {
        let mut best = (NONE, 0, 0);
        let enough = (wanted.ilog2() as usize).min(LISTS - 1);
        for list in (enough..LISTS).chain((0..enough).rev()) {
            let mut id = self.partial[class][list];
            for _ in 0..LOOK {
                if id == NONE {
                    break;
                }
                let block = self.block(id);
                let (from, len) = block.longest_row();
                let better = match best.2 >= wanted {
                    true => (wanted..best.2).contains(&len),
                    false => len > best.2,
                };
                if better {
                    best = (id, from, len);
                }
                id = block.next;
            }
            if best.2 >= wanted {
                break;
            }
        }
        best
    }

    /// Takes up to `wanted` slots in space that no block has, if that gives more than `least` in a row. How many it took.
    fn carve_row(
        &mut self,
        class: usize,
        wanted: usize,
        least: usize,
        each: &mut impl FnMut(Slot),
    ) -> usize {
        let bytes = class_bytes(class);
        let usual = usual_order(class);
        let whole = block_order((wanted as u64 * bytes) as u32).min(ORDERS as u8 - 1);
        let Some((found, (extent, granule))) = (block_order(bytes as u32)..=whole.max(usual))
            .rev()
            .take_while(|&order| ((GRANULE_BYTES << order) / bytes) as usize > least)
            .find_map(|order| Some((order, self.take(order)?)))
        else {
            return 0;
        };
        let (mut at, end) = (granule, granule + (1 << found));
        let order = found.min(usual);
        let mut taken = 0;
        while at < end && taken < wanted {
            let id = self.insert(BlockShape {
                extent,
                granule: at,
                order,
                class: class as u8,
            });
            self.list(id);
            let row = (wanted - taken).min(self.block(id).slots as usize);
            taken += self.take_row(id, 0, row, each);
            at += 1 << order;
        }
        self.give(extent, at, end);
        taken
    }

    /// Takes a slot back.
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
        if block.free == block.slots {
            self.dissolve(id);
        } else {
            self.list(id);
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
            self.list(id);
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
            self.list(id);
        }
        good
    }

    /// Gives back the blocks that were claimed and that no slot was claimed in.
    pub(crate) fn dissolve_unused(&mut self) {
        for id in 0..self.blocks.len() {
            if let Some(block) = &self.blocks[id]
                && block.free == block.slots
            {
                self.dissolve(id as u32);
            }
        }
    }

    /// All blocks.
    pub(crate) fn shapes(&self) -> impl Iterator<Item = BlockShape> {
        self.blocks.iter().flatten().map(|block| block.shape)
    }

    /// A block of the class with free slots, but few of them.
    fn fullest(&self, class: usize) -> Option<u32> {
        (self.partial[class].iter().copied()).find(|&head| head != NONE)
    }

    fn alloc_in(&mut self, id: u32) -> Slot {
        let block = self.block(id);
        let word = block
            .bitmap
            .iter()
            .position(|&word| word != 0)
            .expect("a listed block has a free slot");
        let number = word * 64 + block.bitmap[word].trailing_zeros() as usize;
        let slot = block.slot(number);
        self.take_slots(id, number, 1);
        slot
    }

    fn take_row(&mut self, id: u32, from: usize, len: usize, each: &mut impl FnMut(Slot)) -> usize {
        let block = self.block(id);
        (from..from + len).for_each(|number| each(block.slot(number)));
        self.take_slots(id, from, len);
        len
    }

    fn take_slots(&mut self, id: u32, from: usize, len: usize) {
        let block = self.block(id);
        for number in from..from + len {
            block.bitmap[number / 64] &= !(1 << (number % 64));
        }
        block.free -= len as u16;
        self.list(id);
    }

    /// Makes a block of free slots: eight to sixteen of them, fewer if space is tight.
    fn carve(&mut self, class: usize) -> bool {
        let least = block_order(class_bytes(class) as u32);
        let Some((order, (extent, granule))) = (least..=usual_order(class))
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
        self.list(id);
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
            listed: None,
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

    /// Returns a block without live slots to the common space.
    fn dissolve(&mut self, id: u32) {
        self.unlink(id);
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

    /// Puts a block in the list that it belongs in.
    fn list(&mut self, id: u32) {
        let block = self.block(id);
        let (list, class) = (block.list(), block.shape.class as usize);
        if list == block.listed {
            return;
        }
        self.unlink(id);
        let Some(list) = list else { return };
        let head = std::mem::replace(&mut self.partial[class][list], id);
        let block = self.block(id);
        (block.listed, block.next, block.previous) = (Some(list), head, NONE);
        if head != NONE {
            self.block(head).previous = id;
        }
    }

    /// Takes a block out of its list, if it is in one.
    fn unlink(&mut self, id: u32) {
        let block = self.block(id);
        let class = block.shape.class as usize;
        let Some(list) = block.listed.take() else {
            return;
        };
        let (next, previous) = (block.next, block.previous);
        if next != NONE {
            self.block(next).previous = previous;
        }
        match previous {
            NONE => self.partial[class][list] = next,
            previous => self.block(previous).next = next,
        }
    }
}

fn slots_in(shape: BlockShape) -> usize {
    ((GRANULE_BYTES << shape.order) / class_bytes(shape.class as usize)) as usize
}

/// The order of a block of eight to sixteen slots.
fn usual_order(class: usize) -> u8 {
    let bytes = class_bytes(class);
    let eight = (bytes + 1).next_power_of_two() * 8;
    block_order(eight.min(GRANULE_BYTES << (ORDERS - 1)) as u32).max(block_order(bytes as u32))
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
        AllocRun(u32, usize),
        AllocBlock(u32),
        Free(prop::sample::Index),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (1u32..70_000).prop_map(Step::Alloc),
            3 => (12u32..17, 1usize..40).prop_map(|(bits, count)| Step::AllocRun(1 << bits, count)),
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
                    Step::Alloc(bytes) | Step::AllocRun(bytes, _) | Step::AllocBlock(bytes) => {
                        let mut slots = Vec::new();
                        match step {
                            Step::AllocRun(_, count) => {
                                arena.alloc_run(bytes, count, |slot| slots.push(slot));
                                prop_assert!(slots.len() == count || arena.alloc(bytes).is_none());
                            }
                            Step::Alloc(_) => slots.extend(arena.alloc(bytes)),
                            _ => slots.extend(arena.alloc_block(bytes)),
                        }
                        for slot in slots {
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

    /// Runs of pages that are rewritten with other lengths again and again, some of them raw: blocks held against bytes stored.
    #[test]
    fn rewriting_pages_with_changing_lengths_keeps_the_space_compact() {
        for (page_bytes, run_max, raw_in_ten) in [
            (4096u64, 1, 0),
            (65536, 1, 0),
            (4096, 16, 3),
            (65536, 16, 3),
            (65536, 16, 10),
        ] {
            let mut arena = Arena::new();
            arena.add(0, 1 << 30);
            let mut next = numbers(page_bytes);
            let pages = 4000;
            let mut slots: Vec<Option<(Slot, u64)>> = vec![None; pages];
            let mut worst = 0.0f64;
            for _ in 0..10 {
                let mut from = 0;
                while from < pages {
                    let to = (from + 1 + next(run_max)).min(pages);
                    let (raw, encoded): (Vec<_>, Vec<_>) =
                        (from..to).partition(|_| next(10) < raw_in_ten);
                    let mut new: Vec<_> = alloc_run(&mut arena, page_bytes, raw.len())
                        .into_iter()
                        .map(|slot| (slot, page_bytes))
                        .collect();
                    assert_eq!(new.len(), raw.len(), "there is room");
                    for _ in &encoded {
                        let bytes = page_bytes / 4 + next(page_bytes as usize / 2) as u64;
                        new.push((arena.alloc(bytes as u32).expect("there is room"), bytes));
                    }
                    for (page, new) in raw.into_iter().chain(encoded).zip(new) {
                        if let Some((old, _)) = slots[page].replace(new) {
                            arena.free(old);
                        }
                    }
                    from = to;
                }
                let held: u64 = arena
                    .shapes()
                    .map(|shape| GRANULE_BYTES << shape.order)
                    .sum();
                let stored: u64 = slots.iter().flatten().map(|(_, bytes)| bytes).sum();
                worst = worst.max(held as f64 / stored as f64);
            }
            println!(
                "{page_bytes}-byte pages, {raw_in_ten} in 10 raw: blocks hold {worst:.3} times what is stored"
            );
            assert!(worst < 1.25, "{worst}");
        }
    }

    /// Seeded, and the same on every machine.
    fn numbers(seed: u64) -> impl FnMut(usize) -> usize {
        let mut random = seed;
        move |limit| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % limit
        }
    }

    fn rows(slots: &[Slot], page_bytes: u64) -> usize {
        let behind = |a: &Slot, b: &Slot| a.extent == b.extent && a.offset + page_bytes == b.offset;
        slots.chunk_by(behind).count()
    }

    fn alloc_run(arena: &mut Arena, page_bytes: u64, count: usize) -> Vec<Slot> {
        let mut slots = Vec::new();
        arena.alloc_run(page_bytes as u32, count, |slot| slots.push(slot));
        slots
    }

    #[test]
    fn a_run_is_one_row_where_there_is_room_for_it() {
        for (page_bytes, count) in [
            (4096, 256),
            (4096, 17),
            (65536, 16),
            (65536, 5),
            (65536, 32),
        ] {
            let mut arena = Arena::new();
            arena.add(0, 64 << 20);
            for _ in 0..8 {
                let slots = alloc_run(&mut arena, page_bytes, count);
                assert_eq!((slots.len(), rows(&slots, page_bytes)), (count, 1));
            }
        }
        let mut arena = Arena::new();
        arena.add(0, 1 << 20);
        let all = alloc_run(&mut arena, 65536, 20);
        assert_eq!((all.len(), rows(&all, 65536)), (16, 1), "what there is");
        all.iter().step_by(2).for_each(|slot| arena.free(*slot));
        assert_eq!(alloc_run(&mut arena, 65536, 20).len(), 8, "in pieces");
    }

    /// Neighbouring pages that are written back together, mostly 16 of them, else some in a row.
    #[test]
    fn rewriting_runs_keeps_them_in_rows() {
        let spare = 16 << 20;
        for (page_bytes, whole_in_ten, written_max, read_max) in [
            (4096u64, 9, 1.1, 1.4),
            (65536, 9, 1.1, 1.4),
            (65536, 5, 3.0, 5.0),
        ] {
            let pages = ((256 << 20) / page_bytes) as usize;
            let mut arena = Arena::new();
            arena.add(0, (256 << 20) + spare);
            let mut next = numbers(page_bytes);
            let mut slots = alloc_run(&mut arena, page_bytes, pages);
            let (mut written, mut runs) = (0, 0);
            let rounds = 10 * pages / 16;
            for i in 0..rounds {
                let mut from = next(pages / 16) * 16;
                let mut to = from + 16;
                if next(10) >= whole_in_ten {
                    from += next(16);
                    to = from + 1 + next(to - from);
                }
                let new = alloc_run(&mut arena, page_bytes, to - from);
                assert_eq!(new.len(), to - from, "there is room");
                if i > rounds / 2 {
                    (written, runs) = (written + rows(&new, page_bytes), runs + 1);
                }
                for (old, new) in slots[from..to].iter_mut().zip(new) {
                    arena.free(std::mem::replace(old, new));
                }
            }
            let read: usize = slots.chunks(16).map(|run| rows(run, page_bytes)).sum();
            let (written, read) = (
                written as f64 / runs as f64,
                read as f64 * 16.0 / pages as f64,
            );
            println!(
                "{page_bytes}-byte pages, {whole_in_ten} in 10 whole: {written:.2} rows per run written, {read:.2} per 16 pages read"
            );
            assert!(written < written_max && read < read_max, "{written} {read}");
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
