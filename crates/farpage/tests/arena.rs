//! Arenas: allocations come and go, and leave nothing behind.
//!
//! The rule it keeps: a fresh allocation is zeros, and a live one holds what was written to it.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{env, fs, ops::Range, ptr::NonNull, thread, time::Duration};

use common::{Fabric, Memory, begin, builder, over_fabrics};
use farpage::{Advice, Arena, ArenaError, Codec, FaultMode, RegionOptions, Reserve};
use farpage_testkit::{KIB, MIB, Rng, TestProcess, mix, seed, wait_until};

const PAGE: usize = 16 * KIB;

/// Variable of the environment that is set in a process that runs one test alone.
const ALONE: &str = "FARPAGE_TEST_ALONE";

/// Counts the mappings of this process, and those that lie in the arena.
fn mappings(arena: &Arena) -> (usize, usize) {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let start = |line: &str| usize::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
    let inside = maps.lines().filter(|line| arena.contains(start(line)));
    (maps.lines().count(), inside.count())
}

/// An allocation, with a word at each end of it and in the middle.
struct Block {
    at: NonNull<u8>,
    bytes: usize,
    mark: u64,
}

// SAFETY: whoever has the block uses its memory.
unsafe impl Send for Block {}

impl Block {
    fn new(arena: &Arena, bytes: usize, align: usize, mark: u64) -> Block {
        let at = arena.allocate(bytes, align).unwrap();
        assert!((at.as_ptr() as usize).is_multiple_of(align));
        assert!(arena.usable_bytes(at).unwrap() >= bytes);
        let block = Block { at, bytes, mark };
        for place in block.places() {
            assert_eq!(block.word(place), 0, "fresh memory is zeros");
        }
        block.write();
        block
    }

    /// Allocates a block that may hold bytes of a freed one.
    fn as_it_is(arena: &Arena, bytes: usize, align: usize, mark: u64) -> Block {
        let at = arena.allocate_uninit(bytes, align).unwrap();
        assert!((at.as_ptr() as usize).is_multiple_of(align));
        assert!(arena.usable_bytes(at).unwrap() >= bytes);
        let block = Block { at, bytes, mark };
        block.write();
        block
    }

    fn places(&self) -> [usize; 3] {
        let last = self.bytes / 8 - 1;
        [0, last / 2, last]
    }

    fn word(&self, place: usize) -> u64 {
        // SAFETY: in the block, which is the caller's.
        unsafe { self.at.as_ptr().cast::<u64>().add(place).read() }
    }

    fn write(&self) {
        for place in self.places() {
            // SAFETY: as above.
            unsafe {
                (self.at.as_ptr().cast::<u64>())
                    .add(place)
                    .write(mix(self.mark))
            };
        }
    }

    fn check(&self) {
        for place in self.places() {
            assert_eq!(
                self.word(place),
                mix(self.mark),
                "word {place} of {}",
                self.bytes
            );
        }
    }

    fn free(self, arena: &Arena) {
        self.check();
        // SAFETY: nobody else has the block.
        unsafe { arena.deallocate(self.at) }.unwrap();
    }
}

