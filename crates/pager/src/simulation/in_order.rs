//! Programs that go through a region in order and serve their own faults.

use super::*;

const PAGE_BYTES: usize = 4096;
const REGION_PAGES: usize = 1024;

/// A region of zeros of which a quarter fits, and its workers.
struct InOrder {
    space: Arc<SimSpace>,
    fillers: Vec<Filler<SimSpace>>,
    evictors: Vec<Evictor<SimSpace>>,
    mapped: MappedRegion<SimSpace>,
}

fn in_order() -> InOrder {
    let space = Arc::new(SimSpace::new(SimOptions::default()));
    let session = SimServer::new(SimConfig::new(1))
        .session(&SessionOptions::default())
        .expect("the simulated server takes sessions");
    let cluster = Cluster::new(vec![session], ClusterOptions::default());
    let mut options = PagerOptions::new((256 * PAGE_BYTES) as u64);
    options.in_thread = INLINE_HANDLERS;
    let PagerParts {
        pager,
        fillers,
        evictors,
    } = Pager::assemble(space.clone(), cluster.clone(), &options).expect("the options are sound");
    let bytes = (REGION_PAGES * PAGE_BYTES) as u64;
    let remote = RemoteOptions::default();
    let store = PageStore::remote(&cluster, "a region", bytes, PAGE_BYTES, &remote)
        .expect("the server has room");
    let mapped = Arc::new(pager)
        .map(store, RegionOptions::default())
        .expect("the budget holds two pages");
    InOrder {
        space,
        fillers,
        evictors,
        mapped,
    }
}

#[test]
fn thread_maps_a_marker_itself_and_asks_for_the_next_window() {
    let InOrder {
        space,
        mut fillers,
        mut evictors,
        mapped,
    } = in_order();
    let mut inline_handlers = InlineHandlers::new(mapped.pager());
    let region = mapped.region().clone();
    let address = |page: usize| region.address_of(PageIndex(page));
    let mut serve = |page: usize| {
        inline_handlers.begin(0, &region, address(page));
        for _ in 0..1000 {
            if inline_handlers.step(0) {
                return;
            }
        }
        panic!("the fault on page {page} does not end");
    };

    (0..2).for_each(&mut serve);
    let rest = |fillers: &mut [Filler<SimSpace>]| {
        for filler in fillers {
            while filler.turn(EventScope::All) || filler.has_work() {}
        }
    };
    let mut markers = 0;
    for page in 2..200 {
        rest(&mut fillers);
        if space.is_present(address(page)) {
            continue;
        }
        let word = region.words.load(PageIndex(page));
        assert_eq!(word.state(), PageState::Filling, "page {page} is held back");
        serve(page);
        assert!(
            space.is_present(address(page)),
            "page {page} needs no filler"
        );
        markers += 1;
    }
    assert!(
        (2..=50).contains(&markers),
        "{markers} markers in 200 pages"
    );
    drop(region);
    close(vec![mapped], &mut fillers, &mut evictors);
}

/// The note of a thread is settled before its page is mapped, which wakes sleepers in the kernel.
#[test]
fn thread_that_waits_for_a_page_of_a_filler_is_woken() {
    let InOrder {
        space,
        mut fillers,
        mut evictors,
        mapped,
    } = in_order();
    let region = mapped.region().clone();
    let page = PageIndex(5);
    let asleep = space.try_load(THREADS - 1, region.address_of(page));
    assert!(matches!(asleep, Err(Faulted::Asleep)));
    let prepared = mapped
        .pager()
        .shared()
        .mapper
        .event_count(&region, page)
        .prepare();
    while !space.is_present(region.address_of(page)) {
        (fillers.iter_mut()).for_each(|filler| _ = filler.turn(EventScope::All));
    }
    let began = Instant::now();
    prepared.sleep(Duration::from_secs(60));
    assert!(began.elapsed() < Duration::from_secs(30), "nobody woke it");
    drop(region);
    close(vec![mapped], &mut fillers, &mut evictors);
}
