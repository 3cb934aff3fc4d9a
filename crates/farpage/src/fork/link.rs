//! Connections between a process made by `fork` and the keeper in its parent: [`connect`],
//! [`send`], [`receive`].
//!
//! The rule it keeps: a process that `fork` has just made sends without memory of its own and
//! without a lock, which another thread of its parent may have held.

use std::{
    io, mem,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    ptr,
    time::Duration,
};

/// Descriptors that one message carries at most.
const DESCRIPTORS_MAX: usize = 2;
/// Size of the control data of a message.
// SAFETY: computes a size.
const CONTROL_BYTES: usize = unsafe {
    libc::CMSG_SPACE((DESCRIPTORS_MAX * mem::size_of::<RawFd>()) as u32)
        + libc::CMSG_SPACE(mem::size_of::<libc::ucred>() as u32)
} as usize;
/// `F_SETSIG`, which the `libc` crate lacks.
const F_SETSIG: libc::c_int = 10;
/// Connections that wait to be accepted, at most.
const BACKLOG: libc::c_int = 128;

/// Name of a keeper's socket, which lies in no file system.
#[derive(Clone, Copy)]
pub(super) struct LinkName {
    address: libc::sockaddr_un,
    len: libc::socklen_t,
}

/// Kind of a message. Its value is a number that the kind explains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Kind {
    /// The sender is about to fork; the number of the image that its child will have.
    Image = 1,
    /// The sender is a child of this number and is about to fork. Answered by the same message.
    Child = 2,
    /// The sender has been made by `fork`; its number. With its userfaultfd and its memory.
    Armed = 3,
    /// Message like [`Armed`](Kind::Armed), of a sender that cannot be called to start an agent.
    Deaf = 4,
    /// The sender is the agent of the child of this number. Reports follow.
    Agent = 5,
    /// Message that is not received while a child without descriptors lives: see [`tether`].
    Tether = 6,
}

impl Kind {
    const ALL: [Kind; 6] = [
        Kind::Image,
        Kind::Child,
        Kind::Armed,
        Kind::Deaf,
        Kind::Agent,
        Kind::Tether,
    ];
}

/// Message as it travels.
#[repr(C)]
pub(super) struct Parcel {
    kind: u64,
    value: u64,
}

impl Parcel {
    pub(super) fn new(kind: Kind, value: u64) -> Parcel {
        let kind = kind as u64;
        Parcel { kind, value }
    }
}

/// Control data of a message, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// Message that has arrived.
pub(super) struct Received {
    pub(super) kind: Kind,
    pub(super) value: u64,
    pub(super) descriptors: Vec<OwnedFd>,
    /// Id of the process that has sent the message. `None` if it has no id here.
    pub(super) sender: Option<libc::pid_t>,
}

impl LinkName {
    /// Makes a name that nobody can guess.
    pub(super) fn new() -> LinkName {
        let text = format!("farpage-{}-{:016x}", std::process::id(), random());
        // SAFETY: all zeros is a valid address.
        let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        // The first byte of the path is zero: a name that is no file's.
        for (to, from) in address.sun_path[1..].iter_mut().zip(text.bytes()) {
            *to = from.cast_signed();
        }
        let len = mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + text.len();
        LinkName {
            address,
            len: len as libc::socklen_t,
        }
    }

    pub(super) fn as_ptr(&self) -> *const libc::sockaddr {
        (&raw const self.address).cast()
    }

    /// Returns the length of the address.
    pub(super) fn len(&self) -> libc::socklen_t {
        self.len
    }
}

/// Returns 64 random bits.
pub(super) fn random() -> u64 {
    let mut random = 0_u64;
    // SAFETY: writes to the variable.
    unsafe { libc::getrandom((&raw mut random).cast(), mem::size_of::<u64>(), 0) };
    random
}

fn socket(more: libc::c_int) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | more;
    // SAFETY: makes a descriptor.
    let made = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if made < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: made just now, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(made) })
}

