//! A page that can neither be written back nor be mapped again: its newest bytes are gone, and the
//! store has older ones.

use super::{
    plain::{PAGE_BYTES, Plain},
    *,
};

const LOST: usize = 3;

/// Returns a region of a few pages over a store that can fail.
fn tiny() -> Plain {
    Plain::new(8, 16, RegionOptions::default())
}

impl Plain {
    fn address(&self) -> usize {
        self.mapped().address() + LOST * PAGE_BYTES
    }

    /// Stores or loads the page's first word. Returns it, or the signal that the program gets.
    fn access_lost(&mut self, value: Option<u64>) -> Result<u64, Faulted> {
        self.try_page(LOST, value)
    }

    /// Makes a call that waits for the workers, on a thread of its own.
    fn call<T: Send>(&mut self, call: impl FnOnce(&MappedRegion<SimSpace>) -> T + Send) -> T {
        self.beside(|regions| call(&regions[0]))
    }

    fn fail(&self, fails: bool) {
        self.fail_one_in(u64::from(fails));
        let at = self.address();
        let refused = fails.then(|| at..at + PAGE_BYTES);
        self.space.refuse_installs(refused);
    }
}

fn assert_lost<T>(outcome: Result<T, PageError>) {
    match outcome {
        Err(PageError::Lost { page, .. }) => assert_eq!(page, LOST as u64),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("the older bytes were taken for the page"),
    }
}

fn flush(plain: &mut Plain) -> Result<(), PageError> {
    plain
        .call(|mapped| mapped.flush())
        .map_err(|error| match error {
            crate::FlushError::Page(error) => error,
            other => panic!("{other}"),
        })
}

#[test]
fn a_lost_page_stays_lost_until_it_is_overwritten() {
    let mut plain = tiny();
    plain.access_lost(Some(1)).expect("the store works");
    flush(&mut plain).expect("the store works");
    plain.access_lost(Some(2)).expect("the page is there");
    let page = LOST * PAGE_BYTES..(LOST + 1) * PAGE_BYTES;

    // The store refuses the page, and the kernel to map it again.
    plain.fail(true);
    let range = page.clone();
    assert_lost(plain.call(move |mapped| mapped.advise(range, Advice::DontNeed)));
    // Both work again. The store's copy is older.
    plain.fail(false);
    let range = page.clone();
    assert_lost(plain.call(move |mapped| mapped.prefetch_now(range)));
    assert_eq!(plain.access_lost(None), Err(Faulted::Sigbus));
    assert_lost(flush(&mut plain));
    // The program takes the poison away.
    assert!(plain.space.drop_page(plain.address()));
    assert_eq!(plain.access_lost(None), Err(Faulted::Sigbus));

    let half = page.start..page.start + PAGE_BYTES / 2;
    assert_lost(plain.call(move |mapped| mapped.put_lost(half.start, &vec![0; half.len()])));
    assert_eq!(plain.access_lost(None), Err(Faulted::Sigbus));

    // Once more the page cannot be mapped.
    plain.fail(true);
    let bytes = vec![7; PAGE_BYTES];
    assert_lost(plain.call(|mapped| mapped.put_lost(page.start, &bytes)));
    plain.fail(false);
    plain
        .call(|mapped| mapped.put_lost(page.start, &bytes))
        .expect("all of the page is overwritten");
    assert_eq!(plain.access_lost(None), Ok(u64::from_ne_bytes([7; 8])));
    flush(&mut plain).expect("nothing is lost any more");
    assert_eq!(plain.store.bytes.lock()[page], bytes);
    plain.end();
}

#[test]
fn lost_page_stays_as_it_is_while_the_program_forks() {
    let mut plain = tiny();
    plain.access_lost(Some(1)).expect("the store works");
    let page = LOST * PAGE_BYTES..(LOST + 1) * PAGE_BYTES;
    plain.fail(true);
    let range = page.clone();
    assert_lost(plain.call(move |mapped| mapped.advise(range, Advice::DontNeed)));
    plain.fail(false);
    let pager = plain.pager.clone();
    let (gate, region) = (&pager.shared().gate, plain.region());
    let state = || region.words.load(PageIndex(LOST)).state();

    // The program takes the poison away and touches the page.
    assert!(plain.space.drop_page(plain.address()));
    gate.close();
    gate.seal();
    let touched = plain.space.try_load(0, plain.address());
    assert_eq!(touched, Err(Faulted::Asleep));
    (0..50).for_each(|_| plain.turn());
    assert!(plain.space.is_asleep(0) && !plain.space.is_present(plain.address()));
    gate.open(true);
    assert_eq!(plain.access_lost(None), Err(Faulted::Sigbus));

    // The program overwrites the page.
    gate.close();
    let bytes = vec![7; PAGE_BYTES];
    let waited = plain.call(|mapped| {
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
    assert_eq!(plain.access_lost(None), Ok(u64::from_ne_bytes([7; 8])));
    plain.end();
}
