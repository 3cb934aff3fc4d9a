//! [`Domains`]: the protection domains of a listener's sessions.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use farpage_signals::Mutex;
use farpage_wire::SessionId;

use super::verbs::{Device, Pd};

/// The domains of the sessions of one listener. Registrations and connections hold them.
#[derive(Debug, Default)]
pub(super) struct Domains(Mutex<HashMap<SessionId, Weak<Pd>>>);

impl Domains {
    /// Returns the session's domain: the same one as long as anything of the session lives in it.
    pub(super) fn of(&self, session: SessionId, device: Device) -> Result<Arc<Pd>, String> {
        let mut domains = self.0.lock();
        if let Some(pd) = domains.get(&session).and_then(Weak::upgrade) {
            return match pd.device() == device {
                true => Ok(pd),
                false => Err(
                    "the session's memory is registered with another device of the server: connect to the same address".to_owned(),
                ),
            };
        }
        domains.retain(|_, pd| pd.strong_count() > 0);
        let pd = Pd::new(device)
            .map_err(|error| format!("the server has no protection domain left: {error}"))?;
        domains.insert(session, Arc::downgrade(&pd));
        Ok(pd)
    }
}
