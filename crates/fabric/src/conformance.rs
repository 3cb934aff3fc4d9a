//! The suite that every fabric must pass.
//!
//! The rule it keeps: it knows nothing about a fabric but how to begin a session, so that a new
//! transport adds one line to the tests. A test calls [`check`] with a [`Fabric`]; a failed
//! expectation panics with its story. A server's policy (leases that expire, capacity over several
//! clients) is left to the server's tests.

mod atomics;
mod boards;
mod death;
mod kit;
mod leases;
mod moves;

use std::sync::Arc;

pub use boards::check_boards;

use crate::Session;

/// Upper bound of the bytes that the suite holds at a time: a server needs a little more.
pub const NEEDED_BYTES: u64 = 64 << 20;

/// A fabric with a live server.
pub struct Fabric<'a> {
    /// Start of another session at the same server, with an operation deadline of at most 5
    /// seconds.
    pub connect: &'a (dyn Fn() -> Arc<Session> + Sync),
    /// Abrupt end of the server, without a goodbye. The suite connects no more after that.
    pub kill: Box<dyn FnOnce() + 'a>,
    /// True if the memory that a killed server lent stays: over shared memory, when its process is
    /// another one.
    pub memory_stays: bool,
}

/// Runs the suite, each part in sessions of its own; ends with the server's death.
///
/// # Panics
/// When the fabric breaks a promise of [`Channel`](crate::Channel) or [`Session`].
pub fn check(fabric: Fabric<'_>) {
    let connect = fabric.connect;
    moves::reads_its_own_writes_at_every_size(&connect());
    moves::many_in_flight_end_exactly_once_each_with_its_own_bytes(&connect());
    moves::a_full_queue_hands_the_operation_back(&connect());
    leases::addresses_beyond_the_extent_are_refused(&connect());
    leases::another_clients_extent_is_refused(&connect(), &connect());
    leases::fresh_memory_is_zero_also_after_release_and_regrant(&connect());
    leases::released_extents_are_refused(&connect());
    leases::too_much_memory_is_a_typed_error_and_the_session_goes_on(&connect());
    moves::channels_of_several_threads_do_not_mix_their_bytes(&connect());
    atomics::atomics_return_the_old_value_and_change_their_word_alone(&connect());
    atomics::atomics_outside_of_leases_or_between_words_are_refused(&connect(), &connect());
    atomics::counting_over_many_channels_loses_nothing(&connect());
    atomics::compare_and_swap_makes_a_lock(&connect());
    leases::a_named_region_outlives_its_session(connect);
    leases::readers_share_a_version_and_cannot_write_it(connect);
    moves::an_idle_channel_asks_for_no_wake_up(&connect());
    match fabric.memory_stays {
        true => death::memory_stays_when_its_server_dies(&connect(), fabric.kill),
        false => death::death_ends_everything_in_bounded_time(&connect(), fabric.kill),
    }
}
