//! Less memory for one program than the machine has: a memory cgroup, and swap to compressed
//! memory.
//!
//! The rule it keeps: whatever is set up is owned by a guard, and gone when the guard is dropped.

pub mod cgroup;
pub mod swap;
