//! Regions that begin as ordinary memory.

use std::slice;

use super::*;

/// Puts a world's region under paging whose pages in `used` may be there, while everything else
/// goes on.
fn begin_paging(world: &mut World, used: &[PageRange]) {
    let region = world.region();
    let begin = region.beginning.begin().expect("it is ordinary memory");
    let guard = region.enter().expect("the region is not closing");
    let mut rest = (world.mapped().catch(used, &[])).expect("the space does not refuse");
    while let Some(pages) = rest.first_mut() {
        for _ in 0..world.below(40) {
            world.step();
        }
        let some = pages.start.and_on(1 + world.below(4)).within(*pages);
        pages.start = some.end;
        world.mapped().adopt(&guard, some);
        rest.retain(|pages| !pages.is_empty());
    }
    world.mapped().end_adoption();
    begin.begun();
}

#[test]
fn words_survive_the_beginning_of_paging() {
    for seed in seeds(0..150) {
        let options = RegionOptions {
            ordinary: true,
            ..RegionOptions::default()
        };
        let mut world = World::with(seed, false, options);
        // Two ranges with free pages between and around them, together as long as the budget.
        let (budget_pages, first) = (world.budget_pages, world.below(8));
        let cut = first + world.below(budget_pages) + 1;
        let gap = world.below(8);
        let end = first + world.budget_pages + gap;
        let allocated = [first..cut.min(end - gap), cut.min(end - gap) + gap..end];
        world.unused = vec![
            0..allocated[0].start,
            allocated[0].end..allocated[1].start,
            end..PAGES,
        ];
        let words = world.page_bytes / 8;
        // Touched in part, and by nobody who asks for pages.
        for _ in 0..world.below(400) {
            let page = world.below(PAGES);
            if allocated.iter().any(|pages| pages.contains(&page)) {
                let word = page * words + world.below(words);
                let (address, value) =
                    (world.mapped().address() + word * 8, next(&mut world.random));
                (world.space.try_store(0, address, value)).expect("no touch is a fault");
                world.shadow[word] = value;
            }
        }
        // A stray touch of a page that is nobody's is forgotten.
        let stray = (world.unused.iter()).find_map(|pages| pages.clone().next());
        let there = world.space.resident_pages();
        if let Some(page) = stray.filter(|_| there < world.budget_pages) {
            let address = world.mapped().address() + page * world.page_bytes;
            (world.space.try_store(0, address, 1)).expect("no touch is a fault");
        }
        // The program has some pages for itself.
        let page = allocated[0].start;
        let ceded = page..page + world.below(allocated[0].len() + 1);
        for page in ceded.clone() {
            let ceded = world.mapped().cede_with_bytes(page * world.page_bytes);
            ceded.expect("the space does not refuse");
        }
        let used = allocated.map(pages_of);
        begin_paging(&mut world, &used);
        let budget = world.mapped().pager().shared().frames.budget();
        assert!(budget.peak() <= budget.bytes(), "seed {seed}");
        world.unused.clear();
        for _ in 0..2000 {
            world.step();
        }
        for page in ceded.clone() {
            let word = world.mapped().region().words.load(PageIndex(page));
            let is_left_alone = matches!(word.state(), PageState::Poisoned | PageState::Filling);
            assert!(is_left_alone, "seed {seed}: page {page} is ceded");
        }
        world.regain(ceded);
        for _ in 0..500 {
            world.step();
        }
        world.end();
    }
}

/// The kernel may refuse, for lack of mappings: threads that have faulted meanwhile go on.
#[test]
fn region_stays_ordinary_where_its_faults_cannot_be_caught() {
    let options = RegionOptions {
        ordinary: true,
        ..RegionOptions::default()
    };
    let mut world = World::with(7, false, options);
    let address = world.mapped().address();
    world
        .space
        .try_store(0, address, 5)
        .expect("no touch is a fault");
    world.shadow[0] = 5;
    world.space.refuse_installs(Some(0..1));
    let bytes = 0..2 * world.page_bytes;
    let refused = world.mapped().begin_paging(slice::from_ref(&bytes), &[]);
    assert!(refused.is_err() && world.mapped().is_ordinary());
    assert!(!world.mapped().region().beginning.catches_faults());
    let budget = world.mapped().pager().shared().frames.budget();
    assert_eq!((budget.used(), budget.free()), (0, 0));
    let other = address + world.page_bytes;
    world
        .space
        .try_store(0, other, 6)
        .expect("no touch is a fault");
    world.shadow[world.page_bytes / 8] = 6;
    world.space.refuse_installs(None);
    assert!(
        world
            .mapped()
            .begin_paging(&[bytes], &[])
            .expect("nothing refuses")
    );
    assert_eq!(world.mapped().resident_pages(), 2);
    world.end();
}
