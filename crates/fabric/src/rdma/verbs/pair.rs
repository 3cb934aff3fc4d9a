//! [`Pair`], a queue pair with all that belongs to it, and its work requests.

use std::{ffi::c_int, io, ptr, sync::Arc};

use farpage_wire::Atomic;
use rdma_sys as sys;

use super::{
    connection::Id,
    errno::check,
    memory::{LocalMemory, Pd, Sge},
    queue::Cq,
};

/// Upper bound of work requests that one ring of the adapter's doorbell hands over.
pub(in crate::rdma) const POSTLIST: usize = 16;

/// Number of times that the adapter sends again: at half a second each, a dead peer is an error
/// within four seconds. 7 would mean for ever with some adapters.
const RETRIES: u8 = 6;

/// Number of times that the adapter sends again to a peer without a ready receive, which a peer
/// that keeps the protocol of control connections always has. 7 means for ever. The accepting
/// side's own queue pair gets the connecting side's number, which may be a lie: nothing there waits
/// for an adapter without a deadline.
const RNR_RETRIES: u8 = 6;

/// Bytes of inline data asked for: WRITEs that fit cost the adapter no read of local memory.
const INLINE_BYTES: u32 = 220;

/// Request for as many READs in flight as both devices can have.
pub(in crate::rdma) const READS_IN_FLIGHT_MAX: u8 = 0xff;

/// Sizes of a [`Pair`].
#[derive(Clone, Copy, Debug)]
pub(in crate::rdma) struct Depths {
    pub(in crate::rdma) sends: usize,
    pub(in crate::rdma) receives: usize,
    /// READs of ours, and of the peer, in flight at a time, as far as both devices can.
    pub(in crate::rdma) reads_in_flight: u8,
    /// True if short WRITEs travel inside their work requests.
    pub(in crate::rdma) inline: bool,
}

impl Depths {
    /// Returns the number of work requests of both kinds, each of which may leave a completion.
    pub(in crate::rdma) const fn completions(self) -> usize {
        self.sends + self.receives
    }
}

/// A reliable-connected queue pair with its memory and its connection, and the completion queue
/// that it may share. When it is dropped, the peer hears of it.
#[derive(Debug)]
pub(in crate::rdma) struct Pair {
    /// Dropped first: destroys the queue pair, so that the adapter cannot reach what follows.
    id: Id,
    queue: Arc<Cq>,
    memory: Option<LocalMemory>,
    pd: Arc<Pd>,
    inline_bytes: usize,
    /// READs in flight that were asked for.
    reads_in_flight_max: u8,
    alive: bool,
}

/// Operation of the adapter.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdma) enum Opcode {
    Read {
        address: u64,
        rkey: u32,
    },
    Write {
        address: u64,
        rkey: u32,
    },
    /// An atomic. The old value comes into the local memory, which is 8 bytes long.
    Atomic {
        address: u64,
        rkey: u32,
        atomic: Atomic,
    },
    /// A WRITE with immediate data: it takes a receive of the peer's, whose completion says that
    /// the bytes are placed.
    WriteNotify {
        address: u64,
        rkey: u32,
    },
}

/// One work request.
#[derive(Clone, Debug)]
pub(in crate::rdma) struct WorkRequest {
    /// Tag of the completion.
    pub(in crate::rdma) tag: u64,
    pub(in crate::rdma) opcode: Opcode,
    pub(in crate::rdma) local: Sge,
    /// True if a success is reported, too. A failure always is.
    pub(in crate::rdma) signalled: bool,
}

impl WorkRequest {
    /// Placeholder in lists.
    pub(in crate::rdma) const NONE: Self = Self {
        tag: 0,
        opcode: Opcode::Read {
            address: 0,
            rkey: 0,
        },
        local: Sge {
            address: 0,
            bytes: 0,
            lkey: 0,
        },
        signalled: false,
    };
}