#[test]
fn hundred_thousand_arrays_leave_nothing_behind() {
    // Runs in a process of its own: other tests map memory, too.
    if env::var_os(ALONE).is_none() {
        return TestProcess::start(&[(ALONE, "1")]).must_pass(Duration::from_secs(180));
    }
    let Some(_watchdog) = begin(180) else { return };
    let seed = seed();
    let memory = Memory::start(Fabric::Shm, 512 * MIB);
    let runtime = memory.runtime(12 * PAGE, PAGE);
    let on_demand = RegionOptions::new()
        .reserve(Reserve::OnDemand)
        .read_ahead(0);
    let arena = runtime.arena_with(256 * MIB, on_demand).unwrap();
    let granted = |memory: &Memory| memory.server.stat().granted_bytes;
    let before = (mappings(&arena), granted(&memory));
    // Most blocks are not touched, so that the test is short.
    let mut live: Vec<Result<Block, NonNull<u8>>> = Vec::new();
    let mut rng = Rng(seed);
    let free = |block| match block {
        Ok(block) => Block::free(block, &arena),
        // SAFETY: nobody else has it.
        Err(at) => unsafe { arena.deallocate(at) }.unwrap(),
    };
    let (mut most, mut most_granted) = (0, 0);
    for number in 0..100_000 {
        if live.len() == 60 {
            free(live.swap_remove(rng.below(60)));
        }
        let bytes = 128 * KIB + rng.below(2 * MIB);
        let align = 1 << rng.below(13);
        live.push(match number % 8 {
            0 => Ok(Block::new(&arena, bytes, align, number)),
            _ => Err(arena.allocate(bytes, align).unwrap()),
        });
        if number % 10_000 == 0 {
            let (all, inside) = mappings(&arena);
            assert_eq!(inside, before.0.1, "no allocation has a mapping of its own");
            (most, most_granted) = (most.max(all), most_granted.max(granted(&memory)));
        }
    }
    assert!(
        most_granted > before.1,
        "pages have left: {}",
        runtime.stats()
    );
    // Threads of the runtime, and extents that servers grant, take some.
    assert!(most <= before.0.0 + 200, "{most} mappings");
    live.into_iter().for_each(free);
    assert_eq!(arena.allocated_bytes(), 0);
    // A fault that is read late may bring a page of zeros in.
    assert!(arena.region().resident_pages() <= 2);
    wait_until("the server has its memory back", || {
        granted(&memory) == before.1
    });
    // The memory is free in one piece, too.
    let all = arena.allocate(256 * MIB, 1).unwrap();
    assert!(matches!(
        arena.allocate(1, 1).unwrap_err(),
        ArenaError::Full {
            longest_bytes: 0,
            ..
        }
    ));
    // SAFETY: nobody else has it.
    unsafe { arena.deallocate(all) }.unwrap();
}

#[test]
fn threads_share_an_arena() {
    let seed = seed();
    over_fabrics(120, 256 * MIB, |memory| {
        let runtime = memory.runtime(2 * MIB, PAGE);
        let arena = runtime.arena(96 * MIB).unwrap();
        thread::scope(|scope| {
            for thread in 0..3 {
                let arena = &arena;
                scope.spawn(move || work(arena, Rng(mix(seed) ^ thread), 600));
            }
        });
        assert_eq!(arena.allocated_bytes(), 0);
        assert!(arena.region().take_error().is_none());
    });
}

/// Freed memory is given out again unzeroed by `allocate_uninit`; other callers get zeros.
#[test]
fn freed_memory_is_kept_for_who_takes_it_as_it_is() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    // Up to 64 pages of the budget may be kept.
    let runtime = memory.runtime(1024 * PAGE, PAGE);
    let alone = RegionOptions::new().read_ahead(0);
    let arena = runtime.arena_with(256 * PAGE, alone).unwrap();
    let free = |at: NonNull<u8>| {
        // SAFETY: nobody else has it.
        unsafe { arena.deallocate(at) }.unwrap();
    };
    let resident = || arena.region().resident_pages();
    // Before the first call of `allocate_uninit`, nothing is kept.
    Block::new(&arena, 10 * PAGE, 1, 1).free(&arena);
    assert_eq!(resident(), 0);

    let made = Block::as_it_is(&arena, 10 * PAGE, 1, 2);
    let at = made.at;
    // A page that is just being brought in might be a lost one, and would not be given out again.
    arena.region().prefetch_now(..10 * PAGE).unwrap();
    assert_eq!(resident(), 10, "the first pages are its own");
    made.free(&arena);
    assert_eq!(arena.allocated_bytes(), 0);
    assert_eq!(arena.usable_bytes(at), None, "it is nobody's");
    let (faults, kept) = (runtime.stats().pager.faults, resident());
    assert!(kept > 0);
    let other = arena.allocate_uninit(11 * PAGE, 1).unwrap();
    assert_ne!(other, at, "another length");
    let again = Block {
        at: arena.allocate_uninit(9 * PAGE + 1, 1).unwrap(),
        bytes: 10 * PAGE,
        mark: 2,
    };
    assert_eq!(again.at, at);
    again.check();
    assert_eq!(runtime.stats().pager.faults, faults, "its pages were there");
    again.free(&arena);
    // `allocate` returns zeros.
    Block::new(&arena, 10 * PAGE, 1, 3).free(&arena);
    free(other);

    // No more pages than allowed are kept, and no large allocation.
    let whole = |pages: usize| {
        let at = arena.allocate_uninit(pages * PAGE, 1).unwrap();
        // SAFETY: it is ours, and has so many bytes.
        unsafe { at.as_ptr().write_bytes(1, pages * PAGE) };
        at
    };
    for _ in 0..3 {
        // A page is counted a moment after it is mapped.
        [0; 12].map(|_| whole(7)).into_iter().for_each(free);
        wait_until("as much is kept as is allowed", || resident() == 9 * 7);
        free(whole(33));
        wait_until("what is large is not kept", || resident() == 9 * 7);
    }
    // Kept pages are room for other allocations when there is no other.
    let all = arena.allocate(256 * PAGE, 1).unwrap();
    assert_eq!(resident(), 0);
    free(all);
}

