//! Properties of requests: which may be repeated, and how their gifts are given back.

use farpage_wire::{Request, Response, control::Lease};

/// Returns the leases in an answer.
pub(super) fn leases_of(answer: &Response) -> &[Lease] {
    match answer {
        Response::Granted { extent } => std::slice::from_ref(extent),
        Response::Opened { extents, .. } => extents,
        Response::Reading { leases, .. } => leases,
        _ => &[],
    }
}

/// Returns the number of descriptors that come with a lease over shared memory: that of the memory
/// and, if it is paged, that of its segments' words.
pub(super) fn fds_of(lease: &Lease) -> usize {
    1 + usize::from(lease.paged)
}

/// Returns the request that undoes `request`, if it succeeded after its caller gave up. Memory that
/// `request` gave is released instead.
pub(super) fn taking_back(request: &Request) -> Option<Request> {
    match request {
        Request::Claim { name, .. } | Request::Open { name, .. } => {
            Some(Request::Disclaim { name: name.clone() })
        }
        _ => None,
    }
}

pub(super) fn is_about_a_name(request: &Request) -> bool {
    matches!(
        request,
        Request::Claim { .. }
            | Request::Publish { .. }
            | Request::Open { .. }
            | Request::Read { .. }
            | Request::Readers { .. }
            | Request::Remove { .. }
            | Request::Names { .. }
    )
}

/// True if a request gives memory or a name, which must be given back.
pub(super) fn gives(request: &Request) -> bool {
    matches!(
        request,
        Request::Grant { .. } | Request::Open { .. } | Request::Claim { .. } | Request::Read { .. }
    )
}

/// True if sending the request twice has the effect of sending it once. A repeated `Publish` or
/// `Claim` meets this client's own binding or claim. Requests that give memory are numbered.
pub(super) fn may_repeat(request: &Request) -> bool {
    gives(request)
        || matches!(
            request,
            Request::Renew
                | Request::Contents { .. }
                | Request::Stat
                | Request::Publish { .. }
                | Request::Disclaim { .. }
                | Request::Readers { .. }
        )
}
