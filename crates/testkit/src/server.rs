//! Memory servers in the test's own process.

use std::{env, time::Duration};

use farpage_memserver::{RunningServer, Server};
use farpage_wire::Endpoint;
use tempfile::TempDir;

use crate::wait::test_name;

/// Variable of the environment with the address of an RDMA device of this machine.
pub const RDMA_ADDRESS: &str = "FARPAGE_TEST_RDMA_ADDRESS";

/// Returns an endpoint over TCP on a free port of this machine.
pub fn tcp() -> Endpoint {
    "tcp://127.0.0.1:0".parse().unwrap()
}

/// Returns an endpoint over shared memory whose socket lies in `directory`.
pub fn socket_in(directory: &TempDir) -> Endpoint {
    Endpoint::Shm(directory.path().join("s"))
}

/// Returns an endpoint on this machine's RDMA device. `None` if no device is named: says that the
/// test is skipped.
pub fn rdma() -> Option<Endpoint> {
    let Ok(host) = env::var(RDMA_ADDRESS) else {
        eprintln!(
            "SKIPPED: {}: {RDMA_ADDRESS} does not name an RDMA device's address; `cargo xtask vm` runs a test with one",
            test_name()
        );
        return None;
    };
    Some(format!("rdma://{host}:0").parse().unwrap())
}

/// Starts a server at `endpoint` that waits a tenth of a second at its end for its clients.
pub fn serve(endpoint: &Endpoint, capacity_bytes: usize) -> RunningServer {
    Server::builder()
        .listen(endpoint.clone())
        .capacity(capacity_bytes as u64)
        .grace(Duration::from_millis(100))
        .start()
        .unwrap()
}

/// Starts a server over TCP. Returns it with its URL.
pub fn serve_tcp(capacity_bytes: usize) -> (RunningServer, String) {
    let server = serve(&tcp(), capacity_bytes);
    let url = server.endpoints()[0].to_string();
    (server, url)
}

/// Server that listens on both fabrics.
pub struct Both {
    /// The server.
    pub server: RunningServer,
    /// Endpoint of the server over shared memory.
    pub shm: Endpoint,
    /// Endpoint of the server over TCP.
    pub tcp: Endpoint,
    _directory: TempDir,
}

impl Both {
    /// Starts a server with leases of length `lease`, which outlive a broken connection by as much.
    pub fn start(capacity_bytes: u64, lease: Duration) -> Both {
        Both::start_with(capacity_bytes, lease, lease)
    }

    /// Starts a server whose clients may come back within `reconnect_grace`.
    pub fn start_with(capacity_bytes: u64, lease: Duration, reconnect_grace: Duration) -> Both {
        Both::start_as(|server| {
            (server.capacity(capacity_bytes))
                .lease(lease)
                .reconnect_grace(reconnect_grace)
        })
    }

    /// Starts a server with the settings that `set` makes.
    pub fn start_as(set: impl FnOnce(Server) -> Server) -> Both {
        let directory = tempfile::tempdir().unwrap();
        let server = Server::builder()
            .listen(socket_in(&directory))
            .listen(tcp())
            .grace(Duration::from_millis(100));
        let server = set(server).start().unwrap();
        let [shm, tcp] = server.endpoints().to_vec().try_into().unwrap();
        Both {
            server,
            shm,
            tcp,
            _directory: directory,
        }
    }

    /// Returns the endpoints of the server, over shared memory and over TCP.
    pub fn endpoints(&self) -> [&Endpoint; 2] {
        [&self.shm, &self.tcp]
    }
}
