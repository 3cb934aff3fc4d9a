//! Handles of a C program: a boxed value, and the process that it belongs to.
//!
//! The rule it keeps: a child made by `fork` has a copy of the handle but neither the threads nor
//! the mappings behind it. So its calls get an error, never a hang, and it frees nothing.

use std::process;

use crate::{FARPAGE_FORKED, error::Failure};

/// A value of the process that made it.
pub(crate) struct Handle<T> {
    pid: u32,
    value: T,
}

impl<T> Handle<T> {
    pub(crate) fn new(value: T) -> Box<Handle<T>> {
        Box::new(Handle {
            pid: process::id(),
            value,
        })
    }

    pub(crate) fn check(&self) -> Result<&T, Failure> {
        if self.pid == process::id() {
            return Ok(&self.value);
        }
        Err(Failure::new(
            FARPAGE_FORKED,
            "a process made by fork has copies of its parent's regions to read and write, and nothing more of its runtimes: make new ones in the child",
        ))
    }

    pub(crate) fn check_mut(&mut self) -> Result<&mut T, Failure> {
        self.check()?;
        Ok(&mut self.value)
    }

    /// Returns the value. In a child made by `fork`: fails, and leaks the value for good.
    pub(crate) fn into_value(self: Box<Self>) -> Result<T, Failure> {
        match self.check() {
            Ok(_) => Ok(self.value),
            Err(failure) => {
                Box::leak(self);
                Err(failure)
            }
        }
    }
}