impl Pair {
    /// Makes a queue pair for a connection that is resolved or asked for. `queue` is of the same
    /// device, and has room for the completions of `depths`.
    pub(in crate::rdma) fn new(
        id: Id,
        pd: Arc<Pd>,
        queue: Arc<Cq>,
        depths: Depths,
        memory: Option<LocalMemory>,
    ) -> io::Result<Self> {
        // Inline is a favour: a device that has less, or none, says no to the whole queue pair.
        let mut inline_bytes = if depths.inline { INLINE_BYTES } else { 0 };
        loop {
            // SAFETY: plain data, and zeros mean "none" in every field.
            let mut attributes: sys::ibv_qp_init_attr = unsafe { std::mem::zeroed() };
            attributes.send_cq = queue.raw.as_ptr();
            attributes.recv_cq = queue.raw.as_ptr();
            attributes.qp_type = sys::ibv_qp_type::IBV_QPT_RC;
            attributes.cap = sys::ibv_qp_cap {
                max_send_wr: depths.sends.max(1) as u32,
                max_recv_wr: depths.receives.max(1) as u32,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline_bytes,
            };
            // SAFETY: id, domain and queue are alive and of one device; the queue pair is destroyed
            // with the id, before them.
            let made = check(unsafe {
                sys::rdma_create_qp(id.raw.as_ptr(), pd.raw.as_ptr(), &raw mut attributes)
            });
            match made {
                // A device may give more than it was asked for.
                Ok(()) => break inline_bytes = attributes.cap.max_inline_data.min(inline_bytes),
                Err(_) if inline_bytes > 0 => inline_bytes = 0,
                Err(error) => return Err(error),
            }
        }
        Ok(Self {
            id,
            queue,
            memory,
            pd,
            inline_bytes: inline_bytes as usize,
            reads_in_flight_max: depths.reads_in_flight,
            alive: true,
        })
    }

    /// Asks the peer for the connection. The outcome is an event.
    pub(in crate::rdma) fn connect(&self, words: &[u8]) -> io::Result<()> {
        let mut parameters = parameters(words, self.reads_in_flight_max);
        // SAFETY: the id is ours and resolved; the parameters and the bytes that they point to are
        // only read during the call.
        check(unsafe { sys::rdma_connect(self.id.raw.as_ptr(), &raw mut parameters) })
    }

    /// Grants a peer the connection that it asked for.
    pub(in crate::rdma) fn accept(&self, words: &[u8]) -> io::Result<()> {
        let mut parameters = parameters(words, self.reads_in_flight_max);
        // SAFETY: as above; the id was asked for by a peer.
        check(unsafe { sys::rdma_accept(self.id.raw.as_ptr(), &raw mut parameters) })
    }

    pub(in crate::rdma) fn id(&self) -> &Id {
        &self.id
    }

    pub(in crate::rdma) fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Returns the memory that work requests refer to.
    pub(in crate::rdma) fn memory(&self) -> &LocalMemory {
        self.memory
            .as_ref()
            .expect("a pair that moves bytes was made with memory")
    }

    /// Returns the number of READs and atomics in flight that the two devices agreed on.
    pub(in crate::rdma) fn reads_in_flight(&self) -> io::Result<u8> {
        let mask = sys::ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC;
        Ok(self.ask(mask)?.max_rd_atomic)
    }

    /// Returns the most bytes of one packet's payload.
    pub(in crate::rdma) fn mtu_bytes(&self) -> io::Result<u32> {
        let mtu = self.ask(sys::ibv_qp_attr_mask::IBV_QP_PATH_MTU)?.path_mtu;
        // 1 stands for 256 bytes, and each further step for twice as many.
        Ok(128 << mtu)
    }

    fn ask(&self, what: sys::ibv_qp_attr_mask) -> io::Result<sys::ibv_qp_attr> {
        let qp = self.qp()?;
        // SAFETY: plain data.
        let (mut attributes, mut initial) = unsafe {
            (
                std::mem::zeroed::<sys::ibv_qp_attr>(),
                std::mem::zeroed::<sys::ibv_qp_init_attr>(),
            )
        };
        let mask = what.0 as c_int;
        // SAFETY: the queue pair is alive, and both structures are ours to be written.
        check(unsafe { sys::ibv_query_qp(qp, &raw mut attributes, mask, &raw mut initial) })?;
        Ok(attributes)
    }

    /// Returns the number of bytes that the device lets a work request carry in itself.
    pub(in crate::rdma) fn inline_bytes(&self) -> usize {
        self.inline_bytes
    }

    /// True if `work` is a WRITE that can travel inside its work request.
    fn is_inline(&self, work: &WorkRequest) -> bool {
        matches!(
            work.opcode,
            Opcode::Write { .. } | Opcode::WriteNotify { .. }
        ) && work.local.bytes as usize <= self.inline_bytes
    }

