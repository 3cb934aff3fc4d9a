//! [`Route`]: the way of a data connection, and the channels that are opened over routes.

use std::{io, os::fd::AsFd, sync::Arc, time::Instant};

use farpage_wire::{Endpoint, Secret, SessionId};

use super::{
    bundle::{Bundle, RdmaChannel},
    channel::{BOUNCE_BYTES, CHANNEL, QUEUES_MAX, SendQueue},
    client::{Client, SessionDomain},
    connect::{establish, resolve, unusable},
    greeting::Greeting,
    paged::PagedChannel,
    reasons::explain_pair,
    verbs::{Cq, Depths, Device, Id, LocalMemory, Pair},
};
use crate::{Buf, Channel, ConnectError, attachment::Attachment, channel::Group, log::later};

impl Client {
    /// Finds the way for a data connection.
    pub(crate) fn route(
        self: &Arc<Self>,
        endpoint: &Endpoint,
        claim: (SessionId, Secret, u64),
        attachment: Attachment,
        until: Instant,
    ) -> Result<Route, ConnectError> {
        let id = resolve(endpoint, until)?;
        Ok(Route {
            device: id.device().expect("a resolved id has a device"),
            id,
            endpoint: endpoint.clone(),
            attachment,
            client: Arc::clone(self),
            claim,
            until,
        })
    }
}

/// The way to a server for a data connection that is to be made.
pub(crate) struct Route {
    id: Id,
    device: Device,
    endpoint: Endpoint,
    attachment: Attachment,
    client: Arc<Client>,
    claim: (SessionId, Secret, u64),
    until: Instant,
}

impl Route {
    /// Opens the connection as send queue `number` of a bundle, whose completion queue is `cq`.
    fn open<B: Buf>(self, cq: &Arc<Cq>, number: usize) -> Result<SendQueue<B>, ConnectError> {
        let endpoint = &self.endpoint;
        let no_pair = |error: io::Error| unusable(endpoint, explain_pair(&error));
        let SessionDomain { domain, pool } = self.client.home(self.device).map_err(no_pair)?;
        let memory = LocalMemory::new(&pool, &domain.0, BOUNCE_BYTES)
            .map_err(|error| unusable(endpoint, error.to_string()))?;
        let depths = Depths {
            reads_in_flight: self.client.options.reads_in_flight,
            inline: self.client.options.inline,
            ..CHANNEL
        };
        let pair = Pair::new(self.id, domain.0, Arc::clone(cq), depths, Some(memory));
        let pair = pair.map_err(no_pair)?;
        let greeting = Greeting::Data(self.claim.0, self.claim.1, self.claim.2);
        let said = establish(endpoint, &pair, &greeting, self.until)?;
        let notifies = self.client.options.immediate && said.first() == Some(&1);
        let (to, inline_bytes) = (endpoint.to_owned(), pair.inline_bytes());
        let reads_in_flight = pair.reads_in_flight().map_err(no_pair)?;
        later(move || {
            tracing::debug!(
                endpoint = %to,
                reads_in_flight,
                inline_bytes,
                "data connection established"
            );
        });
        Ok(SendQueue::new(
            number,
            self.attachment,
            self.client,
            pair,
            notifies,
        ))
    }
}

/// Opens a data connection with a completion queue of its own.
pub(crate) fn channel<B: Buf>(route: Route) -> Result<Box<dyn Channel<B>>, ConnectError> {
    Ok(Box::new(RdmaChannel(bundle(vec![route])?)))
}

/// Opens a channel to a server that lends more than its memory. `asking` reaches absent bytes.
pub(crate) fn paged_channel<B: Buf>(
    route: Route,
    asking: impl Channel<B> + AsFd + 'static,
) -> Result<Box<dyn Channel<B>>, ConnectError> {
    let (client, endpoint) = (Arc::clone(&route.client), route.endpoint.clone());
    let queue = RdmaChannel(bundle(vec![route])?);
    let channel = PagedChannel::new(client, queue, asking);
    let channel = channel.map_err(|error| unusable(&endpoint, explain_pair(&error)))?;
    Ok(Box::new(channel))
}

/// Opens data connections with one completion queue per adapter. Each route has the number that its
/// channel gets.
pub(crate) fn channels<B: Buf>(routes: Vec<(usize, Route)>) -> Result<Vec<Group<B>>, ConnectError> {
    let mut by_device: Vec<(Device, Vec<usize>, Vec<Route>)> = Vec::new();
    for (number, route) in routes {
        let device = route.device;
        match by_device.iter_mut().find(|known| known.0 == device) {
            Some((_, numbers, routes)) => {
                numbers.push(number);
                routes.push(route);
            }
            None => by_device.push((device, vec![number], vec![route])),
        }
    }
    let bundles = by_device.into_iter().map(|(_, numbers, routes)| {
        Ok(Group {
            channels: Box::new(bundle(routes)?),
            numbers,
        })
    });
    bundles.collect()
}

/// Opens `routes`, at least one and all of one device, with one completion queue.
fn bundle<B: Buf>(routes: Vec<Route>) -> Result<Bundle<B>, ConnectError> {
    let (device, count) = (routes[0].device, routes.len());
    let endpoint = routes[0].endpoint.clone();
    let no_pair = |error: io::Error| unusable(&endpoint, explain_pair(&error));
    let completions = device.completions_max().map_err(no_pair)?;
    let depth = queue_depth(count, completions)
        .map_err(|reason| unusable(&endpoint, format!("{}: {reason}", device.name())))?;
    let cq = Cq::new(device, depth).map_err(no_pair)?;
    let queues = routes.into_iter().enumerate();
    let queues = queues.map(|(number, route)| route.open(&cq, number));
    Bundle::new(Arc::clone(&cq), queues.collect::<Result<_, _>>()?).map_err(no_pair)
}

/// Returns the depth of a completion queue that `channels` channels share, if a device whose queues
/// hold `most` completions has room for it.
fn queue_depth(channels: usize, most: usize) -> Result<usize, String> {
    let fit = (most / CHANNEL.completions()).min(QUEUES_MAX);
    if channels > fit {
        return Err(format!(
            "{channels} channels cannot share one of its completion queues, which hold {most} completions: at most {fit} can"
        ));
    }
    Ok(channels * CHANNEL.completions())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_queue_has_room_for_all_that_its_channels_post_or_is_refused() {
        assert_eq!(queue_depth(1, 64), Ok(64));
        assert_eq!(queue_depth(511, 32_767), Ok(32_704));
        let refusal = queue_depth(512, 32_767).expect_err("one too many");
        assert!(refusal.contains("at most 511"), "{refusal}");
        assert!(queue_depth(QUEUES_MAX, usize::MAX).is_ok());
        assert!(queue_depth(QUEUES_MAX + 1, usize::MAX).is_err());
    }
}
