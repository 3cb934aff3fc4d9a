//! [`Held`]: a value with descriptors, which are numbers of one table.

use std::{
    fmt,
    mem::ManuallyDrop,
    ops::Deref,
    sync::{Arc, Weak},
};

use crate::{Table, is_private, run_outside};

/// A value that uses descriptors of the table that it was made on. It is dropped there, too.
pub struct Held<T: Send> {
    value: ManuallyDrop<T>,
    table: Option<Arc<Table>>,
}

impl<T: Send> Held<T> {
    /// Holds a value that was made by the calling thread.
    pub fn new(value: T) -> Held<T> {
        Held {
            value: ManuallyDrop::new(value),
            table: Table::current(),
        }
    }

    /// Uses the value on its table, whichever the calling thread works on.
    pub fn with<R: Send>(&self, call: impl FnOnce(&T) -> R + Send) -> R
    where
        T: Sync,
    {
        let value: &T = &self.value;
        match &self.table {
            Some(table) => table.run(|| call(value)),
            None => call(value),
        }
    }

    /// Returns the value, for threads of its table, and for uses that need no descriptor.
    pub fn get(&self) -> &T {
        &self.value
    }

    /// True if the calling thread works on the value's table.
    pub fn is_here(&self) -> bool {
        match &self.table {
            Some(table) if table.is_private() => table.is_here(),
            _ => !is_private(),
        }
    }

    /// True if this process is a child made by `fork` of the process that has the table.
    pub fn is_parents(&self) -> bool {
        self.table.as_ref().is_some_and(|table| table.is_parents())
    }
}

impl<T: Send + Sync> Held<Arc<T>> {
    /// Returns a reference that keeps neither the value nor its table.
    pub fn downgrade(&self) -> HeldWeak<T> {
        HeldWeak {
            value: Arc::downgrade(&self.value),
            table: self.table.as_ref().map(Arc::downgrade),
        }
    }
}

/// Reference to a [`Held`] value that keeps neither the value nor its table.
#[derive(Clone, Debug)]
pub struct HeldWeak<T> {
    value: Weak<T>,
    table: Option<Weak<Table>>,
}

impl<T: Send + Sync> HeldWeak<T> {
    /// Returns the value, if it still exists.
    pub fn upgrade(&self) -> Option<Held<Arc<T>>> {
        let table = match &self.table {
            Some(table) => Some(table.upgrade()?),
            None => None,
        };
        Some(Held {
            value: ManuallyDrop::new(self.value.upgrade()?),
            table,
        })
    }

    /// True if the value still exists.
    pub fn exists(&self) -> bool {
        self.value.strong_count() > 0
    }
}

impl<T: Send> Drop for Held<T> {
    fn drop(&mut self) {
        // In a child made by `fork` the numbers may belong to other files.
        if self.is_parents() {
            return;
        }
        // SAFETY: not used again.
        let value = unsafe { ManuallyDrop::take(&mut self.value) };
        match &self.table {
            Some(table) => table.run(|| drop(value)),
            None => drop(value),
        }
    }
}

/// A value of the program's, which may have descriptors. It is dropped on the program's table.
pub struct Programs<T: Send + 'static>(ManuallyDrop<T>);

impl<T: Send + 'static> Programs<T> {
    /// Takes a value of the program's.
    pub fn new(value: T) -> Programs<T> {
        Programs(ManuallyDrop::new(value))
    }
}

impl<T: Send + 'static> Deref for Programs<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Send + 'static> Drop for Programs<T> {
    fn drop(&mut self) {
        // SAFETY: not used again.
        let value = unsafe { ManuallyDrop::take(&mut self.0) };
        // If no thread can be started, the value is leaked.
        let _ = run_outside("farpage-drop", move || drop(value));
    }
}

impl<T: Send + Clone> Clone for Held<T> {
    /// Copies the value on the calling thread, which must need no descriptor.
    fn clone(&self) -> Self {
        Held {
            value: self.value.clone(),
            table: self.table.clone(),
        }
    }
}

impl<T: Send + fmt::Debug> fmt::Debug for Held<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}
