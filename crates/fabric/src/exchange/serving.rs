//! The data connections of a host that [exchanges](crate::host::Host::exchanges).
//!
//! The rule it keeps: a connection whose last batch was small leaves those that follow to the
//! shared thread ([`super::poller`]), where several clients may wait for one another. Everything
//! else is served here, by the steps that serve pages.

use std::sync::{Arc, mpsc::RecvTimeoutError};

use super::{
    poller::{Delegation, Poller, SMALL_BYTES},
    ring::Board,
};
use crate::server::{Batch, CloseReason, Connection, DataClient, DataService, LOOK};

impl Connection {
    /// Serves batches, as [`data`](Self::data) does, and READs that wait for a number.
    pub(crate) fn exchange(&self, client: DataClient<'_>) -> Result<(), CloseReason> {
        let (mut service, mut batch) = (DataService::new(client)?, Batch::default());
        let _counted = self.service.exchange.count();
        let stays = || !client.held.is_replaced() && !self.service.shutdown.has_begun();
        let mut is_small = false;
        loop {
            if is_small && let Some(poller) = self.service.exchange.poller() {
                delegate(&mut service, poller)?;
                is_small = false;
            } else if service.next(&mut batch)? {
                service.run(&mut batch)?;
                if batch.written_bytes() > 0 {
                    self.service.host.written(client.session);
                }
                batch.look(|span, condition| Board::reaches(span, condition, &stays));
                is_small = batch.payload_bytes(|_, _| true) < SMALL_BYTES as u64 / 2;
                service.reply(&mut batch)?;
            } else {
                return Ok(());
            }
        }
    }
}

/// Lets `poller` serve the small batches, until the connection has to go on by itself.
fn delegate(service: &mut DataService<'_>, poller: &Poller) -> Result<(), CloseReason> {
    let client = service.client;
    let here = poller.serve(Delegation {
        stream: Arc::clone(&client.connection.stream),
        host: Arc::clone(&client.connection.service.host),
        traffic: Arc::clone(&client.connection.service.traffic),
        session: client.session,
        sequence: service.sequence,
        come: service.incoming.take_all(),
    });
    let back = loop {
        match here.recv_timeout(LOOK) {
            Ok(back) => break back?,
            Err(RecvTimeoutError::Timeout) => {
                if let Err(reason) = client.check_session() {
                    // Nothing of the session is served any more when this returns.
                    client.connection.stream.close();
                    let _ = here.recv();
                    return Err(reason);
                }
            }
            Err(RecvTimeoutError::Disconnected) => {
                let what = "the thread that serves all connections has failed".to_owned();
                return Err(CloseReason::Unable(what));
            }
        }
    };
    service.sequence = back.sequence;
    service.incoming.put_back(&back.come);
    client.send(&back.unsent)
}
