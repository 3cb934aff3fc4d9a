//! [`Endpoint`]: the address of a memory server, as people write it.

use std::{fmt, path::PathBuf, str::FromStr};

use serde::{Deserialize, Serialize};

crate::debug_as_display!(EndpointError);

/// Address of a memory server, and the way that its bytes travel.
///
/// ```
/// use farpage_wire::Endpoint;
///
/// let endpoint: Endpoint = "tcp://10.0.0.2:7400".parse()?;
/// assert_eq!(endpoint.to_string(), "tcp://10.0.0.2:7400");
/// assert!("http://10.0.0.2".parse::<Endpoint>().is_err());
/// # Ok::<(), farpage_wire::EndpointError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Endpoint {
    /// `shm:///run/farpage.sock`: the same host, memory shared over this Unix socket.
    Shm(PathBuf),
    /// `tcp://host:7400`: any network. An IPv6 address stands in brackets in the text and without
    /// them here.
    Tcp {
        /// Name or address.
        host: String,
        /// Port; 0 asks a listener for any free one.
        port: u16,
    },
    /// `rdma://host:7400`: a network adapter that reads and writes the server's memory itself. The
    /// host is the address of an RDMA interface.
    Rdma {
        /// Name or address.
        host: String,
        /// Port; 0 asks a listener for any free one.
        port: u16,
    },
    /// `auto://host:7400`: a client's choice of rdma where it works, else tcp. The client's log
    /// names the choice and its reason.
    Auto {
        /// Name or address.
        host: String,
        /// Port, the same for rdma and tcp.
        port: u16,
    },
    /// `sim:seed`: a deterministic server inside this process, for tests.
    Sim(u64),
}

/// Text that is no endpoint.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is not an endpoint: {reason}; write shm:///run/farpage.sock, tcp://host:7400, rdma://host:7400 or auto://host:7400"
)]
pub struct EndpointError {
    text: String,
    reason: &'static str,
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let wrong = |reason| EndpointError {
            text: text.to_owned(),
            reason,
        };
        if let Some(path) = text.strip_prefix("shm://") {
            // sockaddr_un holds 108 bytes with the terminating zero.
            return match path {
                _ if !path.starts_with('/') || path.ends_with('/') => {
                    Err(wrong("the socket path must be absolute"))
                }
                _ if path.len() > 107 => Err(wrong("a socket path has at most 107 bytes")),
                _ if path.contains('\0') => Err(wrong("a path has no zero byte")),
                _ => Ok(Self::Shm(path.into())),
            };
        }
        for (scheme, endpoint) in NETWORKS {
            if let Some(address) = text.strip_prefix(scheme) {
                let (host, port) = host_and_port(address).map_err(wrong)?;
                return Ok(endpoint(host, port));
            }
        }
        if let Some(seed) = text.strip_prefix("sim:") {
            return seed
                .parse()
                .map(Self::Sim)
                .map_err(|_| wrong("the seed must be a number"));
        }
        Err(wrong("unknown scheme"))
    }
}

/// Constructor of an endpoint from a host and a port.
type OfNetwork = fn(String, u16) -> Endpoint;

/// The schemes that name a host and a port.
const NETWORKS: [(&str, OfNetwork); 3] = [
    ("tcp://", |host, port| Endpoint::Tcp { host, port }),
    ("rdma://", |host, port| Endpoint::Rdma { host, port }),
    ("auto://", |host, port| Endpoint::Auto { host, port }),
];

fn host_and_port(address: &str) -> Result<(String, u16), &'static str> {
    let (host, port) = address.rsplit_once(':').ok_or("the port is missing")?;
    let port = port
        .parse()
        .map_err(|_| "the port must be a number below 65536")?;
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    match bare.unwrap_or(host) {
        "" => Err("the host is missing"),
        host if host.contains(',') => Err("it is a list; name each server by itself"),
        host if host.contains(':') != bare.is_some() => {
            Err("an IPv6 address, and nothing else, stands in brackets")
        }
        host if host.contains(['/', '[', ']', '\0', '@']) || host.contains(char::is_whitespace) => {
            Err("the host has a character that no host name has")
        }
        host => Ok((host.to_owned(), port)),
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, host, port) = match self {
            Self::Shm(path) => return write!(f, "shm://{}", path.display()),
            Self::Sim(seed) => return write!(f, "sim:{seed}"),
            Self::Tcp { host, port } => ("tcp", host, port),
            Self::Rdma { host, port } => ("rdma", host, port),
            Self::Auto { host, port } => ("auto", host, port),
        };
        match host.contains(':') {
            true => write!(f, "{scheme}://[{host}]:{port}"),
            false => write!(f, "{scheme}://{host}:{port}"),
        }
    }
}

impl TryFrom<String> for Endpoint {
    type Error = EndpointError;

    fn try_from(text: String) -> Result<Self, EndpointError> {
        text.parse()
    }
}

impl From<Endpoint> for String {
    fn from(endpoint: Endpoint) -> Self {
        endpoint.to_string()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn accepted_forms_come_back_as_written() {
        for text in [
            "shm:///run/farpage.sock",
            "tcp://host:7400",
            "tcp://10.0.0.2:0",
            "tcp://[::1]:7400",
            "rdma://10.99.0.1:7400",
            "rdma://[fe80::1]:0",
            "auto://host:7400",
            "sim:42",
        ] {
            let endpoint: Endpoint = text.parse().expect(text);
            assert_eq!(endpoint.to_string(), text);
        }
    }

    #[test]
    fn an_error_names_the_text_and_the_accepted_forms() {
        for text in [
            "",
            "host:7400",
            "http://host:1",
            "tcp://host",
            "tcp://:1",
            "tcp://host:70000",
            "tcp://::1:7400",
            "tcp://[h]:1",
            "tcp://a/b:1",
            "rdma://host",
            "auto://",
            "shm://relative",
            "shm:///",
            "sim:",
            "sim:x",
        ] {
            let error = text.parse::<Endpoint>().expect_err(text).to_string();
            assert!(error.starts_with(&format!("`{text}`")), "{error}");
            for form in [
                "shm:///run/farpage.sock",
                "tcp://host:7400",
                "rdma://host:7400",
                "auto://host:7400",
            ] {
                assert!(error.contains(form), "{error}");
            }
            // Simulated servers are for tests alone.
            assert_eq!(error.contains("sim:"), text.starts_with("sim:"), "{error}");
        }
    }

    #[test]
    fn a_list_is_called_one() {
        let error = "tcp://a:1,tcp://b:2".parse::<Endpoint>().unwrap_err();
        let text = error.to_string();
        assert!(text.contains("name each server by itself"), "{text}");
    }

    proptest! {
        #[test]
        fn whatever_parses_prints_as_something_that_parses_to_the_same(text in "(shm://|tcp://|rdma://|auto://|sim:)?[ -~]{0,40}") {
            if let Ok(endpoint) = text.parse::<Endpoint>() {
                prop_assert_eq!(endpoint.to_string().parse::<Endpoint>(), Ok(endpoint));
            }
        }
    }
}
