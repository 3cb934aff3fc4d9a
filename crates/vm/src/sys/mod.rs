//! The kernel's own calls, as thin as they can be.
//!
//! The rule it keeps: nothing outside this folder names an ioctl's number or a system call that
//! changes memory.

mod ioctl;
mod many;
mod memory;

pub use ioctl::{Refusal, Stopped};

pub(crate) use ioctl::{
    USERFAULTFD, agree, can_scan, copy, is_changing, move_pages, open_by_device, open_by_syscall,
    poison, scan,
};
pub(crate) use many::{RANGES_MAX, can_copy_and_drop_each, copy_each, drop_each};
pub use memory::FUTEX_ADD_NOTHING;
pub(crate) use memory::{
    Backing, KERNEL_PAGE_BYTES, advise, carry_away, madvise, protect, release, replace, reserve,
    reserve_apart, reserve_at, reserve_barred, write_nothing,
};
