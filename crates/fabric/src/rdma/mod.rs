//! The fabric for which the others stand in: one-sided READ, WRITE and atomics by a network adapter (InfiniBand, RoCE, iWARP).
//!
//! The rule it keeps: the server's processor takes no part in them, and a key opens only what is leased to the client that was given
//! it. Connections are made by the connection manager, so that addresses, path and MTU are found and never assumed. Each session has a
//! protection domain at the server, in which its extents are registered for as long as they are leased; data connections belong to
//! the domain of their session. The control connection is a byte stream over SEND and RECEIVE ([`stream`]), on which control messages travel
//! as on any other; behind an answer that leases memory come its [`RemoteKey`]s.
//!
//! All calls into C are in [`verbs`], which hands safe types to the rest.

mod channel;
mod client;
mod server;
mod stream;
#[cfg(test)]
mod tests;
mod verbs;

use std::io;

use farpage_wire::{
    Endpoint, Secret, SessionId,
    control::{HELLO_BYTES, Hello, Purpose},
};

pub(crate) use self::{
    client::Client,
    server::{Listener, Registration},
    stream::RdmaStream,
};

/// The most bytes that a rejection can carry: what is left of a management datagram of InfiniBand, the least of the networks.
const REJECT_BYTES: usize = 148;

/// What a client says with its request for a connection: the hello, and for data connections the session that they belong to.
/// 56 bytes is what the connection manager leaves us.
#[derive(Debug, PartialEq, Eq)]
struct Greeting {
    hello: Hello,
    claim: Option<(SessionId, Secret)>,
}

impl Greeting {
    const BYTES: usize = HELLO_BYTES + 8 + 16;

    fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..HELLO_BYTES].copy_from_slice(&self.hello.encode());
        if let Some((session, secret)) = &self.claim {
            bytes[HELLO_BYTES..HELLO_BYTES + 8].copy_from_slice(&session.0.to_le_bytes());
            bytes[HELLO_BYTES + 8..].copy_from_slice(&secret.0);
        }
        bytes
    }

    /// Reads a peer's greeting; the connection manager may have padded it with zeros.
    fn decode(bytes: &[u8]) -> Result<Self, farpage_wire::control::ControlDecodeError> {
        let mut exact = [0; Self::BYTES];
        let given = bytes.len().min(Self::BYTES);
        exact[..given].copy_from_slice(&bytes[..given]);
        let (hello, claim) = exact.split_at(HELLO_BYTES);
        let hello = Hello::decode(hello.try_into().expect("split there"))?;
        let (session, secret) = claim.split_at(8);
        let claim = (hello.purpose == Purpose::Data).then(|| {
            (
                SessionId(u64::from_le_bytes(session.try_into().expect("8 bytes"))),
                Secret(secret.try_into().expect("16 bytes")),
            )
        });
        Ok(Self { hello, claim })
    }
}

/// Why RDMA is of no use on this machine, with what to do; `Ok` with the names of its devices otherwise.
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

/// What a failure to begin with the connection manager means.
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

/// What a failure to register memory means.
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

/// The host and port of an endpoint of this fabric.
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
        let control = Greeting {
            hello: Hello::new(Purpose::Control),
            claim: None,
        };
        let data = Greeting {
            hello: Hello::new(Purpose::Data),
            claim: Some((SessionId(7), Secret([9; 16]))),
        };
        for greeting in [control, data] {
            let mut bytes = greeting.encode().to_vec();
            assert!(bytes.len() <= 56);
            bytes.resize(56, 0);
            assert_eq!(Greeting::decode(&bytes), Ok(greeting));
        }
        assert!(Greeting::decode(b"something else").is_err());
    }
}