fn work(arena: &Arena, mut rng: Rng, rounds: u64) {
    let mut live: Vec<Block> = Vec::new();
    for round in 0..rounds {
        match rng.below(4) {
            0 | 1 if live.len() < 12 => {
                let align = 1 << (3 + rng.below(16));
                let make = if round % 3 == 0 {
                    Block::new
                } else {
                    Block::as_it_is
                };
                // Few lengths, so that some come again.
                let bytes = 64 + rng.below(8) * 12 * KIB;
                live.push(make(arena, bytes, align, round));
            }
            2 if !live.is_empty() => {
                let at = rng.below(live.len());
                resize(arena, &mut live[at], 64 + rng.below(2 * MIB));
            }
            _ if !live.is_empty() => {
                let at = rng.below(live.len());
                live.swap_remove(at).free(arena);
            }
            _ => {}
        }
    }
    live.into_iter().for_each(|block| block.free(arena));
}

fn resize(arena: &Arena, block: &mut Block, bytes: usize) {
    block.check();
    // SAFETY: nobody else has the block.
    if unsafe { arena.resize(block.at, bytes) }.unwrap() {
        assert_eq!(block.word(0), mix(block.mark));
        assert!(arena.usable_bytes(block.at).unwrap() >= bytes);
        block.bytes = bytes;
        block.write();
    } else {
        assert!(bytes > block.bytes);
    }
}

#[test]
fn parts_are_released_as_munmap_does() {
    let Some(_watchdog) = begin(120) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let arena = memory.builder(MIB, PAGE).build().unwrap();
    let options = RegionOptions::new().read_ahead(0);
    let arena = arena.arena_with(64 * PAGE, options).unwrap();
    let first = arena.allocate(16 * PAGE, 1).unwrap().as_ptr() as usize;
    let second = arena.allocate(8 * PAGE, 1).unwrap().as_ptr() as usize;
    assert_eq!(second, first + 16 * PAGE, "the lowest address that fits");
    let bytes = |range: Range<usize>| {
        // SAFETY: allocated above, and used by this thread alone.
        unsafe { std::slice::from_raw_parts_mut(range.start as *mut u8, range.len()) }
    };
    bytes(first..second + 8 * PAGE).fill(9);
    // From the middle of a page in the first block to the middle of one in the second.
    let (start, end) = (first + 10 * PAGE + 100, second + 2 * PAGE + 50);
    // SAFETY: nobody uses these bytes any more.
    unsafe { arena.release(start..end) }.unwrap();
    assert_eq!(arena.allocated_bytes(), (11 + 6) * PAGE);
    assert!(bytes(first..start).iter().all(|&byte| byte == 9));
    assert!(
        bytes(start..first + 11 * PAGE)
            .iter()
            .all(|&byte| byte == 0)
    );
    assert!(bytes(second + 2 * PAGE..end).iter().all(|&byte| byte == 0));
    assert!(bytes(end..second + 8 * PAGE).iter().all(|&byte| byte == 9));
    // The released range is the shortest hole by now.
    let third = arena.allocate(7 * PAGE, 1).unwrap();
    assert_eq!(third.as_ptr() as usize, first + 11 * PAGE);
    // SAFETY: nobody uses the arena any more.
    unsafe { arena.release(arena.addresses()) }.unwrap();
    assert_eq!(
        (arena.allocated_bytes(), arena.region().resident_pages()),
        (0, 0)
    );
}

