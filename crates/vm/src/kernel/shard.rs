//! One shard of a [`KernelSpace`](super::KernelSpace): all that transfers of its pages need, and
//! the meaning of the kernel's refusals for them.

use std::{ops::Range, sync::Arc};

use super::{fence::Fence, poison::Poison};
use crate::{
    pagemap::Pagemap,
    space::{DetachError, InstallErrorKind},
    sys::Refusal,
};

/// One shard: the parts that moving, copying and poisoning its pages need.
#[derive(Debug)]
pub(super) struct KernelShard {
    pub(super) fence: Fence,
    pub(super) poison: Poison,
    pub(super) pagemap: Arc<Pagemap>,
}

impl KernelShard {
    /// True if anything is mapped in the `len` bytes from `address` on.
    pub(super) fn is_occupied(&self, address: usize, len: usize) -> bool {
        self.pagemap
            .any_occupied(address, len)
            .expect("/proc/self/pagemap stays readable for its owner")
    }

    /// Poisons pages that were half way and can neither be taken nor put back.
    pub(super) fn give_up(&self, range: Range<usize>) {
        // Where even that fails, the pages' next fault is served with the store's bytes.
        let _ = self.poison.put(&self.fence, range);
    }
}

impl From<Refusal> for InstallErrorKind {
    fn from(why: Refusal) -> Self {
        match why {
            Refusal::Exists => Self::Exists,
            Refusal::Missing | Refusal::Ended => Self::Gone,
            other => Self::Os(other.into()),
        }
    }
}

impl From<Refusal> for DetachError {
    fn from(why: Refusal) -> Self {
        match why {
            Refusal::Busy | Refusal::Contended => Self::Busy,
            Refusal::Missing | Refusal::Ended => Self::Absent,
            other => Self::Os(other.into()),
        }
    }
}
