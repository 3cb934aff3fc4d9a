//! One operation at a time: [`transfer`].
//!
//! The rule it keeps: a transfer waits for a server, so no I/O queue makes one.

use farpage_fabric::{Channel, ChannelError, Op, regmem::RegBuf};

use crate::io_queue::sleep;

/// Carries out one operation on a channel that has no other, and waits for it. Returns its buffer.
///
/// # Errors
/// The channel's.
pub(crate) fn transfer(
    channel: &mut dyn Channel<RegBuf>,
    op: Op<RegBuf>,
) -> Result<RegBuf, ChannelError> {
    assert!(channel.post(op).is_ok(), "a channel takes one operation");
    let mut done = Vec::new();
    while channel.poll(&mut done) == 0 {
        let wait = channel.wait();
        sleep(wait.poll_fd().as_mut_slice(), wait.until);
    }
    let completion = done.pop().expect("poll returned one");
    completion.result.map(|()| completion.buf)
}