#[test]
fn pages_are_claimed_while_they_are_free() {
    let Some(_watchdog) = begin(120) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let arena = memory.builder(MIB, PAGE).build().unwrap();
    let arena = arena.arena(64 * PAGE).unwrap();
    let base = arena.addresses().start;
    let pages = |pages: Range<usize>| base + pages.start * PAGE..base + pages.end * PAGE;
    let block = arena.allocate(4 * PAGE, 1).unwrap();
    assert_eq!(
        block.as_ptr() as usize,
        base,
        "the lowest address that fits"
    );
    assert!(arena.claim(pages(8..10)) && !arena.claim(pages(8..10)));
    assert!(!arena.claim(pages(3..5)) && !arena.claim(pages(9..11)) && arena.claim(pages(62..64)));
    assert_eq!(arena.allocated_bytes(), 8 * PAGE);
    assert!(arena.has_room(52 * PAGE) && !arena.has_room(53 * PAGE));
    // SAFETY: nobody has used it.
    unsafe { arena.release(pages(9..10)) }.unwrap();
    assert!(arena.claim(pages(9..10)));
    // Freed memory that is kept for the next allocation is free as well.
    let kept = arena.allocate_uninit(PAGE, 1).unwrap();
    let at = (kept.as_ptr() as usize - base) / PAGE;
    // SAFETY: nobody uses it any more.
    unsafe { arena.deallocate(kept) }.unwrap();
    assert!(arena.claim(pages(at..at + 1)));
}

#[test]
fn ceded_pages_keep_their_bytes_or_not_and_are_zeros_when_regained() {
    let Some(_watchdog) = begin(120) else { return };
    for mode in [FaultMode::Filler, FaultMode::InThread] {
        let memory = Memory::start(Fabric::Shm, 64 * MIB);
        let builder = memory.builder(MIB, PAGE).fault_mode(mode);
        let arena = builder.build().unwrap().arena(512 * PAGE).unwrap();
        let block = arena.allocate(256 * PAGE, 1).unwrap().as_ptr() as usize;
        let bytes = |range: Range<usize>| {
            let (at, len) = (block + range.start * PAGE, range.len() * PAGE);
            // SAFETY: allocated above, and used by this thread alone.
            unsafe { std::slice::from_raw_parts_mut(at as *mut u8, len) }
        };
        let holds = |pages: Range<usize>, byte| bytes(pages).iter().all(|&seen| seen == byte);
        // Four budgets: the first pages are remote, the last are local.
        bytes(0..256).fill(9);
        let ceded = [3, 130, 254];
        for page in ceded {
            arena.cede_with_bytes(block + page * PAGE).unwrap();
            assert!(holds(page..page + 1, 9));
            bytes(page..page + 1).fill(7);
        }
        let barred = 40..60;
        let addresses = block + barred.start * PAGE..block + barred.end * PAGE;
        // SAFETY: no reference to these bytes is left.
        unsafe { arena.cede(addresses.clone()) }.unwrap();
        // All else leaves and comes back meanwhile.
        for turn in [1, 9] {
            bytes(61..130).fill(turn);
            bytes(131..254).fill(turn);
        }
        for page in ceded {
            assert!(holds(page..page + 1, 7), "page {page} is the program's");
        }
        // SAFETY: nobody uses these bytes any more.
        unsafe {
            arena.regain(addresses).unwrap();
            for page in ceded {
                let start = block + page * PAGE;
                arena.regain(start..start + PAGE).unwrap();
            }
        }
        assert!(holds(barred.clone(), 0) && holds(3..4, 0) && holds(130..131, 0));
        bytes(barred.clone()).fill(5);
        bytes(61..254).fill(6);
        assert!(holds(barred, 5) && holds(0..3, 9) && holds(4..40, 9) && holds(61..254, 6));
    }
}

/// A block beside a vector that grows and shrinks with it. Both hold the same bytes.
struct Grown {
    at: NonNull<u8>,
    shadow: Vec<u8>,
}

// SAFETY: whoever has the block uses its memory.
unsafe impl Send for Grown {}

