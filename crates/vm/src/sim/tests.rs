//! Behaviour of the simulated space where it matters to a pager.

use super::*;
use crate::space::{Frame, InstallErrorKind, PageFault};

const GEOMETRY: Geometry = Geometry {
    bytes: 4 * 4096,
    page_bytes: 4096,
    stripe_bytes: 4096,
    first_shard: 0,
    address: None,
    read_only: false,
    no_direct_io: false,
    ordinary: false,
};

/// Returns `count` pages of 4 KiB.
fn pages(shard: usize, address: usize, count: usize) -> Pages {
    Pages::new(Shard(shard), address, 4096, count)
}

fn install(space: &SimSpace, pages: Pages, frame: SimFrame) -> Result<(), InstallError<SimFrame>> {
    space.install(pages, PageIn::Move(frame)).map(drop)
}

fn detach(space: &SimSpace, pages: Pages) -> Result<SimFrame, DetachError> {
    space.detach(PageOut::Move(pages)).map(Detached::into_frame)
}

fn faults(space: &SimSpace, shard: usize) -> Vec<PageFault> {
    let mut out = Events::default();
    space
        .events(Shard(shard), EventScope::All, &mut out)
        .unwrap();
    out.faults
}

#[test]
fn absent_page_puts_its_thread_to_sleep_until_installed() {
    let space = SimSpace::new(SimOptions {
        shards: 2,
        ..SimOptions::default()
    });
    let base = space.map(GEOMETRY).unwrap().address;
    assert_eq!(space.try_store(7, base + 4096 + 8, 5), Err(Faulted::Asleep));
    assert!(space.is_asleep(7));
    assert_eq!(faults(&space, 0), []);
    assert_eq!(
        faults(&space, 1),
        [PageFault {
            address: base + 4096 + 8,
            write: true,
            protected: false,
            thread: 0,
        }]
    );
    install(
        &space,
        pages(1, base + 4096, 1),
        space.new_frame(4096, 1).unwrap(),
    )
    .unwrap();
    assert!(!space.is_asleep(7));
    assert_eq!(space.try_store(7, base + 4096 + 8, 5), Ok(()));
    let frame = detach(&space, pages(1, base + 4096, 1)).unwrap();
    assert_eq!(frame.as_ref()[8], 5);
    assert_eq!((space.frame_pages(), space.resident_pages()), (1, 0));
    drop(frame);
    assert_eq!(space.frame_pages(), 0);
}

#[test]
fn fault_ended_before_it_is_read_is_not_reported() {
    let space = SimSpace::new(SimOptions::default());
    let base = space.map(GEOMETRY).unwrap().address;
    assert_eq!(space.try_load(1, base), Err(Faulted::Asleep));
    install(&space, pages(0, base, 1), space.new_frame(4096, 1).unwrap()).unwrap();
    assert_eq!(faults(&space, 0), []);
}

#[test]
fn poison_is_sigbus_and_install_heals_it() {
    let space = SimSpace::new(SimOptions::default());
    let base = space.map(GEOMETRY).unwrap().address;
    space.poison(pages(0, base, 1)).unwrap();
    assert_eq!(space.try_load(1, base), Err(Faulted::Sigbus));
    install(&space, pages(0, base, 1), space.new_frame(4096, 1).unwrap()).unwrap();
    assert_eq!(space.try_load(1, base), Ok(0));
}

#[test]
fn injected_faults_happen() {
    let space = SimSpace::new(SimOptions {
        busy_probability: 1.0,
        duplicate_probability: 1.0,
        ..SimOptions::default()
    });
    let base = space.map(GEOMETRY).unwrap().address;
    assert_eq!(space.try_load(1, base), Err(Faulted::Asleep));
    assert_eq!(faults(&space, 0).len(), 2);
    install(&space, pages(0, base, 1), space.new_frame(4096, 1).unwrap()).unwrap();
    assert!(matches!(
        detach(&space, pages(0, base, 1)),
        Err(DetachError::Busy)
    ));
    assert!(space.drop_page(base));
    assert!(matches!(
        detach(&space, pages(0, base, 1)),
        Err(DetachError::Absent)
    ));
}

#[test]
fn second_install_and_unmap_wake_the_sleeper() {
    let space = SimSpace::new(SimOptions::default());
    let base = space.map(GEOMETRY).unwrap().address;
    install(&space, pages(0, base, 1), space.new_frame(4096, 1).unwrap()).unwrap();
    let again = install(&space, pages(0, base, 1), space.new_frame(4096, 1).unwrap());
    assert!(matches!(
        again,
        Err(InstallError {
            kind: InstallErrorKind::Exists,
            ..
        })
    ));
    assert_eq!(space.try_load(1, base + 4096), Err(Faulted::Asleep));
    space.unmap(base, GEOMETRY);
    assert_eq!(space.try_load(1, base + 4096), Err(Faulted::Sigsegv));
}

#[test]
fn run_goes_in_and_out_as_far_as_its_pages_can() {
    let space = SimSpace::new(SimOptions::default());
    let geometry = Geometry {
        stripe_bytes: GEOMETRY.bytes,
        ..GEOMETRY
    };
    let base = space.map(geometry).unwrap().address;
    install(
        &space,
        pages(0, base + 2 * 4096, 1),
        space.new_frame(4096, 1).unwrap(),
    )
    .unwrap();
    assert_eq!(space.try_load(1, base + 4096), Err(Faulted::Asleep));
    assert_eq!(space.try_load(2, base + 3 * 4096), Err(Faulted::Asleep));
    let mut frame = space.new_frame(4096, 5).unwrap();
    let behind = frame.split_off(4 * 4096);
    for (number, page) in (1..).zip(frame.as_mut().chunks_mut(4096)) {
        page.fill(number);
    }
    let mut error = install(&space, pages(0, base, 4), frame).unwrap_err();
    assert!(matches!(error.kind, InstallErrorKind::Exists));
    assert_eq!(error.frame.as_ref()[0], 3);
    error.frame.join(behind).unwrap();
    assert_eq!(
        (error.frame.as_ref().len(), space.frame_pages()),
        (3 * 4096, 3)
    );
    assert!(!space.is_asleep(1) && space.is_asleep(2));
    space.drop_page(base + 2 * 4096);
    let mut first = detach(&space, pages(0, base, 4)).unwrap();
    assert_eq!(first.as_ref().len(), 2 * 4096);
    let second = first.split_off(4096);
    let rest = first.join(error.frame).unwrap_err();
    first.join(second).unwrap();
    assert_eq!((first.as_ref()[4095], first.as_ref()[4096]), (1, 2));
    drop(rest);
    assert_eq!((space.frame_pages(), space.resident_pages()), (2, 0));
    drop(first);
    assert_eq!(space.frame_pages(), 0);
}
