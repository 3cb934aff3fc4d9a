//! Reasons, for people, why RDMA is of no use on this machine, and the remedies.

use std::io;

use super::verbs;

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
pub(super) fn explain_start(error: &io::Error) -> String {
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
pub(super) fn explain_pair(error: &io::Error) -> String {
    format!("the RDMA device has no queue pair for us: {error}")
}

/// Explains why memory could not be registered.
pub(super) fn explain_registration(bytes: u64, error: &io::Error) -> String {
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
