//! Identifiers: newtypes, so that an extent cannot be taken for a session.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A range of memory granted by one server. Never given out twice by the same server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ExtentId(pub u64);

/// A server's identity, drawn by chance. A server that has lost its names is another one, also
/// where it has the same address.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct ServerId(pub u128);

/// A client's stay at one server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SessionId(pub u64);

impl fmt::Display for ExtentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Proof that a connection belongs to a session. Compared in constant time and never printed.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct Secret(pub [u8; 16]);

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        // Every byte is compared, so that the time does not reveal how many were right. `black_box`
        // keeps the compiler from turning the fold into an early exit.
        let difference = self
            .0
            .iter()
            .zip(other.0)
            .fold(0u8, |all, (a, b)| std::hint::black_box(all | (a ^ b)));
        difference == 0
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_compare_by_every_byte_and_hide_in_debug() {
        let secret = Secret([7; 16]);
        assert_eq!(secret, Secret([7; 16]));
        for i in 0..16 {
            let mut other = secret;
            other.0[i] ^= 0x80;
            assert_ne!(secret, other, "byte {i}");
        }
        assert_eq!(format!("{secret:?}"), "Secret(..)");
    }
}
