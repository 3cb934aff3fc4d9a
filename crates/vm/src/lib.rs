//! Memory mappings and userfaultfd, typed: how pages enter and leave a program's address space.
//!
//! The rule it keeps: all `unsafe` that deals with the kernel's memory management lives here, and
//! safe code cannot use wrongly what [`AddressSpace`] hands upward. The choice of pages is left to
//! the pager.

pub mod calls;
pub mod child;
mod event_count;
mod frame;
mod kernel;
mod pagemap;
mod pages;
mod probe;
mod protections;
pub mod sigbus;
mod sim;
mod space;
mod sys;
mod uffd;
mod vacancies;

pub use event_count::{EventCount, PreparedSleep};
pub use frame::KernelFrame;
pub use kernel::{KernelSpace, KernelSpaceOptions, Transfer};
pub use pagemap::Pagemap;
pub use pages::{Pages, Shard};
pub use probe::{Check, Probe, Verdict, probe};
pub use protections::protections;
pub use sim::{Faulted, SimFrame, SimOptions, SimSpace};
pub use space::{
    AddressSpace, Batch, Cede, DetachError, Detached, EventScope, EventSources, Events, Frame,
    Geometry, InstallError, InstallErrorKind, PageFault, PageIn, PageOut, RUN_PAGES_MAX,
    RegionMapping, ReservedRoom, SCATTERED_PAGES_MAX,
};
pub use sys::{FUTEX_ADD_NOTHING, Refusal, Stopped};
pub use uffd::{FaultBuffer, Features, RegisterMode, Uffd, UserfaultfdError};
