//! Memory of extents, as its lessees and the kernel see it.

use std::{
    fs::File,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    sync::mpsc,
    thread,
    time::Duration,
};

use farpage_wire::segment::{SEGMENT_BYTES, SegmentWord};
use memmap2::{MmapOptions, MmapRaw};
use nix::unistd::ftruncate;

use super::*;

fn extent(bytes: u64) -> Arc<ExtentMemory> {
    ExtentMemory::create(ExtentId(1), bytes, true).expect("a memfd")
}

#[test]
fn fresh_memory_is_zero_and_not_backed_until_written() {
    let memory = extent(1 << 20);
    let mut bytes = vec![1; 1 << 20];
    assert_eq!(memory.resident_bytes(), 0);
    memory.copy_in(4096, b"farpage").expect("in range");
    memory.copy_out(0, &mut bytes).expect("in range");
    assert_eq!(&bytes[4096..4103], b"farpage");
    assert!(
        bytes[..4096]
            .iter()
            .chain(&bytes[4103..])
            .all(|byte| *byte == 0)
    );
    assert!(memory.resident_bytes() >= 4096);
    memory.punch().expect("a memfd can be punched");
    assert_eq!(memory.resident_bytes(), 0);
}

#[test]
fn accesses_stop_at_the_end() {
    let memory = extent(10_000);
    assert!(memory.copy_in(9_999, &[1]).is_ok());
    for (offset, len) in [
        (9_999, 2),
        (10_000, 1),
        (u64::MAX, 1),
        (0, 10_001),
        (u64::MAX - 1, 9),
    ] {
        assert!(
            memory.copy_in(offset, &vec![0; len]).is_err(),
            "{offset} {len}"
        );
        assert!(
            memory.copy_out(offset, &mut vec![0; len]).is_err(),
            "{offset} {len}"
        );
    }
}

#[test]
fn atomics_change_words_of_the_extent_and_nothing_else() {
    let memory = extent(20);
    memory.copy_in(0, &[0xff; 20]).expect("in range");
    let add = |offset, summand| memory.atomic(offset, Atomic::FetchAdd(summand)).ok();
    assert_eq!(add(8, 2), Some(u64::MAX));
    let swap = |expected, new| {
        let swap = Atomic::CompareSwap { expected, new };
        memory.atomic(8, swap).ok()
    };
    assert_eq!(swap(7, 9), Some(1), "another value stays");
    assert_eq!(swap(1, 0x0908_0706_0504_0302), Some(1));
    let mut bytes = [0; 20];
    memory.copy_out(0, &mut bytes).expect("in range");
    assert_eq!(&bytes[7..17], &[0xff, 2, 3, 4, 5, 6, 7, 8, 9, 0xff]);
    for offset in [1, 4, 7, 9, 12, 16, 24, u64::MAX - 7] {
        assert_eq!(add(offset, 1), None, "{offset}");
    }
    let mut after = [0; 20];
    memory.copy_out(0, &mut after).expect("in range");
    assert_eq!(after, bytes);
    memory.revoke();
    assert_eq!(add(8, 1), None);
}

#[test]
fn the_kernel_says_whether_a_client_has_let_go() {
    let memory = extent(8192);
    memory.copy_in(0, b"mapped here").expect("in range");
    let is_held = || memory.file().is_held_elsewhere().expect("file leases");
    assert!(!is_held(), "the server's own mapping counts for nothing");
    let lent = File::from(memory.lend().expect("a descriptor"));
    assert!(is_held());
    let copy = lent.try_clone().expect("a descriptor");
    drop(lent);
    assert!(is_held(), "a copy of the descriptor");
    let read_only = File::open(format!("/proc/self/fd/{}", copy.as_raw_fd()));
    let map = MmapOptions::new().map_raw_read_only(&read_only.expect("opened"));
    drop(copy);
    assert!(is_held(), "a mapping of a descriptor opened anew");
    drop(map);
    assert!(!is_held());
}

