//! The fabric for which the others stand in: one-sided READ, WRITE and atomics by a network adapter
//! (InfiniBand, RoCE, and iWARP with immediate data).
//!
//! The rule it keeps: the server's processor takes no part in an operation, and a key opens only
//! what is leased to the client that was given it. Connections are made by the connection manager,
//! so that addresses, path and MTU are found and never assumed. Each session has a protection
//! domain at the server, in which its extents are registered for as long as they are leased; data
//! connections belong to the domain of their session. The control connection is a byte stream
//! through two rings ([`control`]) and carries the same control messages as any other; behind an
//! answer that leases memory come its [`RemoteKey`]s.
//!
//! Memory that the server may move elsewhere is reached through [`paged`].
//!
//! All calls into C are in [`verbs`], which hands safe types to the rest.

mod bounce;
mod bundle;
mod channel;
mod client;
mod control;
mod paged;
mod server;
mod stream;
#[cfg(test)]
mod tests;
mod verbs;

use std::io;

use farpage_wire::{
    Endpoint, Secret, SessionId,
    control::{ControlDecodeError, HELLO_BYTES, Hello, Purpose, RemoteKey},
};

pub(crate) use self::{
    client::{Client, Route, channel, channels, paged_channel},
    control::ASK_AGAIN,
    server::{Call, Listener},
    stream::RdmaStream,
};

/// The most bytes that a rejection can carry: what is left of a management datagram of InfiniBand,
/// the least of the networks.
const REJECT_BYTES: usize = 148;

/// Words of a client with its request for a connection, hello included. The connection manager has
/// room for 56 bytes.
#[derive(Debug, PartialEq, Eq)]
enum Greeting {
    /// A control connection, and the key of the client's ring. The acceptance carries the key of
    /// the server's ring.
    Control(RemoteKey),
    /// A data connection, the session that it belongs to, and its line.
    Data(SessionId, Secret, u64),
}

impl Greeting {
    const BYTES: usize = HELLO_BYTES + 8 + 16 + 8;

    fn hello(&self) -> Hello {
        Hello::new(match self {
            Self::Control(_) => Purpose::Control,
            Self::Data(..) => Purpose::Data,
        })
    }

    fn encode(&self) -> [u8; Self::BYTES] {
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
    fn decode(bytes: &[u8]) -> Result<Self, ControlDecodeError> {
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

fn encode_key(key: RemoteKey) -> [u8; KEY_BYTES] {
    let mut bytes = [0; KEY_BYTES];
    bytes[..8].copy_from_slice(&key.address.to_le_bytes());
    bytes[8..].copy_from_slice(&key.rkey.to_le_bytes());
    bytes
}

fn decode_key(bytes: &[u8]) -> Result<RemoteKey, ControlDecodeError> {
    let bytes = bytes.get(..KEY_BYTES).ok_or(ControlDecodeError::Hello)?;
    let (address, rkey) = bytes.split_at(8);
    Ok(RemoteKey {
        address: u64::from_le_bytes(address.try_into().expect("8 bytes")),
        rkey: u32::from_le_bytes(rkey.try_into().expect("4 bytes")),
    })
}

/// Returns the names of this machine's RDMA devices, or why RDMA is of no use here and what to do
/// about it.
pub(crate) fn devices() -> Result<Vec<String>, String> {
    match verbs::device_names() {
        names if names.is_empty() => Err(
            "no RDMA device found: `ibv_devices` lists them; load the driver of your adapter, or make a software device with \
             `modprobe rdma_rxe && rdma link add rxe0 type rxe netdev <interface>`, or use tcp://"
                .to_owned(),
        ),
        names => Ok(names),
    }
}

/// Explains why work with the connection manager could not begin.
fn explain_start(error: &io::Error) -> String {
    match devices() {
        Err(reason) => reason,
        Ok(names) => format!(
            "there is {}, but the RDMA connection manager cannot be used ({error}): is the module rdma_ucm loaded, and may this user open \
             /dev/infiniband/rdma_cm?",
            names.join(", ")
        ),
    }
}

/// Explains why a queue pair could not be made.
fn explain_pair(error: &io::Error) -> String {
    format!("the RDMA device has no queue pair for us: {error}")
}

/// Explains why memory could not be registered.
fn explain_registration(bytes: u64, error: &io::Error) -> String {
    use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
    let advice = match (error.raw_os_error(), getrlimit(Resource::RLIMIT_MEMLOCK)) {
        (Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM), Ok((soft, _)))
            if soft != RLIM_INFINITY =>
        {
            format!(
                "; an adapter's memory is locked, and this process may lock {} KiB: raise the limit (`ulimit -l unlimited`, LimitMEMLOCK=infinity \
             in a systemd unit, `memlock` in /etc/security/limits.conf) or grant CAP_IPC_LOCK",
                soft >> 10
            )
        }
        _ => String::new(),
    };
    format!("cannot register {bytes} bytes with the adapter: {error}{advice}")
}

/// Returns the host and port of an endpoint of this fabric.
fn address(endpoint: &Endpoint) -> (&str, u16) {
    match endpoint {
        Endpoint::Rdma { host, port } => (host, *port),
        _ => unreachable!("asked for with an endpoint of this fabric only"),
    }
}

#[cfg(test)]
mod greeting_tests {
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
