//! Descriptor tables: a runtime's descriptors are out of the program's reach.
//!
//! A program may close any descriptor of its own table, and daemons close all of them. A closed
//! userfaultfd leaves zeros behind, and a number that is used again belongs to another file. So
//! the threads of a runtime share a [`Table`] of their own.
//!
//! The rule: a value with descriptors is used, and dropped, on the table that it was made on.
//! [`Held`] sees to that. A runtime that works on the program's table, because the program's
//! threads need its descriptors, keeps second references by a [`Keeper`].

mod doorbell;
mod held;
mod keeper;
mod private;
mod queue;
mod table;

pub use doorbell::Doorbell;
pub use held::{Held, HeldWeak, Programs};
pub use keeper::{Keeper, lost};
pub use table::{Table, errand, errand_outside, is_private, run_outside, spawn, spawn_outside};
