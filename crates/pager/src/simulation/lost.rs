//! A page that can neither be written back nor be mapped again: its newest bytes are gone, and the
//! store has older ones.

use super::*;

const PAGE_BYTES: usize = 4096;
const LOST: usize = 3;

/// One region of a few pages over a store that can fail, driven by hand.
struct Tiny {
    space: Arc<SimSpace>,
    fillers: Vec<Filler<SimSpace>>,
    evictors: Vec<Evictor<SimSpace>>,
    store: Arc<Flaky>,
    mapped: ManuallyDrop<MappedRegion<SimSpace>>,
}

impl Tiny {
    fn new() -> Tiny {
        let space = Arc::new(SimSpace::new(SimOptions::default()));
        let cluster = Cluster::new(Vec::new(), ClusterOptions::default());
        let options = PagerOptions::new(16 * PAGE_BYTES as u64);
        let PagerParts {
            pager,
            fillers,
            evictors,
        } = Pager::assemble(space.clone(), cluster.clone(), &options)
            .expect("the options are sound");
        let bytes = 8 * PAGE_BYTES;
        let store = Arc::new(Flaky {
            bytes: Mutex::new(vec![0; bytes]),
            random: Mutex::new(1),
            fail_one_in: AtomicU64::new(0),
        });
        let pages = PageStore::blocking(
            &cluster,
            "a region",
            bytes as u64,
            PAGE_BYTES,
            store.clone(),
            &BlockingOptions::default(),
        )
        .expect("pages of 4096");
        let mapped = Arc::new(pager)
            .map(pages, RegionOptions::default())
            .expect("the budget holds two pages");
        Tiny {
            space,
            fillers,
            evictors,
            store,
            mapped: ManuallyDrop::new(mapped),
        }
    }

    fn address(&self) -> usize {
        self.mapped.address() + LOST * PAGE_BYTES
    }

    fn turn(&mut self) {
        self.fillers
            .iter_mut()
            .for_each(|filler| _ = filler.turn(EventScope::All));
        self.evictors
            .iter_mut()
            .for_each(|evictor| _ = evictor.turn());
    }

    /// Stores or loads the page's first word. Returns it, or the signal that the program gets.
    fn access(&mut self, value: Option<u64>) -> Result<u64, Faulted> {
        for _ in 0..1_000_000 {
            let outcome = match value {
                _ if self.space.is_asleep(0) => Err(Faulted::Asleep),
                Some(value) => (self.space.try_store(0, self.address(), value)).map(|()| value),
                None => self.space.try_load(0, self.address()),
            };
            match outcome {
                Err(Faulted::Asleep) => self.turn(),
                outcome => return outcome,
            }
        }
        panic!("the thread sleeps for ever");
    }

    /// Makes a call that waits for the workers, on a thread of its own.
    fn call<T: Send>(&mut self, call: impl FnOnce(&MappedRegion<SimSpace>) -> T + Send) -> T {
        let Tiny {
            mapped,
            fillers,
            evictors,
            ..
        } = self;
        std::thread::scope(|scope| {
            let caller = scope.spawn(|| call(mapped));
            while !caller.is_finished() {
                fillers
                    .iter_mut()
                    .for_each(|filler| _ = filler.turn(EventScope::All));
                evictors.iter_mut().for_each(|evictor| _ = evictor.turn());
            }
            caller.join().expect("a call does not panic")
        })
    }

    fn fail(&self, fails: bool) {
        (self.store.fail_one_in).store(u64::from(fails), Ordering::Relaxed);
        let at = self.address();
        let refused = fails.then(|| at..at + PAGE_BYTES);
        self.space.refuse_installs(refused);
    }

    fn end(mut self) {
        let mapped = ManuallyDrop::into_inner(self.mapped);
        close(vec![mapped], &mut self.fillers, &mut self.evictors);
    }
}

fn assert_lost<T>(outcome: Result<T, PageError>) {
    match outcome {
        Err(PageError::Lost { page, .. }) => assert_eq!(page, LOST as u64),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("the older bytes were taken for the page"),
    }
}

