//! Page protocol, residency budget, fillers and evictors.
#![forbid(unsafe_code)]

pub mod protocol;
