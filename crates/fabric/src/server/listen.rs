//! [`Listener`]: a bound endpoint. A Unix socket's file is replaced only if no server uses it.

use std::{
    fs, io,
    net::TcpListener,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::{
            fs::{FileTypeExt, MetadataExt, PermissionsExt},
            net::UnixListener,
        },
    },
    path::Path,
    time::Instant,
};

use farpage_wire::Endpoint;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, getsockopt, listen, socket, sockopt,
};

use super::places::{Aim, ConnectionPlace};
use crate::{
    errors::BindError,
    host::{Host, Origin, Peer, Transport},
    log::later,
    rdma,
    stream::{PeerStream, keep_alive},
};

/// A bound endpoint, ready for [`Service::serve`](super::Service::serve). Dropping it removes the
/// file of its Unix socket.
#[derive(Debug)]
pub struct Listener {
    endpoint: Endpoint,
    socket: Socket,
    /// True if the file of a Unix socket is removed at the end.
    removes_file: bool,
}

#[derive(Debug)]
enum Socket {
    /// Socket with the inode of its file, so that only our own file is removed.
    Unix(UnixListener, u64),
    Tcp(TcpListener),
    Rdma(rdma::RdmaListener),
}

/// Number of clients of a Unix socket that may wait to be accepted.
const BACKLOG: i32 = 128;

/// Users that may connect to a shared-memory socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SocketAccess {
    /// The server's user: mode 0600.
    #[default]
    Owner,
    /// The server's user and group: mode 0660.
    Group,
}

/// A client that wants to connect.
pub(super) enum PendingConnection {
    /// Client that the kernel has connected.
    Socket(PeerStream, Peer),
    /// Client for which nothing was made yet.
    Rdma(rdma::ConnectionRequest),
}

