//! The memory server: lends its machine's memory to farpage clients, in a process of its own or
//! inside another.
//!
//! The rule it keeps: it decides who may have which memory and nothing else. Moving bytes and
//! parsing frames is the work of `farpage_fabric::server`; only clients know what the bytes mean.
//!
//! ```
//! use farpage_memserver::Server;
//!
//! let server = Server::builder().listen("tcp://127.0.0.1:0".parse()?).capacity(64 << 20).start()?;
//! println!("clients may connect to {}", server.endpoints()[0]);
//! assert_eq!(server.stat().granted_bytes, 0);
//! server.shutdown();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod config;
mod descriptors;
mod durable;
mod handover;
mod server;
mod signals;
mod state;
mod tier;

pub use durable::PersistError;
pub use farpage_fabric::server::SocketAccess;
pub use handover::{Handover, HandoverError, ServiceManager, Successor};
pub use server::{RunningServer, Server, StartError, TiersError};
pub use signals::Signals;
pub use state::{Limits, State};