impl Grown {
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this length, and the caller's alone.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.shadow.len()) }
    }

    fn write(&mut self, rng: &mut Rng) {
        for _ in 0..1 + rng.below(40) {
            let (at, value) = (rng.below(self.shadow.len()), rng.next() as u8);
            let end = (at + rng.below(300)).min(self.shadow.len());
            self.bytes()[at..end].fill(value);
            self.shadow[at..end].fill(value);
        }
    }

    fn check(&mut self, seed: u64) {
        let shadow = std::mem::take(&mut self.shadow);
        // SAFETY: as above.
        let ours = unsafe { std::slice::from_raw_parts(self.at.as_ptr(), shadow.len()) };
        let wrong = ours.iter().zip(&shadow).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "seed {seed}: of {} bytes", shadow.len());
        self.shadow = shadow;
    }
}

/// Blocks of several threads grow, shrink and move in a fraction of their memory, beside vectors
/// with the same bytes. `realloc` promises nothing of added bytes of the old last page: the test
/// writes it.
#[test]
fn reallocated_blocks_hold_what_a_naive_copy_would() {
    let Some(_watchdog) = begin(240) else { return };
    let seed = seed();
    for (page, in_thread, codec) in [
        (4 * KIB, false, Codec::Raw),
        (16 * KIB, false, Codec::Lz4),
        (4 * KIB, true, Codec::Raw),
        (64 * KIB, false, Codec::Raw),
    ] {
        let memory = Memory::start(Fabric::Shm, 512 * MIB);
        let mode = if in_thread {
            FaultMode::InThread
        } else {
            FaultMode::Filler
        };
        let builder = builder(40 * page, page).fault_mode(mode).codec(codec);
        let runtime = builder.server(&memory.url).build().unwrap();
        let arena = runtime.arena(4000 * page).unwrap();
        thread::scope(|scope| {
            for thread in 0..3 {
                let arena = &arena;
                scope.spawn(move || grow(arena, seed, Rng(mix(seed ^ thread)), page));
            }
        });
        assert!(arena.region().take_error().is_none());
        assert_eq!(arena.allocated_bytes(), 0);
        println!("{page} {in_thread}: {}", runtime.stats());
    }
}

fn grow(arena: &Arena, seed: u64, mut rng: Rng, page: usize) {
    let mut blocks: Vec<Grown> = Vec::new();
    for _ in 0..300 {
        let bytes = 1 + rng.below(60 * page);
        if blocks.len() < 6 {
            let at = arena.allocate(bytes, 1).unwrap();
            let shadow = vec![0; bytes];
            blocks.push(Grown { at, shadow });
        }
        let at = rng.below(blocks.len());
        let block = &mut blocks[at];
        match rng.below(8) {
            0 => {
                let block = blocks.swap_remove(at);
                // SAFETY: nobody else has it.
                unsafe { arena.deallocate(block.at) }.unwrap();
            }
            1..=3 => block.write(&mut rng),
            4 => block.check(seed),
            // Read-ahead is asked for pages that move.
            5 => {
                let offset = block.at.as_ptr() as usize - arena.addresses().start;
                let expected = offset..offset + block.shadow.len();
                arena.region().advise(expected, Advice::WillNeed).unwrap();
            }
            _ => {
                let align = [1, page, 4 * page][rng.below(3)];
                // SAFETY: nobody else has it.
                block.at = unsafe { arena.reallocate(block.at, bytes, align) }.unwrap();
                assert!((block.at.as_ptr() as usize).is_multiple_of(align));
                let before = block.shadow.len();
                block.shadow.resize(bytes, 0);
                let page_end = before
                    .next_multiple_of(page)
                    .min(bytes)
                    .max(before.min(bytes));
                if before < page_end {
                    block.bytes()[before..page_end].fill(0);
                }
                block.check(seed);
            }
        }
    }
    for mut block in blocks {
        block.check(seed);
        // SAFETY: nobody else has it.
        unsafe { arena.deallocate(block.at) }.unwrap();
    }
}

