//! Parts of an earlier process, as a start takes them over.
//!
//! The rule it keeps: settings that decide where lent bytes are stay as they were.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use farpage_fabric::{
    host::{Origin, Transport},
    server::{KeptConnection, Listener},
};
use farpage_wire::Persistence;
use tracing::warn;

use crate::{
    durable::DurableNames,
    handover::{Descriptors, HandedDurable, Handover, HandoverError},
    tier::Tier,
};

/// Divides kept connections among `listeners`: each goes to the first of its transport, or to the
/// first of all.
pub(super) fn divide(
    listeners: Vec<Listener>,
    kept: Vec<KeptConnection>,
) -> Vec<(Listener, Vec<KeptConnection>)> {
    let mut all: Vec<_> = listeners.into_iter().map(|it| (it, Vec::new())).collect();
    for connection in kept {
        let is_its = |it: &(Listener, Vec<_>)| it.0.transport() == connection.transport;
        let place = all.iter().position(is_its).unwrap_or(0);
        match all.get_mut(place) {
            Some((_, its)) => its.push(connection),
            None => warn!("a client's connection is closed, since no endpoint is left"),
        }
    }
    debug_assert!(
        (all.iter()).all(|(_, its)| its.iter().all(|it| it.transport != Transport::Rdma))
    );
    all
}

/// Takes over the directory of names.
///
/// # Errors
/// [`HandoverError`]: the settings name another directory, or none.
pub(super) fn take_durable(
    handed: Option<HandedDurable>,
    persist: Option<&(PathBuf, Persistence)>,
    descriptors: &mut Descriptors,
) -> Result<Option<DurableNames>, HandoverError> {
    let none = || "none".to_owned();
    let before = handed.as_ref().map(|it| it.directory.clone());
    let now = persist.map(|(directory, _)| directory.display().to_string());
    if before != now {
        return Err(HandoverError::Setting {
            setting: "--persist",
            before: before.unwrap_or_else(none),
            now: now.unwrap_or_else(none),
        });
    }
    let Some((handed, (directory, when))) = handed.zip(persist) else {
        return Ok(None);
    };
    let lock = descriptors.take(handed.lock)?;
    let directory: &Path = directory;
    DurableNames::take_over(directory, *when, handed, lock)
        .map(Some)
        .map_err(|error| HandoverError::State(format!("{}: {error}", directory.display())))
}

/// Takes over what is outside of memory.
///
/// # Errors
/// [`HandoverError`]: the settings have changed.
pub(super) fn take_tier(
    handed: &mut Handover,
    bytes: (u64, u64),
    directory: &Path,
    weights: HashMap<Origin, u32>,
) -> Result<Arc<Tier>, HandoverError> {
    let Some(tier) = &mut handed.server.tier else {
        return Err(HandoverError::Setting {
            setting: "--spill",
            before: "none".to_owned(),
            now: directory.display().to_string(),
        });
    };
    Tier::take_over(tier, &mut handed.descriptors, bytes, directory, weights)
}
