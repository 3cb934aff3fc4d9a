//! [`Hello`]: the first message of a connection, in both directions.
//!
//! The rule it keeps: the layout is the same in every version, so that two versions can always tell
//! each other apart.

use super::frame::ControlDecodeError;
use crate::VERSION;

/// First bytes of every connection, in both directions.
pub const MAGIC: [u8; 8] = *b"farpage\0";

/// Length of an encoded [`Hello`].
pub const HELLO_BYTES: usize = 16;

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Requests and responses of one session.
    Control,
    /// READs and WRITEs of a session that exists.
    Data,
}

/// The first message in each direction.
///
/// Layout, little endian: magic 8, version u16, purpose u8 (1 control, 2 data), 5 zero bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The sender's [`VERSION`].
    pub version: u16,
    /// Purpose of the connection. The server repeats the client's value.
    pub purpose: Purpose,
}

impl Hello {
    /// Makes this build's hello.
    pub fn new(purpose: Purpose) -> Self {
        Self {
            version: VERSION,
            purpose,
        }
    }

    /// Returns the bytes on the wire.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.version.to_le_bytes());
        bytes[10] = match self.purpose {
            Purpose::Control => 1,
            Purpose::Data => 2,
        };
        bytes
    }

    /// Reads a peer's hello.
    ///
    /// # Errors
    /// Another protocol, another version (checked before the rest), or a malformed rest.
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, ControlDecodeError> {
        if bytes[..8] != MAGIC {
            return Err(ControlDecodeError::NotFarpage);
        }
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        if version != VERSION {
            return Err(ControlDecodeError::Version {
                theirs: version,
                ours: VERSION,
            });
        }
        let purpose = match bytes[10] {
            1 => Purpose::Control,
            2 => Purpose::Data,
            _ => return Err(ControlDecodeError::Hello),
        };
        if bytes[11..] != [0; 5] {
            return Err(ControlDecodeError::Hello);
        }
        Ok(Self { version, purpose })
    }
}
