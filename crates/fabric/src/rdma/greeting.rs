//! [`Greeting`]: words of a client with its request for a connection, and the keys of rings that
//! both sides send.

use farpage_wire::{
    Secret, SessionId,
    control::{ControlDecodeError, HELLO_BYTES, Hello, Purpose, RemoteKey},
};

/// Words of a client with its request for a connection, hello included. The connection manager has
/// room for 56 bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    /// A control connection, and the key of the client's ring. The acceptance carries the key of
    /// the server's ring.
    Control(RemoteKey),
    /// A data connection, the session that it belongs to, and its line.
    Data(SessionId, Secret, u64),
}

impl Greeting {
    const BYTES: usize = HELLO_BYTES + 8 + 16 + 8;

    pub(super) fn hello(&self) -> Hello {
        Hello::new(match self {
            Self::Control(_) => Purpose::Control,
            Self::Data(..) => Purpose::Data,
        })
    }

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let (hello, rest) = bytes.split_at_mut(HELLO_BYTES);
        hello.copy_from_slice(&self.hello().encode());
        match self {
            Self::Control(ring) => rest[..KEY_BYTES].copy_from_slice(&encode_key(*ring)),
            Self::Data(session, secret, line) => {
                rest[..8].copy_from_slice(&session.0.to_le_bytes());
                rest[8..24].copy_from_slice(&secret.0);
                rest[24..].copy_from_slice(&line.to_le_bytes());
            }
        }
        bytes
    }

    /// Reads a peer's greeting; the connection manager may have padded it with zeros.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, ControlDecodeError> {
        let mut exact = [0; Self::BYTES];
        let given = bytes.len().min(Self::BYTES);
        exact[..given].copy_from_slice(&bytes[..given]);
        let (hello, rest) = exact.split_at(HELLO_BYTES);
        let hello = Hello::decode(hello.try_into().expect("split there"))?;
        Ok(match hello.purpose {
            Purpose::Control => Self::Control(decode_key(rest)?),
            Purpose::Data => {
                let (session, rest) = rest.split_at(8);
                let (secret, line) = rest.split_at(16);
                Self::Data(
                    SessionId(u64::from_le_bytes(session.try_into().expect("8 bytes"))),
                    Secret(secret.try_into().expect("16 bytes")),
                    u64::from_le_bytes(line.try_into().expect("8 bytes")),
                )
            }
        })
    }
}

/// Length of the address and key of a ring, as the connection manager carries them.
const KEY_BYTES: usize = 12;

pub(super) fn encode_key(key: RemoteKey) -> [u8; KEY_BYTES] {
    let mut bytes = [0; KEY_BYTES];
    bytes[..8].copy_from_slice(&key.address.to_le_bytes());
    bytes[8..].copy_from_slice(&key.rkey.to_le_bytes());
    bytes
}

pub(super) fn decode_key(bytes: &[u8]) -> Result<RemoteKey, ControlDecodeError> {
    let bytes = bytes.get(..KEY_BYTES).ok_or(ControlDecodeError::Hello)?;
    let (address, rkey) = bytes.split_at(8);
    Ok(RemoteKey {
        address: u64::from_le_bytes(address.try_into().expect("8 bytes")),
        rkey: u32::from_le_bytes(rkey.try_into().expect("4 bytes")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greetings_survive_padding_and_fit_the_connection_manager() {
        let control = Greeting::Control(RemoteKey {
            address: u64::MAX - 1,
            rkey: 0x0102_0304,
        });
        let data = Greeting::Data(SessionId(7), Secret([9; 16]), u64::MAX - 2);
        for greeting in [control, data] {
            let mut bytes = greeting.encode().to_vec();
            assert!(bytes.len() <= 56);
            bytes.resize(56, 0);
            assert_eq!(Greeting::decode(&bytes), Ok(greeting));
        }
        assert!(Greeting::decode(b"something else").is_err());
    }
}
