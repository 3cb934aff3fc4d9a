//! Faults served by the thread that faults: the process's SIGBUS handler, and the ranges of
//! addresses that it serves.
//!
//! The rule it keeps: a SIGBUS that is not served here ends as it would have ended without this
//! module: in the handler that was installed before, or by killing the process. Serving is left to
//! [`FaultHandler`]; the faults come from a [`KernelSpace`](crate::KernelSpace) whose option
//! `in_thread` is set.
//!
//! The handler is installed with the first [`FaultRegistration`] and stays, since a handler
//! installed after it may call it. A handler that is installed later has to pass on what is not its
//! own, as that of Wasmtime does. A handler that does not takes the faults of regions away. A
//! library that keeps the program from installing one says so by [`set_previous`].
//!
//! **Which stack.** A handler here talks to a server, hashes and decodes, and [`STACK_BYTES`] are
//! meant to be enough for that. No stack at hand is: what Rust gives its threads for signals is 8
//! KiB, about half of which the kernel fills with registers; other threads have none; a fibre or
//! goroutine has little left of its own. So the handler enters on whatever there is (`SA_ONSTACK`),
//! needs a few hundred bytes there, and serves on a stack of its own from a process-wide stock,
//! which grows to as many as ever serve at once. No thread has to be prepared, and nothing is left
//! to clean up when one ends. (Wasmtime prepares each thread, because each enters through it;
//! ExtMem serves on the thread's own stack, which breaks a thread that is deep in it.) The price:
//! the kernel takes the alternate stack for unused meanwhile, and would place the next signal over
//! the first. Hence all signals wait until the page is there, but those that a bug in the handler
//! raises. Signals wait for the kernel's own swapping, too.
//!
//! **What it cannot do.** The kernel kills a thread that faults while it blocks SIGBUS: threads
//! that block "all" signals have to leave this one out. System calls that touch absent pages fail
//! with `EFAULT`, without a signal.

mod contract;
mod handler;
mod registration;
mod stack;
mod table;

pub use contract::{FaultHandler, STACK_BYTES, Served};
pub use handler::set_previous;
pub use registration::FaultRegistration;
pub(crate) use stack::Stack;
pub use stack::{keep_stack, on_stock_stack};
pub(crate) use table::begin_child;
pub use table::serves;
