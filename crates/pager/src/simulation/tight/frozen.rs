//! Freezes that wait: for a store that stalls, and while other calls and faults wait for the thaw.

use std::thread;

use super::*;
use crate::FreezeError;

const PAGE_BYTES: usize = 4096;

#[test]
fn freeze_is_refused_while_a_store_stalls_and_succeeds_afterwards() {
    // More than evictors take out at once.
    const PAGES: usize = 6000;
    let mut sim = tight(1, &[PAGE_BYTES], 8192 * PAGE_BYTES, 64);
    let stalled = sim.add_stalled(PAGES);
    let base = sim.regions[1].address();
    (0..PAGES).for_each(|page| sim.touch(base + page * PAGE_BYTES, true));
    let pager = sim.regions[0].pager().clone();
    let job = Job::new(sim.regions[1].region().clone(), pages_of(0..PAGES), false);
    pager.shared().jobs.add(job.clone());
    (0..10).for_each(|_| sim.turn());
    let short = Duration::from_millis(20);
    match pager.freeze(short) {
        Err(FreezeError::Busy { runs, waited }) => assert!(runs > 0 && waited >= short),
        other => panic!("{other:?}, although pages are on their way out"),
    }
    assert!(!pager.shared().gate.is_closed(), "reclaim goes on");

    stalled.go_on();
    let region = sim.regions[1].region().clone();
    let (left, leaving) = sim.beside(|regions| {
        let mapped = &regions[0];
        let frozen = (mapped.pager().freeze(Duration::from_secs(20))).expect("the store goes on");
        let states = || {
            pages_of(0..PAGES)
                .iter()
                .map(|page| region.words.load(page).state())
        };
        let count = |of: PageState| states().filter(|&state| state == of).count();
        // The workers take turns meanwhile.
        let seen = [(); 20].map(|()| {
            thread::sleep(Duration::from_millis(1));
            (count(PageState::Remote), count(PageState::Leaving))
        });
        drop(frozen);
        assert!(seen.iter().all(|&other| other == seen[0]), "{seen:?}");
        seen[0]
    });
    assert_eq!(leaving, 0);
    println!("{left} of {PAGES} pages had left when the program forked");
    while !job.has_ended() {
        sim.turn();
    }
    sim.end();
}

#[test]
fn calls_that_change_pages_wait_for_the_thaw() {
    let mut sim = tight(1, &[PAGE_BYTES], 256 * PAGE_BYTES, 64);
    let base = sim.regions[0].address();
    (0..8).for_each(|page| sim.touch(base + page * PAGE_BYTES, true));
    let page = |number: usize| number * PAGE_BYTES..(number + 1) * PAGE_BYTES;
    let pager = sim.regions[0].pager().clone();
    let gate = &pager.shared().gate;
    gate.close();
    gate.seal();
    let (waited, unchanged) = sim.beside(|regions| {
        let mapped = &regions[0];
        thread::scope(|scope| {
            let calls = [
                scope.spawn(|| mapped.discard(page(0)).map(drop)),
                scope.spawn(|| mapped.relocate(page(1), page(20).start, |_, _| panic!("it can"))),
                scope.spawn(|| mapped.advise(page(2), Advice::DontNeed)),
            ];
            thread::sleep(Duration::from_millis(50));
            let region = mapped.region();
            let state = |at| region.words.load(PageIndex(at)).state();
            let unchanged = (0..3).all(|at| state(at) == PageState::Resident);
            let waited = calls.iter().all(|call| !call.is_finished());
            gate.open(true);
            mapped.pager().shared().doors.wake_evictors();
            for call in calls {
                call.join().expect("no call panics").expect("nothing fails");
            }
            (waited, unchanged)
        })
    });
    assert!(waited && unchanged);
    let region = sim.regions[0].region().clone();
    assert!(region.store.is_blank(PageIndex(0)) && region.store.is_blank(PageIndex(1)));
    let states = [0, 1, 2, 20].map(|at| sim.state(0, at));
    let gone = PageState::Remote;
    assert_eq!(states, [gone, gone, gone, PageState::Resident]);
    sim.end();
}

