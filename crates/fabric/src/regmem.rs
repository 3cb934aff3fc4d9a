//! Registered memory that is reused explicitly: [`RegPool`] and its buffers, [`RegBuf`].
//!
//! The rule it keeps: registered memory has an owner that outlives its registration. Slabs are
//! mapped, registered once and kept. Buffers are carved from them, move into operations, come back
//! with their completions, and return to the pool when they are dropped. The same type serves
//! fabrics without an adapter, so no caller asks which fabric it is on.
//!
//! Message-passing libraries cache registrations by address instead. Memory that is freed and
//! mapped again has the old address and other pages, and the adapter goes on writing to the old
//! ones (Levy et al., "The Case for Explicit Reuse Semantics for RDMA Communication"). Here the
//! compiler refuses such a program. A buffer that is in an operation is out of reach:
//!
//! ```compile_fail,E0382
//! # use farpage_fabric::{ExtentId, Op, Verb, regmem::{RegPool, RegPoolOptions}};
//! let pool = RegPool::new([], RegPoolOptions::default());
//! let mut buf = pool.acquire(4096).expect("memory");
//! let op = Op { tag: 0, verb: Verb::Read, extent: ExtentId(1), offset: 0, len: 4096, buf };
//! buf.as_mut()[0] = 1; // it has moved into the operation
//! # drop(op);
//! ```
//!
//! Imported memory cannot be freed, resized or mapped anew while it is registered, neither by its
//! former owner
//!
//! ```compile_fail,E0382
//! # use farpage_fabric::regmem::{RegPool, RegPoolOptions};
//! let pool = RegPool::new([], RegPoolOptions::default());
//! let memory = vec![0; 4096];
//! let buf = pool.import(memory).expect("registered");
//! drop(memory); // the buffer owns it
//! # drop(buf);
//! ```
//!
//! nor by an owner that only lent it:
//!
//! ```compile_fail,E0597
//! # use farpage_fabric::regmem::{RegPool, RegPoolOptions};
//! let pool = RegPool::new([], RegPoolOptions::default());
//! let mut memory = vec![0; 4096];
//! // A loan may end before the buffer does.
//! let buf = pool.import(&mut memory).expect("registered");
//! # drop(buf);
//! ```
//!
//! A program that works:
//!
//! ```
//! # use farpage_fabric::regmem::{RegPool, RegPoolOptions};
//! let pool = RegPool::new([], RegPoolOptions::default());
//! let mut buf = pool.acquire(4096)?;
//! buf.as_mut().fill(7);
//! drop(buf);
//! let again = pool.acquire(4096)?;
//! assert_eq!((pool.stats().slabs, pool.stats().cache_hits), (1, 1));
//! # drop(again);
//! # Ok::<(), farpage_fabric::regmem::RegError>(())
//! ```

mod buffer;
mod error;
mod pool;
mod registrar;
mod slab;

pub use self::{
    buffer::RegBuf,
    error::RegError,
    pool::{MAX_BUF_BYTES, RegPool, RegPoolOptions, RegPoolStats},
    registrar::{Access, DomainId, Keys, MemoryRegistration, NullRegistrar, Registrar},
};
