//! Descriptors of the runtime in the program's table, with in-thread faults.
//!
//! A thread that serves its own fault uses these descriptors, so they cannot be on another table.
//! The rules: they have numbers of a [`Window`] above all numbers of the program. There the filter
//! of system calls (`filter.rs`) refuses to close or to replace one.
//!
//! The program gets no number of the window: those that the runtime does not use are
//! [plugged](Window::plug).
//!
//! A filter stays with the programs that this one starts, which close ranges of all numbers. So the
//! filter allows [`close_range`], which goes around the window here.

use std::{
    ffi::{c_int, c_uint},
    io,
    mem::MaybeUninit,
    ops::Range,
    os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd},
    sync::atomic::{AtomicU32, Ordering},
};

use crate::{Inside, next::next, state};

/// Number of descriptors in the window: more than any runtime has.
const NUMBERS: u32 = 512;
/// Upper bound of the window's beginning, which is the program's limit (`ulimit -n`): the kernel
/// copies a table as far as its last descriptor with every process, and [`Window::open`] takes a
/// system call for each number below. Few programs under a higher limit have so many files.
const FIRST_MAX: u32 = 1024;

static FIRST: AtomicU32 = AtomicU32::new(0);
static END: AtomicU32 = AtomicU32::new(0);

/// Numbers that new descriptors get while the window lives.
pub(crate) struct Window {
    numbers: Range<u32>,
    /// File whose duplicates occupy numbers.
    file: OwnedFd,
    /// Numbers below the window that duplicates occupy.
    occupied: Vec<Range<u32>>,
    limit: libc::rlimit,
}

impl Window {
    /// Occupies all numbers below the window.
    pub(crate) fn open() -> io::Result<Window> {
        let mut limit = MaybeUninit::uninit();
        // SAFETY: written before it is read.
        let limit: libc::rlimit = unsafe {
            if libc::getrlimit(libc::RLIMIT_NOFILE, limit.as_mut_ptr()) != 0 {
                return Err(io::Error::last_os_error());
            }
            limit.assume_init()
        };
        let first = limit.rlim_cur.min(u64::from(FIRST_MAX)) as u32;
        let end = limit.rlim_max.min(u64::from(first + NUMBERS)) as u32;
        // If the limit is low, the program has half of it.
        let first = first.min(end.saturating_sub(NUMBERS).max(end / 2));
        let numbers = first..end;
        let raised = libc::rlimit {
            rlim_cur: limit.rlim_cur.max(u64::from(numbers.end)),
            rlim_max: limit.rlim_max,
        };
        // SAFETY: makes a descriptor.
        let file = unsafe { libc::memfd_create(c"farpage".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut window = Window {
            numbers,
            // One file under many numbers: a file for each would take most of the start-up.
            // SAFETY: made just now, and nobody else knows it.
            file: unsafe { OwnedFd::from_raw_fd(file) },
            occupied: Vec::new(),
            limit,
        };
        set_limit(&raised)?;
        let mut least = file as u32 + 1;
        loop {
            let made = duplicate(&window.file, least)?;
            let number = made.as_raw_fd() as u32;
            if number < first {
                window.note(made.into_raw_fd() as u32);
                least = number + 1;
            } else if least > 0 {
                // Another thread may have closed a lower one meanwhile.
                least = 0;
            } else {
                return Ok(window);
            }
        }
    }

    /// Notes a duplicate that occupies `number`.
    fn note(&mut self, number: u32) {
        match self.occupied.last_mut() {
            Some(run) if run.end == number => run.end += 1,
            _ => self.occupied.push(number..number + 1),
        }
    }

    /// Occupies the free numbers of the window but the last `left`. The program could never close a
    /// descriptor that it gets there, and may raise its limit.
    pub(crate) fn plug(&self, left: u32) {
        let plugged = self.numbers.start..self.numbers.end.saturating_sub(left);
        while let Ok(made) = duplicate(&self.file, plugged.start)
            && plugged.contains(&(made.as_raw_fd() as u32))
        {
            // Closed with the program: the filter refuses to close it.
            let _ = made.into_raw_fd();
        }
    }

    /// Returns the window, whose descriptors are protected from now on.
    pub(crate) fn numbers(&self) -> Range<u32> {
        FIRST.store(self.numbers.start, Ordering::Relaxed);
        END.store(self.numbers.end, Ordering::Relaxed);
        self.numbers.clone()
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        for run in &self.occupied {
            // SAFETY: closes duplicates that `open` has made, and that nobody else knows.
            unsafe { libc::syscall(libc::SYS_close_range, run.start, run.end - 1, 0) };
        }
        // Lowering a limit never fails.
        let _ = set_limit(&self.limit);
    }
}

/// Closes a descriptor, also one of the window: the filter refuses `close` alone.
pub(crate) fn close(descriptor: u32) {
    // SAFETY: a descriptor of this library.
    unsafe { libc::syscall(libc::SYS_close_range, descriptor, descriptor, 0) };
}

/// Duplicates a descriptor. The copy has the lowest free number from `least` on.
fn duplicate(descriptor: &OwnedFd, least: u32) -> io::Result<OwnedFd> {
    let (from, least) = (descriptor.as_raw_fd(), least as c_int);
    // SAFETY: makes a descriptor.
    match unsafe { libc::fcntl(from, libc::F_DUPFD_CLOEXEC, least) } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: made just now, and nobody else knows it.
        made => Ok(unsafe { OwnedFd::from_raw_fd(made) }),
    }
}

fn set_limit(limit: &libc::rlimit) -> io::Result<()> {
    // SAFETY: a limit that lasts for the call.
    match unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, limit) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

next! {
    /// `closefrom`.
    next_closefrom = c"closefrom"(first: c_int) -> (), else debug_assert!(first >= 0);
}

/// Returns the window, unless this process has none.
fn window() -> Option<Range<u32>> {
    let window = FIRST.load(Ordering::Relaxed)..END.load(Ordering::Relaxed);
    let is_ours = !window.is_empty() && !Inside::is() && !state::is_child();
    is_ours.then_some(window)
}

/// `close_range`.
///
/// # Safety
/// As `close_range`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let close = |first: u32, last: u32| {
        // SAFETY: the caller's promise.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) as c_int }
    };
    let Some(window) = window().filter(|window| first < window.end && last >= window.start) else {
        return close(first, last);
    };
    if first < window.start && close(first, window.start - 1) != 0 {
        return -1;
    }
    match last >= window.end {
        true => close(window.end, last),
        false => 0,
    }
}

/// `closefrom`.
///
/// # Safety
/// As `closefrom`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn closefrom(first: c_int) {
    // SAFETY: the caller's promise.
    unsafe {
        if window().is_none() || close_range(first.max(0) as u32, c_uint::MAX, 0) != 0 {
            next_closefrom(first);
        }
    }
}