fn flush(tiny: &mut Tiny) -> Result<(), PageError> {
    tiny.call(|mapped| mapped.flush())
        .map_err(|error| match error {
            crate::FlushError::Page(error) => error,
            other => panic!("{other}"),
        })
}

#[test]
fn a_lost_page_stays_lost_until_it_is_overwritten() {
    let mut tiny = Tiny::new();
    tiny.access(Some(1)).expect("the store works");
    flush(&mut tiny).expect("the store works");
    tiny.access(Some(2)).expect("the page is there");
    let page = LOST * PAGE_BYTES..(LOST + 1) * PAGE_BYTES;

    // The store refuses the page, and the kernel to map it again.
    tiny.fail(true);
    let range = page.clone();
    assert_lost(tiny.call(move |mapped| mapped.advise(range, Advice::DontNeed)));
    // Both work again. The store's copy is older.
    tiny.fail(false);
    let range = page.clone();
    assert_lost(tiny.call(move |mapped| mapped.prefetch_now(range)));
    assert_eq!(tiny.access(None), Err(Faulted::Sigbus));
    assert_lost(flush(&mut tiny));
    // The program takes the poison away.
    assert!(tiny.space.drop_page(tiny.address()));
    assert_eq!(tiny.access(None), Err(Faulted::Sigbus));

    let half = page.start..page.start + PAGE_BYTES / 2;
    assert_lost(tiny.call(move |mapped| mapped.put_lost(half.start, &vec![0; half.len()])));
    assert_eq!(tiny.access(None), Err(Faulted::Sigbus));

    // Once more the page cannot be mapped.
    tiny.fail(true);
    let bytes = vec![7; PAGE_BYTES];
    assert_lost(tiny.call(|mapped| mapped.put_lost(page.start, &bytes)));
    tiny.fail(false);
    tiny.call(|mapped| mapped.put_lost(page.start, &bytes))
        .expect("all of the page is overwritten");
    assert_eq!(tiny.access(None), Ok(u64::from_ne_bytes([7; 8])));
    flush(&mut tiny).expect("nothing is lost any more");
    assert_eq!(tiny.store.bytes.lock()[page], bytes);
    tiny.end();
}

#[test]
fn lost_page_stays_as_it_is_while_the_program_forks() {
    let mut tiny = Tiny::new();
    tiny.access(Some(1)).expect("the store works");
    let page = LOST * PAGE_BYTES..(LOST + 1) * PAGE_BYTES;
    tiny.fail(true);
    let range = page.clone();
    assert_lost(tiny.call(move |mapped| mapped.advise(range, Advice::DontNeed)));
    tiny.fail(false);
    let pager = tiny.mapped.pager().clone();
    let (gate, region) = (&pager.shared().gate, tiny.mapped.region().clone());
    let state = || region.words.load(PageIndex(LOST)).state();

    // The program takes the poison away and touches the page.
    assert!(tiny.space.drop_page(tiny.address()));
    gate.close();
    gate.seal();
    let touched = tiny.space.try_load(0, tiny.address());
    assert_eq!(touched, Err(Faulted::Asleep));
    (0..50).for_each(|_| tiny.turn());
    assert!(tiny.space.is_asleep(0) && !tiny.space.is_present(tiny.address()));
    gate.open(true);
    assert_eq!(tiny.access(None), Err(Faulted::Sigbus));

    // The program overwrites the page.
    gate.close();
    let bytes = vec![7; PAGE_BYTES];
    let waited = tiny.call(|mapped| {
        std::thread::scope(|scope| {
            let put = scope.spawn(|| mapped.put_lost(page.start, &bytes));
            std::thread::sleep(Duration::from_millis(20));
            let waited = !put.is_finished() && state() == PageState::Lost;
            gate.open(false);
            put.join().expect("no panic").expect("all is overwritten");
            waited
        })
    });
    assert!(waited);
    assert_eq!(tiny.access(None), Ok(u64::from_ne_bytes([7; 8])));
    tiny.end();
}