#[test]
fn pages_move_at_once_to_where_pages_are_pinned() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    // A page that waited would wait for the deadline, and trip the watchdog.
    let builder = builder(20 * PAGE, PAGE).deadline(Duration::from_secs(3600));
    let runtime = builder.server(&memory.url).build().unwrap();
    let arena = runtime.arena(100 * PAGE).unwrap();
    let start = arena.addresses().start;
    let [from, to] = [10, 50].map(|pages| arena.allocate(pages * PAGE, 1).unwrap());
    // SAFETY: allocated above, and used by this thread alone.
    unsafe { from.as_ptr().write_bytes(7, 10 * PAGE) };
    let offset = to.as_ptr() as usize - start;
    arena.region().pin(offset..offset + 4 * PAGE).unwrap();
    let (from, to) = (from.as_ptr() as usize, to.as_ptr() as usize);
    // SAFETY: as above.
    unsafe { arena.relocate(from..from + 10 * PAGE, to) }.unwrap();
    // SAFETY: as above.
    let bytes = unsafe { std::slice::from_raw_parts(to as *const u8, 10 * PAGE) };
    assert!(bytes.iter().all(|&byte| byte == 7));
    arena.region().unpin(offset..offset + 4 * PAGE);
}

/// Changed pages of in-thread faults wait for an evictor, which is not called for each of them.
#[test]
fn pages_that_were_handed_over_are_given_up_and_move_at_once() {
    let Some(_watchdog) = begin(120) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    // A page that waited for an evictor would wait for the deadline, and trip the watchdog.
    let builder = builder(200 * PAGE, PAGE).deadline(Duration::from_secs(3600));
    let builder = builder.fault_mode(FaultMode::InThread);
    let runtime = builder.server(&memory.url).build().unwrap();
    let options = RegionOptions::new().read_ahead(0);
    let arena = runtime.arena_with(1000 * PAGE, options).unwrap();
    for round in 0..20 {
        // The number of pages that wait at the end varies.
        let pages = 201 + 7 * round;
        let block = arena.allocate(pages * PAGE, 1).unwrap();
        let behind = arena.allocate(PAGE, 1).unwrap();
        // SAFETY: allocated above, and used by this thread alone.
        unsafe { block.as_ptr().write_bytes(7, pages * PAGE) };
        let block = match round % 2 {
            0 => block,
            // SAFETY: as above.
            _ => unsafe { arena.reallocate(block, (pages + 1) * PAGE, 1) }.unwrap(),
        };
        for block in [block, behind] {
            // SAFETY: nobody uses it any more.
            unsafe { arena.deallocate(block) }.unwrap();
        }
    }
}

#[test]
fn block_that_moves_brings_nothing_in_and_writes_nothing_back() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 256 * MIB);
    let runtime = memory.builder(20 * PAGE, PAGE).build().unwrap();
    let options = RegionOptions::new().read_ahead(0);
    let arena = runtime.arena_with(2000 * PAGE, options).unwrap();
    let mut block = arena.allocate(300 * PAGE, 1).unwrap();
    let word = |block: NonNull<u8>, page: usize| {
        // SAFETY: allocated above, and used by this thread alone.
        unsafe { &mut *block.as_ptr().add(page * PAGE + 8).cast::<u64>() }
    };
    (0..300).for_each(|page| *word(block, page) = mix(page as u64));
    let behind = arena.allocate(PAGE, 1).unwrap();
    // The program goes on before its last fault is counted.
    wait_until("all fills are counted", || {
        runtime.stats().pager.fills >= 300
    });
    let before = runtime.stats();
    let resident = arena.region().resident_pages();
    // SAFETY: nobody else has it.
    let moved = unsafe { arena.reallocate(block, 400 * PAGE, 1) }.unwrap();
    assert_ne!(moved, block, "something lies behind it");
    block = moved;
    let after = runtime.stats();
    assert_eq!(after.pager.fills, before.pager.fills);
    assert_eq!(after.store.bytes_read, before.store.bytes_read);
    let written = after.store.bytes_written - before.store.bytes_written;
    // Evictors may still have had work to do.
    assert!(written <= 20 * PAGE as u64, "{written} bytes written");
    assert!(
        arena.region().resident_pages() + 8 >= resident,
        "what was here is here"
    );
    (0..300).for_each(|page| assert_eq!(*word(block, page), mix(page as u64)));
    (300..400).for_each(|page| assert_eq!(*word(block, page), 0));
    // The block has room behind it from now on.
    // SAFETY: no other code has the block.
    assert_eq!(unsafe { arena.reallocate(block, 900 * PAGE, 1) }, Ok(block));
    // Nothing is left at its old address.
    let hole = arena.allocate(300 * PAGE, 1).unwrap();
    assert!(hole < behind);
    (0..300).for_each(|page| assert_eq!(*word(hole, page), 0));
}