/// The program drops a page, and unmaps another one.
#[test]
fn faults_on_pages_that_the_program_took_away_wait_for_the_thaw() {
    let mut sim = tight(1, &[PAGE_BYTES], 256 * PAGE_BYTES, 64);
    let base = sim.regions[0].address();
    let at = |page: usize| base + page * PAGE_BYTES;
    (0..8).for_each(|page| sim.touch(at(page), true));
    sim.beside(|regions| regions[0].flush())
        .expect("the server has room");
    let pager = sim.regions[0].pager().clone();
    let (shared, gate) = (pager.shared(), &pager.shared().gate);
    gate.close();
    gate.seal();
    assert!(sim.space.drop_page(at(3)));
    sim.space.unmap_page(at(5));
    assert!(sim.space.try_load(0, at(3)).is_err());
    (0..50).for_each(|_| sim.turn());
    assert!(sim.space.is_asleep(0));
    assert_eq!(
        [3, 5].map(|page| sim.state(0, page)),
        [PageState::Resident; 2],
        "both are called what they were"
    );
    assert!(
        !shared
            .regions
            .at(at(5))
            .expect("open")
            .store
            .is_blank(PageIndex(5))
    );
    // Other pages come in meanwhile.
    sim.access(1, at(30), None).expect("it comes in");
    gate.open(true);
    while sim.space.is_asleep(0) {
        sim.turn();
    }
    assert_eq!(sim.space.try_load(0, at(3)), Ok(1));
    assert_eq!(sim.state(0, 5), PageState::Poisoned);
    assert!(
        shared
            .regions
            .at(at(5))
            .expect("open")
            .store
            .is_blank(PageIndex(5))
    );
    sim.end();
}

#[test]
fn evictor_with_work_sleeps_until_the_thaw() {
    let mut sim = tight(1, &[PAGE_BYTES], 256 * PAGE_BYTES, 64);
    let base = sim.regions[0].address();
    sim.touch(base, true);
    let region = sim.regions[0].region().clone();
    let pager = sim.regions[0].pager().clone();
    let (shared, gate) = (pager.shared(), &pager.shared().gate);
    let job = Job::new(region, pages_of(0..8), true);
    gate.close();
    shared.jobs.add(job.clone());
    let evictor = &mut sim.evictors[0];
    assert!(!evictor.turn(), "there is nothing that may be done");
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| evictor.sleep());
        thread::sleep(Duration::from_millis(50));
        assert!(!sleeper.is_finished(), "the evictor would spin");
        gate.open(false);
        shared.doors.wake_evictors();
    });
    while !job.has_ended() {
        sim.turn();
    }
    sim.end();
}

#[test]
fn evictor_takes_nothing_out_before_the_thaw() {
    const BUDGET: usize = 256;
    let mut sim = tight(1, &[PAGE_BYTES], BUDGET * PAGE_BYTES, 2 * BUDGET);
    let pager = sim.regions[0].pager().clone();
    let gate = &pager.shared().gate;
    gate.close();
    let base = sim.regions[0].address();
    (0..BUDGET - 2).for_each(|page| sim.touch(base + page * PAGE_BYTES, true));
    let moves = sim.space.moves();
    assert!(!sim.evictors[0].turn() && sim.space.moves() == moves);
    gate.open(false);
    assert!(sim.evictors[0].turn() && sim.space.moves() > moves);
    sim.end();
}

#[test]
fn freeze_lets_reclaim_make_room_first() {
    let sim = tight(1, &[PAGE_BYTES], 256 * PAGE_BYTES, 64);
    let pager = sim.regions[0].pager().clone();
    let freeze = || {
        let since = Instant::now();
        let frozen = pager.freeze(Duration::from_secs(20));
        assert!(frozen.is_ok() && pager.shared().gate.is_sealed());
        drop(frozen);
        assert!(!pager.shared().gate.is_closed() && !pager.shared().gate.is_sealed());
        since.elapsed()
    };
    let budget = pager.shared().frames.budget();
    budget.starve(PAGE_BYTES);
    assert!(
        freeze() >= Duration::from_millis(10),
        "a fill waits for a frame"
    );
    budget.end_starving();
    freeze();
    sim.end();
}
