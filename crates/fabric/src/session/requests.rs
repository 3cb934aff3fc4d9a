//! Properties of requests: which may be repeated, how their gifts are given back, and which take
//! several answers.

use farpage_wire::{
    NamedRegion, Request, Response,
    control::{Lease, NAMES_PER_ANSWER},
};

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
            | Request::Promise { .. }
            | Request::Persist { .. }
            | Request::Open { .. }
            | Request::Read { .. }
            | Request::Readers { .. }
            | Request::Remove { .. }
            | Request::Names { .. }
    )
}

/// True if a request gives memory or a name, which must be given back.
pub(crate) fn gives(request: &Request) -> bool {
    matches!(
        request,
        Request::Grant { .. } | Request::Open { .. } | Request::Claim { .. } | Request::Read { .. }
    )
}

/// True if sending the request twice has the effect of sending it once. A repeated `Publish`,
/// `Promise` or `Claim` meets this client's own binding, promise or claim. Requests that give
/// memory are numbered.
pub(super) fn may_repeat(request: &Request) -> bool {
    gives(request)
        || matches!(
            request,
            Request::Renew
                | Request::Contents { .. }
                | Request::Stat
                | Request::Publish { .. }
                | Request::Promise { .. }
                | Request::Persist { .. }
                | Request::Disclaim { .. }
                | Request::Readers { .. }
        )
}

/// Upper bound of listed names. A server that lists more is taken for one that never ends.
const MAX_NAMES: usize = 1 << 20;

/// Asks for names until all have come. Returns an answer of another kind as the error.
pub(super) fn all_names<E>(
    mut call: impl FnMut(Request) -> Result<Response, E>,
) -> Result<Vec<NamedRegion>, Box<Result<Response, E>>> {
    let mut all = Vec::new();
    loop {
        let after = (all.last()).map(|last: &NamedRegion| (last.owner, last.name.clone()));
        match call(Request::Names { after }) {
            Ok(Response::Names(names)) => {
                let key = |named: &NamedRegion| (named.owner, named.name.clone());
                let ascend =
                    (all.last().into_iter().chain(&names)).is_sorted_by(|a, b| key(a) < key(b));
                // Checked because a server could answer for ever.
                if !ascend || all.len() + names.len() > MAX_NAMES {
                    return Err(Box::new(Ok(Response::Names(names))));
                }
                let is_last = names.len() < NAMES_PER_ANSWER;
                all.extend(names);
                if is_last {
                    return Ok(all);
                }
            }
            other => return Err(Box::new(other)),
        }
    }
}
