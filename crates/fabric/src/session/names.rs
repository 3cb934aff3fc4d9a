//! The names of a server, asked for until all have come.

use farpage_wire::{NamedRegion, Request, Response, control::NAMES_PER_ANSWER};

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
