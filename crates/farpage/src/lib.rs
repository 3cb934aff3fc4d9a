//! Remote arrays: memory that lives on other machines, used like ordinary memory.
//!
//! A [`Runtime`] connects to memory servers and keeps a local *budget* of pages. A [`RemoteArray`]
//! behaves like a slice; its pages live on the servers and come in when they are touched. A
//! [`Region`] is the same as raw bytes, and may keep its pages in any [`Store`], for example an
//! ordinary file.
//!
//! ```no_run
//! use farpage::{ByteSize, Runtime};
//!
//! let runtime = Runtime::builder()
//!     .server("shm:///run/farpage.sock")
//!     .budget(ByteSize::mib(256))
//!     .build()?;
//! let mut array = runtime.array::<f64>(1 << 30)?; // 8 GiB, zeroed
//! array[12345] = 1.5;
//! let sum: f64 = array.iter().sum();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! An [`Arena`] is a region that allocations of any size come from and return to.
//!
//! # When memory is lost
//!
//! An access cannot return an error. A page that cannot be brought in within the
//! [deadline](Builder::deadline) raises SIGBUS when it is touched; [`Region::prefetch_now`] brings
//! pages in and returns an error instead, and tries lost pages again. A page that cannot be written
//! back stays in memory, and [`Region::flush`] says why.
//!
//! Where the kernel, too, refuses to take such a page back, its newest bytes are lost
//! ([`PageError::Lost`]). The servers' older bytes are never put in their place. Touching the page
//! raises SIGBUS, and `flush` and `close` fail, until [`Region::overwrite`] writes the whole page.
//!
//! With [`Redundancy::Copies`] each page is on several servers, and is lost only with the last of
//! them. Lost copies are made again on servers that have room.
//!
//! # System calls
//!
//! A region can be given to system calls like any memory. With [`FaultMode::InThread`] the calls of
//! [`io`] do the same. Other calls, and all calls in a runtime of [`Builder::user_mode_only`], need
//! its pages in memory: [`Region::pin`] brings them in and keeps them there.
//!
//! # Signals
//!
//! A signal handler may touch a region at any time, also while its thread is inside a call of this
//! crate. Calls hold signals back while they hold a lock, and let signals in where they wait for
//! pages. So a signal waits for a server where a call does: as long as the deadline at most. A
//! handler must not call this crate, which allocates and locks.
//!
//! A thread that is interrupted inside `malloc` or `free` may hold a lock of the allocator. The
//! runtime's threads allocate now and then while they serve faults. So a program whose handlers
//! touch a region has [`Allocator`], which serves these threads from a heap of the runtime's:
//!
//! ```
//! #[global_allocator]
//! static ALLOCATOR: farpage::Allocator = farpage::Allocator::new();
//! ```
//!
//! Without it a fault of such a handler may end as an error at the deadline, or wait for itself if
//! it is served in its own thread. The C and the Python library have it, and so have programs under
//! `farpage run`. Two requests remain: the ZFP library's, at a worker's first page of its kind, and
//! the loader's, at the first in-thread fault of a thread if farpage was loaded by `dlopen`.
//!
//! # Logging
//!
//! farpage logs by `tracing`. Threads that move pages leave their lines to another thread, which
//! exists while there are lines. So a subscriber may touch remote memory, or wait for a thread that
//! does.
//!
//! # Descriptors
//!
//! The threads of a runtime with memory servers share a table of descriptors of their own. So a
//! program may close any descriptor, as daemons do, and its next one has the number that it would
//! have without farpage. Calls of a [`Store`] come on threads that have the program's descriptors.
//!
//! RDMA devices are opened once in a process, on one table. If a program lends or borrows by RDMA
//! itself before its first runtime, devices are opened on the program's table, and its runtimes
//! over RDMA work there. After a runtime over RDMA, a program cannot lend by RDMA.
//!
//! With [`FaultMode::InThread`] the program's threads need the runtime's descriptors, and without
//! servers workers call stores themselves: these runtimes use the program's table. A program must
//! not close or replace descriptors there that it has not opened. If it does, it ends with a line
//! on standard error as soon as a page is moved. Absent pages are never read as zeros.
//!
//! # Forking
//!
//! Runtimes and regions belong to the process that made them. A child made by `fork` has a private
//! copy of each region, as the region was at that moment. The kernel shares the pages that are
//! present, and the parent brings absent pages in when the child touches them. Nothing is copied at
//! the fork, and a child that calls `exec` asks no server.
//!
//! - The servers keep what the child can still see until it has ended, beside what the parent
//!   writes: see [`StoreStatsSnapshot::held_bytes`].
//! - Children have up to half of the budget. Once a child has touched 16 MiB of absent pages, it
//!   gets a thread, by SIGURG, that moves pages out again: also those that were present at the fork
//!   and are not shared any more. A child that handles or holds back that signal, or is confined by
//!   a filter of system calls, keeps what it touches.
//! - Other calls on regions are refused in the child with an error, and values that the child drops
//!   are left alone. The child may build a runtime of its own.
//! - A parent that returns from `main`, or calls `exit`, waits for children that still have its
//!   memory. A parent that is killed, or calls `_exit` or `exec`, takes them along: a program that
//!   becomes a daemon builds its runtime afterwards.
//!   A child that has closed its descriptors is no exception, as soon as the parent's thread that
//!   serves children has noticed that.
//! - Regions with a [`Store`] of their own are not inherited, and nothing is by a child that the
//!   raw system call makes: touching them raises SIGSEGV. Such a call must not be made while
//!   another thread forks: absent pages would be zeros.

mod arena;
mod arena_pages;
mod array;
mod config;
pub mod error;
mod fault;
#[doc(hidden)]
pub mod fork;
pub mod io;
mod kept;
mod ordinary;
mod ordinary_time;
mod ranges;
mod region;
mod runtime;
mod setup;
mod stats;

pub use arena::{Arena, ArenaError, ArenaHold};
pub use array::RemoteArray;
pub use bytemuck::Pod;
pub use bytesize::ByteSize;
pub use config::Builder;
pub use error::{BuildError, CloseError, CreateError, FlushError, OpenError, PinError};
pub use farpage_fabric::{Allowance, Link, Session};
pub use farpage_pager::{Advice, PageError, PagerStats};
pub use farpage_signals::Allocator;
pub use farpage_store::{
    Block, Codec, CodecError, CodecTrial as Trial, DrainReport, Element, ElementType, Elements,
    FileStore, FileStoreError, NamedRegion, Redundancy, RegPoolStats, Reserve, Store,
    StoreStatsSnapshot, ZfpMode,
};
pub use farpage_vm::Transfer;
pub use farpage_wire::Endpoint;
pub use fault::FaultMode;
#[doc(hidden)]
pub use ranges::Ranges;
pub use region::{Region, RegionOptions};
pub use runtime::Runtime;
pub use stats::Stats;
