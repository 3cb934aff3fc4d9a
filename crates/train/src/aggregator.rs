//! [`Aggregator`] and [`Through`]: means by parameter servers, and an optimizer's step there.
//!
//! The rule it keeps: vectors are summed in the order of ranks, never in that of arrival, so a seed
//! decides every bit, and the number of aggregators none. No party is waited for beyond the
//! deadline, and a missing one is named.
//!
//! Each aggregator of a group has an equal part of the vector. A worker WRITEs its part into an
//! area that it alone holds there (*push*), and announces it by a ring in the same area. When all
//! parts have come, the aggregator shows the result on a board: the mean of parameters, or, for
//! gradients, the parameters that its optimizer has changed. Workers READ the result there by
//! themselves (*pull*). The board has two versions: the next one is written beside the one that is
//! read, and begun only when all members have pushed again. A worker reads the version's number
//! once more after the parameters, so torn parameters are never taken.
//!
//! Where groups change from round to round, an aggregator serves the group of its number in each
//! round. It has areas and a board for each of these groups.
//!
//! Where a READ can wait for a number ([`Channel::waits_for_numbers`]), a worker posts push and
//! pull together, and a step is one exchange of messages. Elsewhere the worker polls the number.
//!
//! [`Channel::waits_for_numbers`]: farpage_fabric::Channel::waits_for_numbers

mod error;
mod layout;
mod line;
mod link;
mod protocol;
mod server;
mod state;
mod summing;
mod through;

pub use self::{
    error::AggregateError,
    layout::Layout,
    protocol::Party,
    server::{Aggregator, AggregatorCourse},
    state::StateError,
    through::Through,
};