impl Listener {
    /// Binds `endpoint`. The file of a Unix socket whose server is dead is replaced. `access` says
    /// who may use the new socket, and does nothing for other transports.
    ///
    /// # Errors
    /// [`BindError`]
    pub fn bind(endpoint: &Endpoint, access: SocketAccess) -> Result<Self, BindError> {
        let name = endpoint.to_string();
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::AddrInUse => BindError::InUse {
                endpoint: name.clone(),
            },
            _ => BindError::Io {
                endpoint: name.clone(),
                source,
            },
        };
        match endpoint {
            Endpoint::Shm(path) => {
                if let Ok(metadata) = fs::symlink_metadata(path) {
                    if !metadata.file_type().is_socket() {
                        return Err(BindError::NotASocket { endpoint: name });
                    }
                    // Never waits: a server that is stopped has its backlog full.
                    match PeerStream::connect(endpoint, Instant::now()) {
                        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                            tracing::info!(
                                endpoint = name,
                                "replacing the socket of a server that is gone"
                            );
                            fs::remove_file(path).map_err(failed)?;
                        }
                        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                            return Err(failed(error));
                        }
                        // Connected, or its backlog is full.
                        _ => return Err(BindError::InUse { endpoint: name }),
                    }
                }
                let (listener, inode) = bind_unix(path, access).map_err(failed)?;
                Ok(Self {
                    endpoint: endpoint.clone(),
                    socket: Socket::Unix(listener, inode),
                    removes_file: true,
                })
            }
            Endpoint::Tcp { host, port } => {
                let listener = TcpListener::bind((host.as_str(), *port)).map_err(failed)?;
                listener.set_nonblocking(true).map_err(failed)?;
                let port = listener.local_addr().map_err(failed)?.port();
                let endpoint = Endpoint::Tcp {
                    host: host.clone(),
                    port,
                };
                Ok(Self {
                    endpoint,
                    socket: Socket::Tcp(listener),
                    removes_file: true,
                })
            }
            Endpoint::Rdma { host, .. } => {
                let listener = rdma::RdmaListener::bind(endpoint)?;
                let endpoint = Endpoint::Rdma {
                    host: host.clone(),
                    port: listener.port(),
                };
                Ok(Self {
                    endpoint,
                    socket: Socket::Rdma(listener),
                    removes_file: true,
                })
            }
            Endpoint::Auto { .. } => Err(BindError::Auto { endpoint: name }),
            Endpoint::Sim(_) => Err(BindError::Simulated { endpoint: name }),
        }
    }

    /// Takes over the listening socket of `endpoint` from an earlier process. The file of a Unix
    /// socket, which is `inode`, stays there until the listener has been
    /// [served](super::Service::serve). `None` if that file is not there any more: nobody can
    /// connect to the socket.
    ///
    /// # Errors
    /// [`BindError`]: the descriptor is no such socket.
    pub fn inherited(
        endpoint: &Endpoint,
        socket: OwnedFd,
        inode: u64,
    ) -> Result<Option<Self>, BindError> {
        let failed = |source| BindError::Io {
            endpoint: endpoint.to_string(),
            source,
        };
        if !getsockopt(&socket, sockopt::AcceptConn).map_err(|errno| failed(errno.into()))? {
            let reason = "the descriptor that was handed over does not listen";
            return Err(failed(io::Error::other(reason)));
        }
        let socket = match endpoint {
            Endpoint::Shm(path) => {
                if !fs::symlink_metadata(path).is_ok_and(|file| file.ino() == inode) {
                    return Ok(None);
                }
                Socket::Unix(socket.into(), inode)
            }
            Endpoint::Tcp { .. } => Socket::Tcp(socket.into()),
            Endpoint::Rdma { .. } | Endpoint::Auto { .. } | Endpoint::Sim(_) => {
                return Err(failed(io::ErrorKind::Unsupported.into()));
            }
        };
        Ok(Some(Self {
            endpoint: endpoint.clone(),
            socket,
            removes_file: false,
        }))
    }

    /// Notes that this process serves the listener, whose file goes with it.
    pub(super) fn is_served(&mut self) {
        if !std::mem::replace(&mut self.removes_file, true) {
            // Clients of a Unix socket see the process that called `listen` last as their peer.
            let again = Backlog::new(BACKLOG).and_then(|backlog| listen(&self.as_fd(), backlog));
            if let Err(errno) = again {
                let endpoint = self.endpoint.clone();
                later(move || tracing::warn!(%endpoint, %errno, "cannot listen anew"));
            }
        }
    }

    /// Checks that a server that moves lent memory elsewhere may listen here.
    ///
    /// # Errors
    /// [`BindError::NoRdma`]: the adapter has no on-demand paging.
    pub fn check_paging(&self) -> Result<(), BindError> {
        match &self.socket {
            Socket::Rdma(listener) => listener.check_paging().map_err(|reason| BindError::NoRdma {
                endpoint: self.endpoint.to_string(),
                reason,
            }),
            Socket::Unix(..) | Socket::Tcp(_) => Ok(()),
        }
    }

    /// Returns the endpoint, with the port that was found when 0 was asked for.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns the number of a Unix socket's file, or 0.
    pub fn inode(&self) -> u64 {
        match self.socket {
            Socket::Unix(_, inode) => inode,
            Socket::Tcp(_) | Socket::Rdma(_) => 0,
        }
    }

    /// Returns the transport of the listener's clients.
    pub fn transport(&self) -> Transport {
        match self.socket {
            Socket::Unix(..) => Transport::Shm,
            Socket::Tcp(_) => Transport::Tcp,
            Socket::Rdma(_) => Transport::Rdma,
        }
    }

    /// Takes the next client that wants to connect. `None` if there is none.
    pub(super) fn accept(&self) -> io::Result<Option<PendingConnection>> {
        let accepted = match &self.socket {
            Socket::Rdma(listener) => return Ok(listener.accept()?.map(PendingConnection::Rdma)),
            Socket::Unix(listener, _) => listener.accept().and_then(|(stream, _)| {
                stream.set_nonblocking(true)?;
                let peer = match getsockopt(&stream, sockopt::PeerCredentials) {
                    Ok(peer) => Peer {
                        name: format!("pid {} of user {}", peer.pid(), peer.uid()),
                        origin: Origin::User(peer.uid()),
                    },
                    Err(_) => Peer::unknown(),
                };
                Ok((PeerStream::Unix(stream), peer))
            }),
            Socket::Tcp(listener) => listener.accept().and_then(|(stream, address)| {
                stream.set_nonblocking(true)?;
                stream.set_nodelay(true)?;
                keep_alive(&stream)?;
                Ok((PeerStream::Tcp(stream), Peer::at(address)))
            }),
        };
        match accepted {
            Ok((stream, peer)) => Ok(Some(PendingConnection::Socket(stream, peer))),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock
                | io::ErrorKind::Interrupted
                | io::ErrorKind::ConnectionAborted => Ok(None),
                _ => Err(error),
            },
        }
    }

    /// Makes the connection of `call`, which has its `place` now. `None` if its client was refused.
    pub(super) fn answer(
        &self,
        call: PendingConnection,
        host: &dyn Host,
        place: &ConnectionPlace,
    ) -> Option<PeerStream> {
        match (call, &self.socket) {
            (PendingConnection::Socket(stream, _), _) => Some(stream),
            (PendingConnection::Rdma(call), Socket::Rdma(listener)) => {
                let admit = |session, secret: &_, line| {
                    host.attach(session, secret)?;
                    place.settle(Aim::Data(session, line))
                };
                let stream = listener.answer(call, host.exchanges(), &admit)?;
                Some(PeerStream::Rdma(Box::new(stream)))
            }
            (PendingConnection::Rdma(_), _) => unreachable!("accepted by a listener of this kind"),
        }
    }
}

impl PendingConnection {
    pub(super) fn peer(&self) -> &Peer {
        match self {
            Self::Socket(_, peer) => peer,
            Self::Rdma(call) => call.peer(),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Socket::Unix(listener, _) => listener.as_fd(),
            Socket::Tcp(listener) => listener.as_fd(),
            Socket::Rdma(listener) => listener.as_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let (Endpoint::Shm(path), Socket::Unix(_, inode)) = (&self.endpoint, &self.socket)
            && self.removes_file
            && fs::symlink_metadata(path).is_ok_and(|metadata| metadata.ino() == *inode)
        {
            // Fails if the file is gone already; a stale file would do no harm either.
            let _ = fs::remove_file(path);
        }
    }
}

/// Binds a Unix socket by hand, because the mode must be right before the socket listens.
fn bind_unix(path: &Path, access: SocketAccess) -> io::Result<(UnixListener, u64)> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    let mode = match access {
        SocketAccess::Owner => 0o600,
        SocketAccess::Group => 0o660,
    };
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    listen(&fd, Backlog::new(BACKLOG)?)?;
    Ok((fd.into(), fs::symlink_metadata(path)?.ino()))
}
