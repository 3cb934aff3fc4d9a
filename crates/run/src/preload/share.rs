//! Share of this process in the budget, if `farpage run --children` divides it.
//!
//! The rule it keeps: memory that is asked back is given back before the answer. A thread of our
//! own listens. Unless the whole budget is this process's, the thread checks ten times a second
//! whether the program wants more.
//!
//! The wire is described in `shares.rs`.

use std::{
    io::{Error, ErrorKind, Read, Write},
    net::Shutdown,
    os::{fd::AsRawFd, unix::net::UnixStream},
    sync::{
        atomic::{AtomicI32, Ordering},
        mpsc::{SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use farpage::{ByteSize, Runtime};

use crate::{
    descriptors, say_once, small,
    state::{self, State},
};

const WANTS: u8 = 1;
const HAS: u8 = 2;

/// Time within which other programs must give the first share back.
const PATIENCE: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(100);
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Descriptor of the connection. A child made by `fork` closes its copy.
static CONNECTION: AtomicI32 = AtomicI32::new(-1);

/// Connection to the launcher, which divides the budget.
pub(crate) struct Share {
    stream: UnixStream,
    bytes: u64,
    /// Bytes of the whole budget.
    budget: u64,
    /// The thread, which waits for [`keep`](Share::keep). A thread that starts later may wait for
    /// the loader's lock, whose holder may wait for the arena.
    listener: SyncSender<(Share, Runtime)>,
}

impl Drop for Share {
    /// Gives the share back. With in-thread faults a close alone would not: the filter of system
    /// calls refuses it.
    fn drop(&mut self) {
        // Fails where the launcher is gone.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Share {
    /// Connects to the launcher. A share is taken by [`take`](Self::take). `is_programs`: the
    /// connection is in the program's table, of which a child made by `fork` gets a copy.
    pub(crate) fn connect(socket: &str, is_programs: bool) -> Result<Share, String> {
        let stream = UnixStream::connect(socket).map_err(|error| no(&error))?;
        // Here already: the first call of a function that we interpose waits for the loader's lock.
        let patient = stream.set_read_timeout(Some(PATIENCE));
        patient.map_err(|error| no(&error))?;
        if is_programs {
            CONNECTION.store(stream.as_raw_fd(), Ordering::Relaxed);
        }
        let (listener, listening) = sync_channel::<(Share, Runtime)>(1);
        let thread = thread::Builder::new().name("farpage-share".into());
        let listen = move || {
            if let Ok((share, runtime)) = listening.recv() {
                share.listen(&runtime);
            }
        };
        farpage_tables::spawn(thread, listen).map_err(|error| no(&error))?;
        Ok(Share {
            stream,
            bytes: 0,
            budget: 0,
            listener,
        })
    }

    /// Waits for the first share, and gives it to the runtime, before the arena is made: that is
    /// ordinary memory up to its budget. The share goes back with the connection, unless it is
    /// [kept](Self::keep).
    pub(crate) fn take(&mut self, runtime: &Runtime) -> Result<(), String> {
        self.budget = runtime.stats().pager.budget_bytes;
        self.bytes = self.first().map_err(|error| no(&error))?;
        runtime.set_budget(ByteSize(self.bytes));
        small::set_budget(self.bytes);
        Ok(())
    }

    /// Keeps the runtime to the share from now on, and asks for as much as the program allocates.
    pub(crate) fn keep(self, runtime: Runtime) -> Result<(), String> {
        let listener = self.listener.clone();
        let sent = listener.send((self, runtime));
        sent.map_err(|_| "the thread that keeps to a share of the budget has ended".to_owned())
    }

    /// Asks for a share, and waits for it.
    fn first(&mut self) -> std::io::Result<u64> {
        self.say(WANTS, 0)?;
        match read(&mut self.stream) {
            Ok(0) => {
                let without = match state::has_children_interposed() {
                    true => ", or run without --children",
                    false => "",
                };
                Err(Error::other(format!(
                    "too many programs share the budget: each needs 4 MiB at least; raise --budget{without}"
                )))
            }
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                Err(Error::other("farpage run has ended with its program"))
            }
            Err(error) if is_timeout(&error) => Err(Error::other(format!(
                "none became free within {} s: other programs have it pinned, or are stopped; raise --budget",
                PATIENCE.as_secs()
            ))),
            share => share,
        }
    }

    fn listen(mut self, runtime: &Runtime) {
        let (mut wants, mut is_made) = (None, false);
        loop {
            let look = (self.bytes < self.budget).then_some(LOOK);
            if self.stream.set_read_timeout(look).is_err() {
                return;
            }
            let told = match read(&mut self.stream) {
                Ok(bytes) => Some(bytes),
                Err(error) if is_timeout(&error) => None,
                // The launcher is gone: the present share stays.
                Err(_) => return,
            };
            // What this process uses does not become another one's.
            if told.unwrap_or(self.bytes) < self.budget && self.report(&mut wants).is_err() {
                return;
            }
            if let Some(bytes) = told {
                self.bytes = self.obey(runtime, bytes);
            }
            if self.bytes == self.budget {
                wants = None;
            }
            // A share that came while the arena was made.
            if let Some(state) = state::get().filter(|_| !is_made) {
                is_made = true;
                keep_ordinary(state, self.bytes);
            }
        }
    }

    /// Tells the launcher what the program uses, unless that is about what it `wants` already.
    fn report(&mut self, wants: &mut Option<u64>) -> std::io::Result<()> {
        let used = state::get().map_or(0, |state| {
            state.arena.used_bytes() + state.arena.beside_bytes()
        }) as u64;
        // A quarter more, so that growth by small steps needs few messages.
        let now = (used + used / 4).next_multiple_of(1 << 20);
        if wants.is_none_or(|wants| now > wants || now < wants / 2) {
            *wants = Some(now);
            self.say(WANTS, now)?;
        }
        Ok(())
    }

    /// Changes the budget, and reports it when no pages exceed it any more.
    fn obey(&mut self, runtime: &Runtime, bytes: u64) -> u64 {
        let since = Instant::now();
        let keep_ordinary = || {
            if let Some(state) = state::get() {
                keep_ordinary(state, bytes);
            }
        };
        // A smaller share comes after memory beyond it is under paging, and a larger one before.
        if bytes < self.bytes {
            keep_ordinary();
        }
        small::set_budget(bytes);
        while runtime.set_budget(ByteSize(bytes)) > ByteSize(0) {
            // Pages may exceed it for ever, if pinned. Another program may give more meanwhile.
            if since.elapsed() > LOOK && self.is_told_more() {
                return bytes;
            }
            thread::sleep(LOOK_AGAIN);
        }
        keep_ordinary();
        let _ = self.say(HAS, bytes);
        bytes
    }

    fn is_told_more(&self) -> bool {
        let mut fd = libc::pollfd {
            fd: self.stream.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one descriptor, which is looked at and not waited for.
        unsafe { libc::poll(&raw mut fd, 1, 0) > 0 }
    }

    fn say(&mut self, kind: u8, bytes: u64) -> std::io::Result<()> {
        let mut message = [kind; 9];
        message[1..].copy_from_slice(&bytes.to_le_bytes());
        self.stream.write_all(&message)
    }
}

/// Puts memory under paging, unless as much as is allocated may stay ordinary.
fn keep_ordinary(state: &State, bytes: u64) {
    if let Err(error) = state.arena.keep_ordinary_to(bytes as usize) {
        say_once(&format!("memory exceeds the share of the budget: {error}"));
    }
}

fn no(error: &Error) -> String {
    format!("there is no share of the budget: {error}")
}

/// Closes the copy of the connection in a child made by `fork`, by whatever call, so that the
/// parent's end is seen.
pub(crate) fn begin_child() {
    let connection = CONNECTION.swap(-1, Ordering::Relaxed);
    if connection >= 0 {
        descriptors::close(connection as u32);
    }
}

fn is_timeout(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn read(stream: &mut UnixStream) -> std::io::Result<u64> {
    let mut message = [0; 9];
    stream.read_exact(&mut message)?;
    let bytes = message[1..].as_array().expect("8 of 9 bytes");
    Ok(u64::from_le_bytes(*bytes))
}