    /// Hands work to the adapter, all with one ring of its doorbell.
    ///
    /// # Safety
    /// Local memory that the pair does not own stays registered and nobody else's until the work
    /// has completed or [`kill`](Self::kill) has returned.
    ///
    /// # Errors
    /// The library's error; the connection is then of no use.
    ///
    /// # Panics
    /// With more than [`POSTLIST`] requests.
    pub(in crate::rdma) unsafe fn post(&mut self, works: &[WorkRequest]) -> io::Result<()> {
        assert!(works.len() <= POSTLIST, "{} work requests", works.len());
        if works.is_empty() {
            return Ok(());
        }
        let qp = self.qp()?;
        // SAFETY: plain data, and zeros are valid in every field.
        let mut sges: [sys::ibv_sge; POSTLIST] = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut requests: [sys::ibv_send_wr; POSTLIST] = unsafe { std::mem::zeroed() };
        let first = requests.as_mut_ptr();
        for (i, work) in works.iter().enumerate() {
            sges[i] = work.local.sge();
            // SAFETY: below POSTLIST, as asserted.
            let request = unsafe { &mut *first.add(i) };
            request.wr_id = work.tag;
            request.sg_list = &raw mut sges[i];
            request.num_sge = 1;
            let remote = |address, rkey| sys::wr_t {
                rdma: sys::rdma_t {
                    remote_addr: address,
                    rkey,
                },
            };
            match work.opcode {
                Opcode::Read { address, rkey } => {
                    request.opcode = sys::ibv_wr_opcode::IBV_WR_RDMA_READ;
                    request.wr = remote(address, rkey);
                }
                Opcode::Write { address, rkey } => {
                    request.opcode = sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
                    request.wr = remote(address, rkey);
                }
                Opcode::Atomic {
                    address,
                    rkey,
                    atomic,
                } => {
                    let (opcode, compare_add, swap) = match atomic {
                        Atomic::FetchAdd(summand) => {
                            (sys::ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD, summand, 0)
                        }
                        Atomic::CompareSwap { expected, new } => {
                            (sys::ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP, expected, new)
                        }
                    };
                    request.opcode = opcode;
                    request.wr.atomic = sys::atomic_t {
                        remote_addr: address,
                        compare_add,
                        swap,
                        rkey,
                    };
                }
                Opcode::WriteNotify { address, rkey } => {
                    request.opcode = sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
                    request.wr = remote(address, rkey);
                }
            }
            if work.signalled {
                request.send_flags |= sys::ibv_send_flags::IBV_SEND_SIGNALED.0;
            }
            if self.is_inline(work) {
                request.send_flags |= sys::ibv_send_flags::IBV_SEND_INLINE.0;
            }
            if i + 1 < works.len() {
                // SAFETY: below POSTLIST, as asserted.
                request.next = unsafe { first.add(i + 1) };
            }
        }
        let mut refused = ptr::null_mut();
        // SAFETY:
        // - the queue pair is alive, and the list is ours for the call, which copies what it keeps;
        // - the pair owns the memory, which outlives the queue pair, or the caller promises for
        //   it.
        check(unsafe { sys::ibv_post_send(qp, first, &raw mut refused) })
    }

    /// Posts a receive for one notifying WRITE of the peer. The receive has no buffer: a message
    /// that brings bytes of its own ends the connection.
    pub(in crate::rdma) fn post_receive(&mut self, tag: u64) -> io::Result<()> {
        let qp = self.qp()?;
        let mut request = sys::ibv_recv_wr {
            wr_id: tag,
            next: ptr::null_mut(),
            sg_list: ptr::null_mut(),
            num_sge: 0,
        };
        let mut refused = ptr::null_mut();
        // SAFETY: the queue pair is alive, and the request is ours for the call, which copies it.
        check(unsafe { sys::ibv_post_recv(qp, &raw mut request, &raw mut refused) })
    }

    /// Returns the queue to which the pair's work reports its end.
    pub(in crate::rdma) fn queue(&self) -> &Cq {
        &self.queue
    }

    /// Ends the connection in an orderly way; what is posted comes back flushed.
    pub(in crate::rdma) fn disconnect(&self) {
        if self.alive {
            self.id.disconnect();
        }
    }

    /// Destroys the queue pair: when this returns, the adapter touches none of our memory any more,
    /// and nothing completes.
    pub(in crate::rdma) fn kill(&mut self) {
        if std::mem::take(&mut self.alive) {
            self.id.disconnect();
            // SAFETY: `alive` says that it has not been destroyed before.
            unsafe { sys::rdma_destroy_qp(self.id.raw.as_ptr()) };
        }
    }

    fn qp(&self) -> io::Result<*mut sys::ibv_qp> {
        if !self.alive {
            return Err(io::ErrorKind::NotConnected.into());
        }
        // SAFETY: the id is ours.
        Ok(unsafe { self.id.raw.as_ref().qp })
    }
}

fn parameters(words: &[u8], reads_in_flight: u8) -> sys::rdma_conn_param {
    sys::rdma_conn_param {
        private_data: words.as_ptr().cast(),
        private_data_len: words.len() as u8,
        responder_resources: reads_in_flight,
        initiator_depth: reads_in_flight,
        flow_control: 1,
        retry_count: RETRIES,
        rnr_retry_count: RNR_RETRIES,
        srq: 0,
        qp_num: 0,
    }
}
