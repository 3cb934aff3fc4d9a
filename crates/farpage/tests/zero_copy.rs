//! Memory that the kernel references without pinning it (pages in a pipe by `vmsplice`): reads
//! return what was put in, whatever becomes of the memory meanwhile.
//!
//! The rule it keeps: between the call and the read at least four budgets of other pages pass
//! through the frames.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    io::{PipeReader, PipeWriter, Read, pipe},
    os::fd::AsRawFd,
    ptr,
};

use common::{Fabric, Memory, begin, builder, words::bytes};
use farpage::{Advice, FaultMode, Region, RegionOptions, Runtime, io};
use farpage_testkit::{KIB, MIB, Watchdog};

const BUDGET: usize = 512 * KIB;

/// A pipe, and a region whose pages pass through the frames.
struct Setting {
    runtime: Runtime,
    others: Region,
    from: PipeReader,
    to: PipeWriter,
    _memory: Memory,
    _watchdog: Watchdog,
}

impl Setting {
    /// Sets the test up. `None` if this process cannot page its own memory.
    fn new(page_bytes: usize, mode: FaultMode) -> Option<Setting> {
        let watchdog = begin(120)?;
        let memory = Memory::start(Fabric::Shm, 64 * MIB);
        let builder = builder(BUDGET, page_bytes).fault_mode(mode);
        let runtime = builder.server(&memory.url).build().unwrap();
        let others = runtime.region(4 * BUDGET).unwrap();
        let (from, to) = pipe().unwrap();
        Some(Setting {
            runtime,
            others,
            from,
            to,
            _memory: memory,
            _watchdog: watchdog,
        })
    }

    fn splice_args(&self, part: &libc::iovec) -> [usize; 6] {
        let fd = self.to.as_raw_fd() as usize;
        [fd, ptr::from_ref(part) as usize, 1, 0, 0, 0]
    }

    /// Puts memory into the pipe by the call itself.
    fn splice(&self, bytes: &[u8]) {
        let part = part(bytes);
        let [fd, list, count, flags, ..] = self.splice_args(&part);
        // SAFETY: a list of one buffer, which is there.
        let put = unsafe { libc::syscall(libc::SYS_vmsplice, fd, list, count, flags) };
        assert_eq!(
            put,
            bytes.len() as i64,
            "{}",
            std::io::Error::last_os_error()
        );
    }

    /// Makes other pages use all frames.
    fn churn(&mut self) {
        for seed in 0..2 {
            self.others.fill(0xa0 | seed);
        }
    }

    fn check(&mut self, count: usize, seed: u64) {
        let mut out = vec![0; count];
        self.from.read_exact(&mut out).unwrap();
        let wrong = out
            .iter()
            .zip(bytes(count, seed))
            .filter(|(out, put)| *out != put);
        assert_eq!(wrong.count(), 0, "wrong bytes of {count}");
    }
}

fn part(bytes: &[u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    }
}

#[test]
fn pages_in_a_pipe_stay_what_they_were_when_they_leave() {
    for page_bytes in [4 * KIB, 16 * KIB, 64 * KIB] {
        let Some(mut setting) = Setting::new(page_bytes, FaultMode::Filler) else {
            return;
        };
        let mut region = setting.runtime.region(MIB).unwrap();
        region.advise(.., Advice::ZeroCopy).unwrap();
        for seed in 0..4 {
            region[..64 * KIB].copy_from_slice(&bytes(64 * KIB, seed));
            setting.splice(&region[..64 * KIB]);
            setting.churn();
            setting.check(64 * KIB, seed);
            assert!(region[..64 * KIB] == bytes(64 * KIB, seed), "in the region");
        }
    }
}

#[test]
fn pages_in_a_pipe_stay_what_they_were_when_they_are_discarded() {
    let Some(mut setting) = Setting::new(16 * KIB, FaultMode::Filler) else {
        return;
    };
    let mut region = setting.runtime.region(MIB).unwrap();
    region.advise(.., Advice::ZeroCopy).unwrap();
    // A part of a page, and a page and a half.
    for (seed, count) in [(1, 4 * KIB), (2, 24 * KIB)] {
        region[..count].copy_from_slice(&bytes(count, seed));
        setting.splice(&region[..count]);
        region.discard_range(..count).unwrap();
        assert!(region[..count].iter().all(|&byte| byte == 0));
        setting.churn();
        setting.check(count, seed);
    }
}

#[test]
fn freed_memory_that_lies_in_a_pipe_is_given_to_nobody_as_it_is() {
    let Some(mut setting) = Setting::new(4 * KIB, FaultMode::Filler) else {
        return;
    };
    let arena = setting
        .runtime
        .arena_with(4 * MIB, RegionOptions::new())
        .unwrap();
    let address = arena.addresses().start;
    let make = || arena.allocate_uninit(16 * KIB, 1).unwrap();
    for seed in 0..4 {
        let made = make();
        let start = made.as_ptr() as usize - address;
        let range = start..start + 16 * KIB;
        arena.region().advise(range, Advice::ZeroCopy).unwrap();
        // SAFETY: as much was allocated, and nobody else uses it.
        let memory = unsafe { std::slice::from_raw_parts_mut(made.as_ptr(), 16 * KIB) };
        memory.copy_from_slice(&bytes(16 * KIB, seed));
        setting.splice(memory);
        // SAFETY: not used any more; what is made next is nobody else's.
        unsafe {
            arena.deallocate(made).unwrap();
            let next = make();
            next.as_ptr().write_bytes(b'#', 16 * KIB);
            setting.check(16 * KIB, seed);
            arena.deallocate(next).unwrap();
        }
        setting.churn();
    }
}

/// The function copies, so no advice is needed.
#[test]
fn calls_of_farpage_give_copies_away() {
    let Some(mut setting) = Setting::new(4 * KIB, FaultMode::InThread) else {
        return;
    };
    let mut region = setting.runtime.region(MIB).unwrap();
    for seed in 0..4 {
        region[..64 * KIB].copy_from_slice(&bytes(64 * KIB, seed));
        setting.churn();
        let part = part(&region[..64 * KIB]);
        // SAFETY: a list of one buffer, which is there.
        let put = unsafe { io::system_call(libc::SYS_vmsplice, setting.splice_args(&part)) };
        assert_eq!(put.unwrap(), 64 * KIB);
        setting.churn();
        setting.check(64 * KIB, seed);
    }
}
