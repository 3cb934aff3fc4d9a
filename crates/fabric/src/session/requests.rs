//! What requests are to a client: which may be asked again, and how what they gave is given back.

use farpage_wire::{Request, Response, control::Lease};

/// The memory that an answer speaks of.
pub(super) fn leases_of(answer: &Response) -> &[Lease] {
    match answer {
        Response::Granted { extent } => std::slice::from_ref(extent),
        Response::Opened { extents, .. } => extents,
        _ => &[],
    }
}

/// What takes a request back that succeeded when nobody waited for its answer any more, if it gave
/// no memory.
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
            | Request::Remove { .. }
            | Request::Names { .. }
    )
}

/// Whether a request gives memory or a name, which somebody has to give back.
pub(super) fn gives(request: &Request) -> bool {
    matches!(
        request,
        Request::Grant { .. } | Request::Open { .. } | Request::Claim { .. }
    )
}

/// Whether asking twice does what asking once does. The binding that a lost answer was about is
/// this client's own; so is a claim, and what is given has a number.
pub(super) fn may_repeat(request: &Request) -> bool {
    gives(request)
        || matches!(
            request,
            Request::Renew
                | Request::Contents { .. }
                | Request::Stat
                | Request::Publish { .. }
                | Request::Disclaim { .. }
        )
}
