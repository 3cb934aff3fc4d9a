//! Programs that go through a region in order and serve their own faults.

use super::*;

const PAGE_BYTES: usize = 4096;
const REGION_PAGES: usize = 1024;

/// Returns a region of zeros of which a quarter fits.
fn in_order() -> Sim {
    let mut options = PagerOptions::new((256 * PAGE_BYTES) as u64);
    options.in_thread = INLINE_HANDLERS;
    let mut sim = Sim::new(1, SimOptions::default(), SimConfig::new(1), &options);
    sim.map(
        REGION_PAGES,
        PAGE_BYTES,
        Codec::Raw,
        RegionOptions::default(),
    );
    sim
}

#[test]
fn thread_maps_a_marker_itself_and_asks_for_the_next_window() {
    let mut sim = in_order();
    let region = sim.region();
    let address = |page: usize| region.address_of(PageIndex(page));
    let serve = |sim: &mut Sim, page: usize| {
        sim.inline_handlers.begin(0, &region, address(page));
        for _ in 0..1000 {
            if sim.inline_handlers.step(0) {
                return;
            }
        }
        panic!("the fault on page {page} does not end");
    };

    (0..2).for_each(|page| serve(&mut sim, page));
    let rest = |fillers: &mut [Filler<SimSpace>]| {
        for filler in fillers {
            while filler.turn(EventScope::All) || filler.has_work() {}
        }
    };
    let mut markers = 0;
    for page in 2..200 {
        rest(&mut sim.fillers);
        if sim.space.is_present(address(page)) {
            continue;
        }
        let word = region.words.load(PageIndex(page));
        assert_eq!(word.state(), PageState::Filling, "page {page} is held back");
        serve(&mut sim, page);
        assert!(
            sim.space.is_present(address(page)),
            "page {page} needs no filler"
        );
        markers += 1;
    }
    assert!(
        (2..=50).contains(&markers),
        "{markers} markers in 200 pages"
    );
    drop(region);
    sim.end();
}

/// The note of a thread is settled before its page is mapped, which wakes sleepers in the kernel.
#[test]
fn thread_that_waits_for_a_page_of_a_filler_is_woken() {
    let mut sim = in_order();
    let region = sim.region();
    let page = PageIndex(5);
    let asleep = sim.space.try_load(THREADS - 1, region.address_of(page));
    assert!(matches!(asleep, Err(Faulted::Asleep)));
    let shared = sim.shared();
    let prepared = shared.mapper.event_count(&region, page).prepare();
    while !sim.space.is_present(region.address_of(page)) {
        sim.turn();
    }
    let began = Instant::now();
    prepared.sleep(Duration::from_secs(60));
    assert!(began.elapsed() < Duration::from_secs(30), "nobody woke it");
    drop((region, shared));
    sim.end();
}
