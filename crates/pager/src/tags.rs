//! Tags of operations: [`Tags`] finds the value that a tag stands for.

/// Values by their tags, small numbers that are used again.
#[derive(Debug)]
pub(crate) struct Tags<T> {
    slots: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Default for Tags<T> {
    fn default() -> Self {
        Tags {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Tags<T> {
    /// Makes room for `more` values, which can then be inserted without allocating.
    pub(crate) fn reserve(&mut self, more: usize) {
        self.slots.reserve(more);
        self.free.reserve(more);
    }

    pub(crate) fn insert(&mut self, value: T) -> u64 {
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[at] = Some(value);
        at as u64
    }

    /// Takes out the value of `tag`.
    ///
    /// # Panics
    /// If the tag was not handed out, or has been given back.
    pub(crate) fn remove(&mut self, tag: u64) -> T {
        let value = self.slots[tag as usize]
            .take()
            .expect("a tag comes back once");
        self.free.push(tag as usize);
        value
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().flatten()
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}
