//! Memory mappings and userfaultfd, typed: how pages enter and leave a program's address space.
//!
//! The rule it keeps: all `unsafe` that deals with the kernel's memory management lives here, and what is handed upward
//! cannot be used wrongly by safe code. Which page is where, and why, is the pager's business.

mod kernel;
mod space;

pub use kernel::{KernelFrame, KernelSpace, KernelSpaceOptions, OpenError, Transfer};
pub use space::{AddressSpace, DetachError, Fault, InstallError, InstallErrorKind, Layout};