#[test]
fn a_client_that_opens_its_memory_while_it_is_asked_about_harms_nobody() {
    let memory = extent(8192);
    let lent = File::from(memory.lend().expect("a descriptor"));
    // Neither open nor mapped, and a way to open it again.
    let known = File::options()
        .read(true)
        .custom_flags(libc::O_PATH)
        .open(format!("/proc/self/fd/{}", lent.as_raw_fd()))
        .expect("a descriptor");
    drop(lent);
    let path = format!("/proc/self/fd/{}", known.as_raw_fd());
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let again = File::options().read(true).write(true).open(&path);
                drop(again.expect("opened"));
            }
        });
        // The kernel's signal to a lease's owner would end this process.
        let (mut held, mut free) = (0, 0);
        while held < 1000 || free < 1000 {
            match memory.file().is_held_elsewhere().expect("file leases") {
                true => held += 1,
                false => free += 1,
            }
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn nobody_can_resize_an_extent() {
    let memory = extent(8192);
    for bytes in [0, 4096, 1 << 20] {
        assert!(
            ftruncate(memory.lend().expect("a descriptor"), bytes).is_err(),
            "{bytes}"
        );
    }
    assert!(ExtentMemory::create(ExtentId(1), 0, true).is_err());
}

/// Maps memory that a client is lent to read. The client can neither write nor resize it.
fn seen_only(lent: &File) -> MmapRaw {
    // Any holder of a descriptor can reopen it.
    let again = open_anew(lent, true).expect("its user may write it");
    for file in [lent, &again] {
        assert!(MmapOptions::new().map_raw(file).is_err());
        assert!(file.write_at(&[1; 8], 0).is_err());
        assert!(file.set_len(0).is_err());
    }
    MmapOptions::new().map_raw_read_only(lent).expect("memory")
}

#[test]
fn clients_see_the_words_of_segments_and_cannot_write_them() {
    let words = SegmentWords::create(8 * SEGMENT_BYTES).expect("a memfd");
    let lent = File::from(words.lend().expect("a descriptor"));
    let seen = seen_only(&lent);
    words.set(3, SegmentWord(0).with(5));
    assert_eq!(word_at(&seen, 3).load(Ordering::Acquire), 5);
    assert_eq!(word_at(&seen, 0).load(Ordering::Acquire), 0);
}

#[test]
fn memory_that_is_lent_to_read_cannot_be_written_by_who_holds_it() {
    let memory = ExtentMemory::create_to_read(ExtentId(1), 8192).expect("a memfd");
    let lent = File::from(memory.lend().expect("a descriptor"));
    let seen = seen_only(&lent);
    memory.copy_in(4096, &7u64.to_ne_bytes()).expect("its own");
    assert_eq!(word_at(&seen, 512).load(Ordering::Acquire), 7);
}

#[test]
fn a_view_is_read_and_never_written() {
    let memory = extent(8192);
    let view = memory.view(ExtentId(7));
    assert_eq!((view.id(), memory.id()), (ExtentId(7), ExtentId(1)));
    assert!(view.is_read_only() && !view.has_atomics() && !memory.is_read_only());
    assert!(view.atomic(0, Atomic::FetchAdd(1)).is_err());
    let lent = File::from(view.lend().expect("a descriptor"));
    assert!(MmapOptions::new().map_raw(&lent).is_err());
    assert!(lent.write_at(&[1; 8], 0).is_err());
    let seen = MmapOptions::new().map_raw_read_only(&lent).expect("memory");
    memory.copy_in(4096, &7u64.to_ne_bytes()).expect("writable");
    assert_eq!(word_at(&seen, 512).load(Ordering::Acquire), 7);
    // The end of the reader's lease leaves the writer's alone.
    view.revoke();
    assert!(view.copy_out(0, &mut [0]).is_err());
    memory.copy_in(0, &[1]).expect("writable");
}

#[test]
fn another_user_cannot_open_a_view_anew_to_write() {
    // SAFETY: asks who this is.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!(
            "SKIPPED: another_user_cannot_open_a_view_anew_to_write: only root can act as another user"
        );
        return;
    }
    let memory = extent(8192);
    let lent = File::from(memory.view(ExtentId(7)).lend().expect("a descriptor"));
    let opened = thread::spawn(move || {
        // SAFETY: two numbers; it holds for this thread alone, and takes root's rights over
        // files from it.
        unsafe { libc::setfsuid(65534) };
        open_anew(&lent, true)
    });
    let refused = opened.join().expect("it does not panic");
    let error = refused.expect_err("the file is its owner's");
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
}

#[test]
fn a_mark_is_taken_once() {
    let bytes = 2 * SEGMENT_BYTES + 1;
    let memory = ExtentMemory::create_with_marks(ExtentId(1), bytes, false).expect("a memfd");
    let file = memory.file();
    let map = memory.memory.map().expect("memory");
    mark_at(map, bytes, 2).fetch_or(6, Ordering::Relaxed);
    assert_eq!((file.take_marks(0), file.take_marks(2)), (0, 6));
    assert_eq!(file.take_marks(2), 0);
    assert!(
        memory.copy_out(bytes, &mut [0]).is_err(),
        "marks are no part of it"
    );
}

#[test]
fn revoking_does_not_wait_for_an_adapter() {
    let memory = extent(8);
    let busy = memory.registration();
    let (revoked, is_revoked) = mpsc::channel();
    let same = Arc::clone(&memory);
    let revoking = thread::spawn(move || {
        same.revoke();
        revoked.send(()).expect("the test waits");
    });
    let outcome = is_revoked.recv_timeout(Duration::from_secs(10));
    drop(busy);
    revoking.join().expect("it does not panic");
    outcome.expect("whoever revokes holds locks that all clients wait for");
    assert!(memory.copy_in(0, b"lost").is_err());
}

#[test]
fn a_revoked_lease_fails_and_the_next_one_sees_the_bytes() {
    let memory = extent(8);
    memory.copy_in(0, b"kept").expect("in range");
    memory.revoke();
    assert!(memory.copy_in(0, b"lost").is_err());
    let next = memory.lease_anew();
    let mut bytes = [0; 4];
    next.copy_out(0, &mut bytes).expect("leased");
    assert_eq!(&bytes, b"kept");
}