/// Makes two sockets that are connected to each other, and do not block.
fn pair() -> io::Result<[OwnedFd; 2]> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let mut made = [-1; 2];
    // SAFETY: writes to the variable.
    match unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, made.as_mut_ptr()) } {
        // SAFETY: made just now, and nobody else's.
        0 => Ok(made.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Waits for connections under `name`. The socket does not block.
pub(super) fn listen(name: &LinkName) -> io::Result<OwnedFd> {
    let listener = socket(libc::SOCK_NONBLOCK)?;
    ask_for_senders(listener.as_fd())?;
    // SAFETY: an address that lasts for the call.
    let bound = unsafe { libc::bind(listener.as_raw_fd(), name.as_ptr(), name.len) };
    // SAFETY: changes the socket alone.
    if bound != 0 || unsafe { libc::listen(listener.as_raw_fd(), BACKLOG) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(listener)
}

/// Makes messages say which process has sent them.
fn ask_for_senders(socket: BorrowedFd<'_>) -> io::Result<()> {
    let (number, yes) = (socket.as_raw_fd(), 1 as libc::c_int);
    let len = mem::size_of_val(&yes) as libc::socklen_t;
    let (level, option) = (libc::SOL_SOCKET, libc::SO_PASSCRED);
    // SAFETY: reads the variable.
    match unsafe { libc::setsockopt(number, level, option, (&raw const yes).cast(), len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Accepts a connection. Whoever knows no number of an image or of a child gets nothing by it.
///
/// # Errors
/// `WouldBlock`: none waits.
pub(super) fn accept(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let (listener, nobody) = (listener.as_raw_fd(), ptr::null_mut());
    // SAFETY: makes a descriptor.
    let made = unsafe { libc::accept4(listener, nobody, ptr::null_mut(), flags) };
    if made < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: made just now, and nobody else's.
    let accepted = unsafe { OwnedFd::from_raw_fd(made) };
    // Before 6.16 connections do not have the listener's setting.
    ask_for_senders(accepted.as_fd())?;
    Ok(accepted)
}

/// Connects to the keeper of this name, without waiting for it.
pub(super) fn connect(name: &LinkName) -> io::Result<OwnedFd> {
    let socket = socket(libc::SOCK_NONBLOCK)?;
    // SAFETY: an address that lasts for the call.
    match unsafe { libc::connect(socket.as_raw_fd(), name.as_ptr(), name.len) } {
        0 => Ok(socket),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the part of memory that a parcel is.
fn vector_of(parcel: &mut Parcel) -> libc::iovec {
    libc::iovec {
        iov_base: ptr::from_mut(parcel).cast(),
        iov_len: mem::size_of::<Parcel>(),
    }
}

/// Returns a message of one part, without control data. It points to the part.
fn message_of(vector: &mut libc::iovec) -> libc::msghdr {
    // SAFETY: all zeros is a message without anything.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (vector, 1);
    message
}

/// Sends a message with copies of `descriptors`. Returns false if nobody receives it.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    kind: Kind,
    value: u64,
    descriptors: &[BorrowedFd<'_>],
) -> bool {
    assert!(descriptors.len() <= DESCRIPTORS_MAX, "no room for more");
    let mut parcel = Parcel::new(kind, value);
    let mut control = Control([0; CONTROL_BYTES]);
    let mut vector = vector_of(&mut parcel);
    let mut message = message_of(&mut vector);
    if !descriptors.is_empty() {
        let bytes = (descriptors.len() * mem::size_of::<RawFd>()) as u32;
        message.msg_control = (&raw mut control).cast();
        // SAFETY: the control data have room for a header and the descriptors.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(bytes) as usize;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(bytes) as usize;
            let data = libc::CMSG_DATA(header).cast::<RawFd>();
            for (at, descriptor) in descriptors.iter().enumerate() {
                data.add(at).write_unaligned(descriptor.as_raw_fd());
            }
        }
    }
    loop {
        // SAFETY: the message and what it points to last for the call.
        let sent =
            unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
        if sent >= 0 {
            return true;
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return false;
        }
    }
}

/// Receives a message. `Ok(None)`: the other side has closed the connection, or speaks otherwise.
///
/// # Errors
/// `WouldBlock`: no message has arrived on a socket that does not block.
pub(super) fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<Received>> {
    let mut parcel = Parcel { kind: 0, value: 0 };
    let mut control = Control([0; CONTROL_BYTES]);
    let mut vector = vector_of(&mut parcel);
    let mut message = message_of(&mut vector);
    (message.msg_control, message.msg_controllen) = ((&raw mut control).cast(), CONTROL_BYTES);
    // SAFETY: the message and what it points to last for the call.
    let received =
        unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    if received < 0 {
        return Err(io::Error::last_os_error());
    }
    let (mut descriptors, mut sender) = (Vec::new(), None);
    // SAFETY: the kernel has written whole headers, and as many descriptors as they say, which are
    // this process's from now on.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            let about = ((*header).cmsg_level, (*header).cmsg_type);
            if about == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let bytes = (*header).cmsg_len - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                for at in 0..bytes / mem::size_of::<RawFd>() {
                    descriptors.push(OwnedFd::from_raw_fd(data.add(at).read_unaligned()));
                }
            }
            if about == (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) {
                let credentials = libc::CMSG_DATA(header).cast::<libc::ucred>();
                sender = Some(credentials.read_unaligned().pid).filter(|&pid| pid > 0);
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    let mut kinds = Kind::ALL.into_iter();
    let kind = kinds.find(|&kind| kind as u64 == parcel.kind);
    let is_whole = received as usize == mem::size_of::<Parcel>();
    Ok(kind.filter(|_| is_whole).map(|kind| Received {
        kind,
        value: parcel.value,
        descriptors,
        sender,
    }))
}

/// Waits until a message has come, or the other side has closed the connection. Returns false if
/// that takes longer than `patience`.
pub(super) fn is_readable(socket: BorrowedFd<'_>, patience: Duration) -> bool {
    happens(socket, libc::POLLIN, patience)
}

/// Waits until one of `events` has happened, or the other side has closed the connection. Returns
/// false if that takes longer than `patience`.
fn happens(socket: BorrowedFd<'_>, events: libc::c_short, patience: Duration) -> bool {
    let mut fd = libc::pollfd {
        fd: socket.as_raw_fd(),
        events,
        revents: 0,
    };
    // SAFETY: one descriptor, which lasts for the call.
    unsafe { libc::poll(&raw mut fd, 1, patience.as_millis() as libc::c_int) == 1 }
}

/// Makes the end of the other side kill this process. From now on the other side must not send.
pub(super) fn kill_at_end(socket: BorrowedFd<'_>) {
    // SAFETY: always succeeds.
    kill_by(socket, unsafe { libc::getpid() });
    // The other side may have ended before.
    if happens(socket, 0, Duration::ZERO) {
        // SAFETY: ends this process.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
}

/// Makes all that happens to `socket` from now on kill `process`.
fn kill_by(socket: BorrowedFd<'_>, process: libc::pid_t) {
    let number = socket.as_raw_fd();
    // SAFETY: changes the socket alone.
    unsafe {
        libc::fcntl(number, F_SETSIG, libc::SIGKILL);
        libc::fcntl(number, libc::F_SETOWN, process);
        let flags = libc::fcntl(number, libc::F_GETFL);
        libc::fcntl(number, libc::F_SETFL, flags | libc::O_ASYNC);
    }
}

/// Makes the end of this process kill `process`, which has closed all of its descriptors, and keeps
/// its `uffd` open until then: absent pages would read as zeros without it. Dropping what is
/// returned kills `process`, too; [`untether`] does not.
///
/// 1. `ours` kills `process` when `theirs`, which is returned, is closed.
/// 2. A message to `theirs` that nobody receives holds `ours` and `uffd`. The kernel drops the
///    messages to a socket after it has closed the socket: the kill comes before the end of `uffd`.
///
/// # Errors
/// `ETOOMANYREFS`: the user's processes have as many descriptors on their way as `ulimit -n` says.
pub(super) fn tether(process: libc::pid_t, uffd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let [ours, theirs] = pair()?;
    if !send(ours.as_fd(), Kind::Tether, 0, &[ours.as_fd(), uffd]) {
        return Err(io::Error::last_os_error());
    }
    kill_by(ours.as_fd(), process);
    Ok(theirs)
}

/// Frees the process that `theirs` [tethers](tether): it has ended or called `exec`, and another
/// program goes on in its place.
pub(super) fn untether(theirs: OwnedFd) {
    // Dropping what is received closes `ours` before `theirs`: no signal is sent then.
    drop(receive(theirs.as_fd()));
}
