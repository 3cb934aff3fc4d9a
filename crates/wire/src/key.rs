//! Identity of a client: public keys, and the proof that it holds the private half of one.
//!
//! The rule it keeps: signed bytes name their purpose, so that a signature made for one connection
//! opens no other. Making and checking signatures (Ed25519, RFC 8032) is left to
//! `farpage_fabric::key`.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

use crate::VERSION;

crate::debug_as_display!(PublicKeyError);

/// A user's Ed25519 public key. In text it is 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey(pub [u8; 32]);

/// Random bytes that a server sends and a client signs. Used once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge(pub [u8; 32]);

/// An Ed25519 signature: its two halves, R and s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature(pub [[u8; 32]; 2]);

/// Text that is no public key.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a public key has 64 hexadecimal digits: `farpage-memserver key` prints yours")]
pub struct PublicKeyError;

impl Challenge {
    /// Returns the bytes that a client signs: purpose, protocol version and this challenge.
    pub fn message(&self) -> Vec<u8> {
        let version = VERSION.to_le_bytes();
        [&b"farpage identify\0"[..], &version, &self.0].concat()
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex_of(&self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({self})")
    }
}

impl FromStr for PublicKey {
    type Err = PublicKeyError;

    fn from_str(text: &str) -> Result<Self, PublicKeyError> {
        bytes_of_hex(text).map(Self).ok_or(PublicKeyError)
    }
}

impl Serialize for PublicKey {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match to.is_human_readable() {
            true => to.collect_str(self),
            false => self.0.serialize(to),
        }
    }
}

impl<'de> Deserialize<'de> for PublicKey {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        match from.is_human_readable() {
            true => String::deserialize(from)?.parse().map_err(Error::custom),
            false => Deserialize::deserialize(from).map(Self),
        }
    }
}

/// Spells `bytes` as hexadecimal digits.
pub fn hex_of(bytes: &[u8; 32]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the 32 bytes that `text` spells in 64 hexadecimal digits. `None` for any other text.
pub fn bytes_of_hex(text: &str) -> Option<[u8; 32]> {
    let digits = text.as_bytes();
    if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(&text[at..at + 2], 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_keys_are_read_as_they_are_written() {
        let key = PublicKey(std::array::from_fn(|i| i as u8 * 8));
        assert_eq!(key.to_string().parse(), Ok(key));
        assert_eq!(key.to_string().to_uppercase().parse(), Ok(key));
        for wrong in [
            "",
            "00",
            &key.to_string()[1..],
            &format!("{key}0"),
            &"+1".repeat(32),
        ] {
            assert_eq!(wrong.parse::<PublicKey>(), Err(PublicKeyError), "{wrong}");
        }
    }

    #[test]
    fn what_is_signed_names_its_purpose_and_the_version() {
        let message = Challenge([7; 32]).message();
        assert_eq!(&message[..17], b"farpage identify\0");
        assert_eq!(message[17..19], VERSION.to_le_bytes());
        assert_eq!(message[19..], [7; 32]);
    }
}
